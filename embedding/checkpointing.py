"""Lookups inside activation checkpointing are refused: run twice, they would be two iterations (section 3.2)."""

from __future__ import annotations

from typing import Any

import torch

from .errors import EmbeddingError

_autograd: Any = torch._C


def refuse_checkpointing() -> None:
    """Raise when this forward runs under `torch.utils.checkpoint`, first or recomputed.

    Raises:
        EmbeddingError: It does.
    """
    recomputed = _autograd._current_graph_task_id() != -1
    hooks = _autograd._autograd._top_saved_tensors_default_hooks(True)
    checkpointed = hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
    if recomputed or checkpointed:
        raise EmbeddingError(
            "lookups of prioritized embeddings must be outside of activation checkpointing: one that is recomputed in "
            "backward would be another iteration; look up first, and checkpoint what uses the result"
        )
