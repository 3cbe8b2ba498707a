"""Gather byte ranges that lie anywhere in host memory into one buffer, in one call that holds no GIL.

This is the CPU half of the paper's indexed permute, ranged dispatch and ranged combine (section 4.2). Torch has no such
operation: index_select works element by element, and `torch.cat` of slices pays microseconds a slice. Arrow's `take`
over variable-length binary values is a plain C++ loop of memcpy over ranges, so the ranges are presented to Arrow as
the values of a binary array.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import pyarrow as pa

_ORIGIN = 64  # address that offsets count from; none is below it
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
    total = int(_sum(sizes))
    if total == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(_gather(addresses, sizes, total), dtype=dtype, count=total // dtype.itemsize)


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
    if len(dtypes) == 1:
        return [gather_ranges(addresses[0], sizes[0], dtypes[0])]
    totals = _sum(sizes, axis=1)
    padding = -totals % _ALIGNMENT
    ends = _accumulate(totals + padding)
    if not 0 < ends[-1] <= _MOST_TOGETHER:
        return [gather_ranges(*part) for part in zip(addresses, sizes, dtypes, strict=True)]
    flat, flat_sizes = np.empty((2, len(totals), sizes.shape[1] + 1), np.int64)
    flat[:, :-1], flat[:, -1], flat_sizes[:, :-1], flat_sizes[:, -1] = addresses, _PADDING_AT, sizes, padding
    together = int(ends[-1])
    taken = _gather(flat.reshape(-1), flat_sizes.reshape(-1), together)
    memory = memoryview(taken)
    starts = (ends - totals - padding).tolist()
    parts: list[Tensor] = []
    for start, total, dtype in zip(starts, totals.tolist(), dtypes, strict=True):
        if 4 * total >= together:
            parts.append(torch.frombuffer(taken, dtype=dtype, count=total // dtype.itemsize, offset=start))
        elif total:  # copied without torch, which would let other threads in three times
            parts.append(torch.frombuffer(bytearray(memory[start : start + total]), dtype=dtype))
        else:
            parts.append(torch.empty(0, dtype=dtype))
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
    taken = _gather(starts * size + values.data_ptr(), lengths * size, count * size)
    rows = torch.frombuffer(taken, dtype=values.dtype, count=count * width)
    return rows if values.dim() == 1 else rows.view(count, *values.shape[1:])


def _gather(addresses: NDArray[np.int64], sizes: NDArray[np.int64], total: int) -> pa.Buffer:
    """Copy ranges into a buffer of Arrow's; `total`, their bytes, is over 0."""
    n = len(addresses)
    # Out of its place while it is in use: a finalizer that runs meanwhile may gather too.
    ranges, _kept.ranges = _kept.ranges, None
    if ranges is None or n > ranges.size:
        ranges = _Ranges(max(n, _MANY))
    # Values 0, 2, 4, … of the array are the ranges; the values between them span from the end of one range to the
    # start of the next, may be negative, and are never taken. Arrow reserves (mean value length * values taken) bytes,
    # so the last offset is set to make that estimate right.
    offsets = ranges.offsets
    np.subtract(addresses, _ORIGIN, out=offsets[:n, 0])
    np.add(offsets[:n, 0], sizes, out=offsets[:n, 1])
    offsets[-1, 1] = int(offsets[0, 0]) + total * (2 * ranges.size + 1) // n + 256
    taken: pa.Buffer = ranges.take(n)
    if ranges.size == _MANY:  # beyond, making one is nothing beside the copy
        _kept.ranges = ranges
    return taken


class _Ranges:
    """An Arrow array whose values are ranges of this process's memory, by the offsets that are written into it.

    Arrow takes its arrays for constant, so they may be written between its calls only. To make an array costs as much
    as to copy a few hundred ranges.

    Args:
        size: Most ranges.
    """

    def __init__(self, size: int) -> None:
        pa, self._call, self._unchecked = _arrow()
        self.size = size
        self.offsets = np.zeros((size + 1, 2), np.int64)
        buffers = [None, pa.py_buffer(self.offsets), pa.foreign_buffer(_ORIGIN, _REACH)]
        self._values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 2 * size + 1, buffers)
        self._every_other = pa.array(np.arange(0, 2 * size, 2))

    def take(self, n: int) -> Any:
        """The bytes of the first ranges: an Arrow buffer."""
        return self._call([self._values, self._every_other.slice(0, n)], self._unchecked).buffers()[2]


class _Kept(threading.local):
    """Of each thread, since arrays are in use while it holds no lock."""

    def __init__(self) -> None:
        self.ranges: _Ranges | None = None


_kept = _Kept()
_sum, _accumulate = np.add.reduce, np.add.accumulate  # without the methods' Python wrappers
_ALIGNMENT = 64
_PADDING = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device="cpu")
_PADDING_AT = _PADDING.data_ptr()
_MOST_TOGETHER = 16 * 2**20  # bytes; beyond, a call more is nothing, and smaller buffers are easier to find room for
_MANY = 1 << 13


@functools.cache
def _arrow() -> tuple[Any, Any, Any]:
    """Import Arrow at the first copy, since that takes a tenth of a second; also its `take`, and to take unchecked."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa, pc.get_function("array_take").call, pc.TakeOptions(boundscheck=False)  # a third of small copies
