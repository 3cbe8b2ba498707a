"""Gather byte ranges that lie anywhere in host memory into one buffer, in one call that holds no GIL.

This is the CPU half of the paper's indexed permute, ranged dispatch and ranged combine (section 4.2). Torch has no such
operation: index_select works element by element, and `torch.cat` of slices pays microseconds a slice. Arrow's `take`
over variable-length binary values is a plain C++ loop of memcpy over ranges, so the ranges are presented to Arrow as
the values of a binary array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import pyarrow as pa

_REACH = 2**62  # said to be the size of the address range; never touched beyond the ranges asked for


def gather_ranges(addresses: NDArray[np.int64], sizes: NDArray[np.int64], dtype: torch.dtype = torch.uint8) -> Tensor:
    """Copy byte ranges, one after the other, into a new buffer.

    The caller answers for the memory: every range must be readable host memory that stays alive during the call.

    Args:
        addresses: First byte of each range, absolute. Shape [n], int64. Ranges may overlap and repeat, in any order.
        sizes: Bytes of each range, not negative. Shape [n], int64.
        dtype: What the bytes are; their number must be a multiple of its size.

    Returns:
        The bytes as elements of `dtype`. Shape [sizes.sum() / dtype.itemsize], 64-byte aligned, owned by the tensor.

    Example:
        >>> text = torch.tensor(list(b"the free scale"), dtype=torch.uint8)
        >>> bytes(gather_ranges(text.data_ptr() + np.array([9, 4, 3]), np.array([5, 4, 0]))).decode()
        'scalefree'
    """
    total = int(sizes.sum())
    if total == 0:
        return torch.empty(0, dtype=dtype)
    base = int(addresses.min())
    taken = _gather(base, addresses - base, sizes, total)
    return torch.frombuffer(taken, dtype=dtype, count=total // dtype.itemsize)


def gather_parts(addresses: NDArray[np.int64], sizes: NDArray[np.int64], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Copy several lists of byte ranges, each into a tensor, in one call that holds no GIL.

    As one `gather_ranges` for each list, but other threads get in between once instead of once a list. The tensors lie
    in one buffer, which lives as long as one of them; small ones are copied out of it, so that a tensor keeps at most
    four times its own size alive.

    Args:
        addresses: As for `gather_ranges`, one list a row. Shape [parts, n], int64.
        sizes: Bytes of each range. Shape [parts, n], int64.
        dtypes: What the bytes of each list are; their number must be a multiple of its size.

    Returns:
        One flat tensor a list.

    Example:
        >>> text = torch.tensor(list(b"the free scale"), dtype=torch.uint8)
        >>> at, sizes = np.array([[9, 4], [0, 4]]), np.array([[5, 4], [0, 3]])
        >>> [bytes(part).decode() for part in gather_parts(text.data_ptr() + at, sizes, [torch.uint8] * 2)]
        ['scalefree', 'fre']
    """
    totals = sizes.sum(axis=1)
    padding = -totals % _ALIGNMENT
    ends = (totals + padding).cumsum()
    if len(dtypes) == 1 or not 0 < ends[-1] <= _MOST_TOGETHER:
        return [gather_ranges(*part) for part in zip(addresses, sizes, dtypes, strict=True)]
    slack = np.full((len(totals), 1), _PADDING_AT)
    flat = np.concatenate([addresses, slack], axis=1).reshape(-1)
    flat_sizes = np.concatenate([sizes, padding.reshape(-1, 1)], axis=1).reshape(-1)
    base, together = int(flat.min()), int(ends[-1])
    taken = _gather(base, flat - base, flat_sizes, together)
    starts = (ends - totals - padding).tolist()
    parts: list[Tensor] = []
    for start, total, dtype in zip(starts, totals.tolist(), dtypes, strict=True):
        if not total:
            parts.append(torch.empty(0, dtype=dtype))
            continue
        part = torch.frombuffer(taken, dtype=dtype, count=total // dtype.itemsize, offset=start)
        parts.append(part if 4 * total >= together else part.clone())
    return parts


def gather_rows(values: Tensor, starts: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> Tensor:
    """Copy ranges of rows, one after the other, into a new tensor.

    Args:
        values: Contiguous. Shape [L, ...], any dtype.
        starts: First row of each range, checked. Shape [n], int64.
        lengths: Rows of each range, checked. Shape [n], int64.
        count: `lengths.sum()`.

    Returns:
        Shape [count, ...].

    Example:
        >>> gather_rows(torch.arange(9), np.array([7, 0]), np.array([2, 3]), 5).tolist()
        [7, 8, 0, 1, 2]
    """
    width = math.prod(values.shape[1:])
    size = values.element_size() * width
    if size == 0 or count == 0:
        return values.new_empty((count, *values.shape[1:]))
    taken = _gather(values.data_ptr(), starts * size, lengths * size, count * size)
    rows = torch.frombuffer(taken, dtype=values.dtype, count=count * width)
    return rows if values.dim() == 1 else rows.view(count, *values.shape[1:])


def _gather(base: int, begins: NDArray[np.int64], sizes: NDArray[np.int64], total: int) -> pa.Buffer:
    """Copy ranges that begin so many bytes behind `base` into a buffer of Arrow's; `total`, their bytes, is over 0."""
    n = len(begins)
    # Values 0, 2, 4, … of the array are the ranges; the values between them span from the end of one range to the
    # start of the next, may be negative, and are never taken. Arrow reserves (mean value length * values taken) bytes,
    # so the last offset is set to make that estimate right.
    offsets = np.empty((n + 1, 2), dtype=np.int64)
    offsets[:n, 0] = begins
    np.add(begins, sizes, out=offsets[:n, 1])
    first = offsets[0, 0]
    offsets[n] = first, first + total * (2 * n + 1) // n + 256
    return _arrow()(n, offsets, base)


_ALIGNMENT = 64
_PADDING = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device="cpu")
_PADDING_AT = _PADDING.data_ptr()
_MOST_TOGETHER = 16 * 2**20  # bytes; beyond, a call more is nothing, and smaller buffers are easier to find room for
_MANY = 1 << 12


@functools.cache
def _arrow() -> Callable[[int, NDArray[np.int64], int], pa.Buffer]:
    """Import Arrow at the first copy, since that takes a tenth of a second, and give what takes every other value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    take: Any = pc.get_function("array_take").call
    unchecked = pc.TakeOptions(boundscheck=False)  # checking costs a third of small copies
    every_other = pa.array(np.arange(0, 2 * _MANY, 2))
    binary = pa.large_binary()

    def take_every_other(n: int, offsets: NDArray[np.int64], base: int) -> pa.Buffer:
        buffers = [None, pa.py_buffer(offsets), pa.foreign_buffer(base, _REACH)]
        ranges = pa.LargeBinaryArray.from_buffers(binary, 2 * n + 1, buffers)
        places = every_other.slice(0, n) if n <= _MANY else pa.array(np.arange(0, 2 * n, 2))
        return take([ranges, places], unchecked).buffers()[2]

    return take_every_other
