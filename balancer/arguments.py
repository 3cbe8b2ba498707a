"""Reads what `balance` is given: refuses what it cannot do, finds the columns that are named (paper, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from ..transport import Transport
from .protocol.selection import Selection

Jagged = Mapping[str, str | tuple[str, ...]]


def check_arguments(
    transport: object, lengths: object, partitioner: object, jagged: object, prefetch: object, pin_memory: bool
) -> None:
    """Refuse what no later check would name."""
    if not isinstance(transport, Transport):
        raise TypeError(f"transport must come from freescale.transport.connect, got {type(transport).__name__}")
    if isinstance(partitioner, type):
        raise TypeError(f"partitioner must be made first: pass {partitioner.__name__}(…), not the class")
    if not callable(partitioner):
        raise TypeError(f"partitioner must be callable, got {type(partitioner).__name__}")
    if not (callable(lengths) or isinstance(lengths, str | Sequence)):
        place = f"; a field of a tuple or list is named by its place, as text: {str(lengths)!r}"
        raise TypeError(
            f"lengths must be a column, several, or a function of the batch, got {type(lengths).__name__}"
            f"{place if isinstance(lengths, int) else ''}"
        )
    if jagged is not None and not isinstance(jagged, Mapping):
        raise TypeError(f"jagged must be a dict of values field → lengths field, got {jagged!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
        raise ValueError(f"prefetch must be an integer of at least 1, got {prefetch!r}")
    if pin_memory and not torch.cuda.is_available():
        raise ValueError("pin_memory=True needs a GPU, and torch sees none here")


def refuse_in_worker() -> None:
    """Raise RuntimeError inside a DataLoader worker."""
    if get_worker_info() is not None:
        raise RuntimeError(
            "balance() works between ranks, not inside a DataLoader worker, where every worker would take part as the "
            "same rank; wrap the DataLoader instead of its dataset"
        )


def select_columns(
    lengths: str | Sequence[str] | Callable[[Any], Tensor],
    candidates: str | None,
    gather: Sequence[str],
    drop_small: bool,
    jagged: Jagged,
) -> Selection:
    """What every batch is asked for, by the columns that hold it. Raises ValueError when `lengths` names none."""
    names = () if callable(lengths) else (lengths,) if isinstance(lengths, str) else tuple(lengths)
    if not names and not callable(lengths):
        raise ValueError("lengths must name at least one column, or be a function of the batch; got none")
    names = tuple(_values_field(name, jagged) for name in names)
    candidates = None if candidates is None else _values_field(candidates, jagged)
    return Selection(names, candidates, tuple(dict.fromkeys(gather)), drop_small)


def _values_field(name: str, jagged: Jagged) -> str:
    """The column that a name stands for: lengths given as a field of their own belong to their values' column."""
    for values, fields in jagged.items():
        if name in ((fields,) if isinstance(fields, str) else fields):
            return values
    return name


def lengths_from(measure: Callable[[Any], Any], batch: object, batch_size: int) -> NDArray[np.int64]:
    """What a `lengths=` function gives for a batch, as int64. Raises ValueError when that fails or is none."""
    try:
        lengths = measure(batch)
    except Exception as error:
        raise ValueError(f"the function given as lengths= raised {type(error).__name__}: {error}") from error
    if isinstance(lengths, np.ndarray):
        lengths = torch.from_numpy(lengths)
    if not isinstance(lengths, Tensor) or lengths.shape != (batch_size,) or lengths.dtype.is_floating_point:
        got = type(lengths).__name__
        if isinstance(lengths, Tensor):
            got = f"{lengths.dtype} of shape {list(lengths.shape)}"
        raise ValueError(f"lengths= must give a tensor of integers of shape [{batch_size}], got {got}")
    return lengths.long().numpy()
