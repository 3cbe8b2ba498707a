"""Copy short ranges of rows on the host row by row, by an index that NumPy spells out (paper, section 4.2).

Arrow finds a range in as long as it takes to find some ten rows, and needs longer to begin.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDE = 16  # bytes of a row, from which on a row costs more than its index
_FEW_NARROW, _FEW_WIDE = 1 << 13, 1 << 14  # rows in all up to which ranges may have any length
_FEW_A_RANGE = 4  # rows of each range besides
_LARGEST_BYTES = 8 * 2**20  # beyond, Arrow's allocator keeps memory that malloc would fetch anew, page by page
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OWN = frozenset((torch.int64, torch.int32, torch.float32, torch.float64, torch.complex128))  # NumPy's types, too


def row_bytes(values: Tensor) -> int:
    """Bytes of one row."""
    size = values.element_size()
    return size if values.dim() == 1 else size * math.prod(values.shape[1:])


def serves(values: list[Tensor], num_ranges: int, count: int) -> bool:
    """Whether so many rows in so many ranges are copied faster than by `gather_rows`."""
    for tensor in values:
        size = row_bytes(tensor)
        most = (_FEW_WIDE if size >= WIDE else _FEW_NARROW) + _FEW_A_RANGE * num_ranges
        if count > most or count * size > _LARGEST_BYTES:
            return False
    return True


def row_index(starts: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Spell out ranges of rows, one index a row.

    Args:
        starts: First row of each range. Shape [n].
        lengths: Rows of each range, not negative. Shape [n].
        count: `lengths.sum()`.

    Returns:
        `starts[0], starts[0] + 1, …, starts[1], …`. Shape [count].

    Example:
        >>> row_index(np.array([7, 0]), np.array([2, 3]), 5).tolist()
        [7, 8, 0, 1, 2]
    """
    before = np.add.accumulate(lengths) - lengths
    index: NDArray[np.int64] = (starts - before).repeat(lengths)
    counting = _counting()
    index += counting[:count] if count <= counting.size else np.arange(count)
    return index


@functools.cache
def _counting() -> NDArray[np.int64]:
    return np.arange(_FEW_WIDE)


def take_rows(values: Tensor, index: NDArray[np.int64]) -> Tensor:
    """Rows of a tensor.

    Args:
        values: Contiguous. Shape [L, ...], any dtype.
        index: From 0 to L - 1. Shape [n].

    Returns:
        Shape [n, ...].

    Example:
        >>> take_rows(torch.tensor([[True, False], [True, True]]), np.array([1, 1])).tolist()
        [[True, True], [True, True]]
    """
    if values.dtype in _OWN:
        return torch.from_numpy(np.from_dlpack(_Borrowed(values)).take(index, 0))
    words = values.detach().view(_WORDS[values.element_size()])
    return torch.from_numpy(np.from_dlpack(_Borrowed(words)).take(index, 0)).view(values.dtype)


class _Borrowed:
    """A tensor's memory, for NumPy to read. `Tensor.numpy` would keep the tensor from being resized ever after."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_kwargs: Any) -> Any:
        return torch.to_dlpack(self._tensor)  # type: ignore[attr-defined]  # documented, but not said to be exported

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # host memory
