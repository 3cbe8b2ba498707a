"""Checks a saved state before it is taken over: files come from anywhere (beside the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def refuse_other_states(state: object, own: Mapping[str, Any]) -> None:
    """Compare a state with what `state_dict()` gives here: names, types, dtypes, dimensions.

    Tensors whose names begin with "rank_" have one entry a rank, so any length will do.

    Raises:
        TypeError: It is no dict.
        ValueError: Names the first entry that differs.

    Example:
        >>> import torch
        >>> refuse_other_states({"rank_step": 3}, {"rank_step": torch.zeros(2)})
        Traceback (most recent call last):
        ...
        ValueError: state: rank_step must be a tensor of float32 with 1 dimension(s), got int
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
    for name, mine in own.items():
        given = state.get(name)
        if not isinstance(mine, Tensor):
            if type(given) is not type(mine):
                raise ValueError(f"state: {name} must be {type(mine).__name__}, got {type(given).__name__}")
            continue
        alike = isinstance(given, Tensor) and (given.dtype, given.dim()) == (mine.dtype, mine.dim())
        if not isinstance(given, Tensor) or not alike or not (name.startswith("rank_") or given.shape == mine.shape):
            wanted = f"{str(mine.dtype).removeprefix('torch.')} with {mine.dim()} dimension(s)"
            found = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"state: {name} must be a tensor of {wanted}, got {found}")
