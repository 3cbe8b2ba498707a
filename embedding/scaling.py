"""What the loss was multiplied with, read when gradients are there and without waiting for a GPU (section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from .optimizer import GradScale


def read_scale(scale: GradScale | torch.amp.GradScaler | None) -> float | Tensor:
    """The scale of the backward under way.

    A scaler's scale stays on its device: reading it there would synchronise. It is copied, since the scaler changes it
    in place before deferred updates use it.

    Args:
        scale: A GradScaler, a function that returns a number or a tensor of one element, or None for 1.

    Example:
        >>> read_scale(lambda: 1024.0), read_scale(None)
        (1024.0, 1.0)
    """
    if scale is None:
        return 1.0
    if isinstance(scale, torch.amp.GradScaler):
        if not scale.is_enabled():
            return 1.0
        kept = scale._get_scale_async()
        return scale.get_scale() if kept is None else kept.clone()
    current = scale()
    return current.detach().clone() if isinstance(current, Tensor) else float(current)
