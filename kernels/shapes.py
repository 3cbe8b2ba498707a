"""Types and shapes that jagged operations take; no number is read for it (paper, section 4.2).

The public functions ask here, and so do the registered operators: whoever calls those directly comes past the former.
Kernels go by the first tensor's rows, so a shorter one beside it would be read beyond its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32)


def permute_jagged(values: list[Tensor], lengths: Tensor, rows: Tensor, _total: int | None) -> None:
    """Check what `freescale.kernels.permute_jagged` takes. This and the others raise TypeError and ValueError."""
    _check_integers("lengths", lengths, 1)
    _check_integers("rows", rows, 1)
    _check_tensors(values, lengths, rows)


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, _total: int | None) -> None:
    """Check what `freescale.kernels.dispatch_ranges` takes."""
    _check_pairs(starts, lengths)
    _check_tensors(values, starts, lengths)


def combine_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> None:
    """Check what `freescale.kernels.combine_ranges` takes."""
    _check_pairs(starts, lengths)
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}")
    _check_tensors(values, starts, lengths)


sum_ranges = combine_ranges


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> None:
    """Check what `freescale.kernels.transpose_keyed` takes."""
    _check_integers("lengths", lengths, 2)
    _check_tensors(values, lengths)


def _check_integers(name: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int64 or int32, got {tensor.dtype}")
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimension(s), got shape {list(tensor.shape)}")


def _check_pairs(starts: Tensor, lengths: Tensor) -> None:
    _check_integers("starts", starts, 1)
    _check_integers("lengths", lengths, 1)
    if starts.shape != lengths.shape:
        raise ValueError(f"starts and lengths must have one shape, got {len(starts)} and {len(lengths)}")


def _check_tensors(values: list[Tensor], *structure: Tensor) -> None:
    if not values:
        raise ValueError("values must hold at least one tensor, got an empty sequence")
    first, *others = values
    if first.dim() == 0 or (others and _have_other_rows(others, first.shape[0])):
        shapes = [list(each.shape) for each in values]
        raise ValueError(f"values must have rows, and the same number of them, got shapes {shapes}")
    device = first.device
    for tensor in (*others, *structure):
        if tensor.device != device:
            raise ValueError(f"all tensors must be on one device, got {device} and {tensor.device}")


def _have_other_rows(tensors: list[Tensor], rows: int) -> bool:
    return any(tensor.dim() == 0 or tensor.shape[0] != rows for tensor in tensors)
