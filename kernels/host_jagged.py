"""The jagged operations on host memory: checks, then one call that copies for each tensor (paper, section 4.2).

A call that copies little costs what its checks cost, so each check is one pass of NumPy's, and only a failure looks at
what failed.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import host_fbgemm, reference
from .host_copy import gather_ranges, gather_rows

_Integers = NDArray[np.int64]
_sum, _least, _most = np.add.reduce, np.minimum.reduce, np.maximum.reduce  # without the methods' Python wrappers
_FEW = 4  # ranges, of which torch copies each by itself before Arrow is ready
_MANY = 1 << 12  # ranges of less than a row each, which torch copies row by row before Arrow has found each


def permute_jagged(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.permute_jagged`."""
    try:
        permuted = lengths.index_select(0, rows)
    except IndexError:
        raise ValueError(f"rows must be from 0 to {len(lengths) - 1}, got {rows.min()} to {rows.max()}") from None
    all_lengths, sizes = _integers(lengths), _integers(permuted)
    _check_jagged(values, all_lengths)
    count = _checked_total(sizes, total)
    values = [tensor.contiguous() for tensor in values]
    if _fbgemm_serves(values, count):
        return _permuted_by_fbgemm(values, lengths, rows.int(), count), permuted
    starts = (np.add.accumulate(all_lengths) - all_lengths).take(rows.numpy())
    return _gather(values, starts, sizes, count), permuted


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    """CPU path of `freescale.kernels.dispatch_ranges`."""
    first, sizes = _integers(starts), _integers(lengths)
    _check_ranges(first, sizes, values[0].shape[0], "rows of values")
    count = _checked_total(sizes, total)
    values = [tensor.contiguous() for tensor in values]
    if _fbgemm_serves(values, count):
        pieces = host_fbgemm.stretches(first, sizes)
        return [host_fbgemm.gather_rows(tensor, pieces, count) for tensor in values]
    return _gather(values, first, sizes, count)


def combine_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of `freescale.kernels.combine_ranges`."""
    first, sizes = _integers(starts), _integers(lengths)
    _check_ranges(first, sizes, size, "size")
    _check_jagged(values, sizes)
    order = _ascending(first, sizes)
    begins, sorted_sizes = first.take(order), sizes.take(order)
    clash = _first_overlap(begins, sorted_sizes)
    if clash is not None:
        earlier, later = (f"[{begins[i]}, {begins[i] + sorted_sizes[i]})" for i in (clash, clash + 1))
        raise ValueError(f"ranges must not overlap, got {earlier} and {later}")
    return _scatter(values, lengths, order, begins, sorted_sizes, size)


def sum_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of the gradient of `dispatch_ranges`: a plain copy unless ranges overlap."""
    first, sizes = _integers(starts), _integers(lengths)
    order = _ascending(first, sizes)
    begins, sorted_sizes = first.take(order), sizes.take(order)
    if _first_overlap(begins, sorted_sizes) is None:
        return _scatter(values, lengths, order, begins, sorted_sizes, size)
    return [reference.sum_ranges(tensor, starts, lengths, size) for tensor in values]


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.transpose_keyed`."""
    flat, transposed = lengths.reshape(-1), lengths.t().contiguous()
    sizes, count = _integers(flat), values[0].shape[0]
    _check_jagged(values, sizes)
    values = [tensor.contiguous() for tensor in values]
    if _fbgemm_serves(values, count):
        return _permuted_by_fbgemm(values, flat, _transposed_order(*lengths.shape), count), transposed
    starts = (np.add.accumulate(sizes) - sizes).reshape(lengths.shape).T.reshape(-1)
    return _gather(values, starts, _integers(transposed.view(-1)), count), transposed


@functools.lru_cache(maxsize=8)
def _transposed_order(num_keys: int, num_samples: int) -> Tensor:
    return torch.arange(num_keys * num_samples, dtype=torch.int32).view(num_keys, num_samples).t().reshape(-1)


def _gather(values: list[Tensor], starts: _Integers, sizes: _Integers, count: int) -> list[Tensor]:
    """Copy checked ranges without FBGEMM, in the way that is fastest for so many of such lengths."""
    if 0 < len(starts) <= _FEW:
        ranges = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        return [torch.cat([tensor[start : start + size] for start, size in ranges]) for tensor in values]
    if len(starts) >= _MANY and count <= len(starts):
        index = reference.row_indices(torch.from_numpy(starts), torch.from_numpy(sizes))
        return [tensor.index_select(0, index) for tensor in values]
    return [gather_rows(tensor, starts, sizes, count) for tensor in values]


def _fbgemm_serves(values: list[Tensor], count: int) -> bool:
    return host_fbgemm.is_loaded() and all(host_fbgemm.serves(tensor, count) for tensor in values)


def _permuted_by_fbgemm(values: list[Tensor], lengths: Tensor, rows: Tensor, count: int) -> list[Tensor]:
    lengths, rows = lengths.contiguous(), rows.contiguous()
    return [host_fbgemm.permute_rows(tensor, lengths, rows, count) for tensor in values]


def _integers(tensor: Tensor) -> _Integers:
    numbers: _Integers = tensor.numpy()
    return numbers if tensor.dtype is torch.int64 else numbers.astype(np.int64)


def _check_jagged(values: list[Tensor], lengths: _Integers) -> None:
    rows = values[0].shape[0]
    # One pass tells of negative lengths, too, and of ones so large that their sum would begin anew at 0.
    fits = not len(lengths) or _most(lengths.view(np.uint64)) <= rows
    if fits and rows == _sum(lengths):
        return
    if lengths.min(initial=0) < 0:
        _refuse_negative(lengths)
    raise ValueError(f"lengths must add up to the rows of values ({rows}), got {sum(lengths.tolist())}")


def _check_ranges(starts: _Integers, lengths: _Integers, limit: int, limit_name: str) -> None:
    ends = starts + lengths  # negative beyond 2^63
    signs = limit - ends
    signs |= ends
    signs |= starts
    signs |= lengths
    if not len(signs) or _least(signs) >= 0:
        return
    if lengths.min() < 0:
        _refuse_negative(lengths)
    i = int(((starts < 0) | (starts > limit - lengths)).argmax())
    raise ValueError(
        f"starts and lengths must stay within {limit_name} ({limit}), "
        f"got [{starts[i]}, {int(starts[i]) + int(lengths[i])}) at {i}"
    )


def _refuse_negative(lengths: _Integers) -> NoReturn:
    raise ValueError(f"lengths must not be negative, got {lengths.min()}")


def _ascending(starts: _Integers, lengths: _Integers) -> _Integers:
    """Indices of the ranges that hold anything, by start."""
    if np.count_nonzero(lengths) == len(lengths):
        return starts.argsort(kind="stable")
    filled = np.flatnonzero(lengths)
    return filled[starts[filled].argsort(kind="stable")]


def _first_overlap(starts: _Integers, lengths: _Integers) -> int | None:
    """Index of the first of the ascending ranges that reaches into its follower."""
    overlaps = starts[:-1] + lengths[:-1] > starts[1:]
    first = int(overlaps.argmax()) if len(overlaps) else 0
    return first if len(overlaps) and overlaps[first] else None


def _checked_total(lengths: _Integers, total: int | None) -> int:
    found = int(_sum(lengths))
    if total is not None and total != found:
        raise ValueError(f"total must be the sum of the lengths ({found}), got {total}")
    return found


def _scatter(
    values: list[Tensor], lengths: Tensor, order: _Integers, starts: _Integers, sizes: _Integers, size: int
) -> list[Tensor]:
    """Gather the pieces in the order of their places, with zeros for the gaps between them.

    `starts` and `sizes` are the pieces' in that order, `lengths` all lengths as they lie.
    """
    values = [tensor.contiguous() for tensor in values]
    covered = values[0].shape[0] == size  # nothing is left over
    if covered and _fbgemm_serves(values, size):
        return _permuted_by_fbgemm(values, lengths, torch.from_numpy(order).int(), size)
    as_they_lie = _integers(lengths)
    offsets = (np.add.accumulate(as_they_lie) - as_they_lie).take(order)
    if covered:
        return _gather(values, offsets, sizes, size)
    ends = np.concatenate([[0], starts + sizes])
    gaps = np.concatenate([starts, [size]]) - ends
    return [_scatter_rows(tensor, offsets, sizes, gaps, size) for tensor in values]


def _scatter_rows(values: Tensor, offsets: _Integers, lengths: _Integers, gaps: _Integers, size: int) -> Tensor:
    row_bytes = host_fbgemm.row_bytes(values)
    if row_bytes == 0 or size == 0:
        return values.new_empty((size, *values.shape[1:]))
    zeros = torch.zeros(int(gaps.max()) * row_bytes, dtype=torch.uint8)
    addresses = _between(np.full(len(gaps), zeros.data_ptr()), values.data_ptr() + offsets * row_bytes)
    sizes = _between(gaps * row_bytes, lengths * row_bytes)
    return gather_ranges(addresses, sizes).view(values.dtype).view(size, *values.shape[1:])


def _between(outer: _Integers, inner: _Integers) -> _Integers:
    """`outer[0], inner[0], outer[1], …, outer[-1]`."""
    woven = np.empty(len(outer) + len(inner), dtype=np.int64)
    woven[::2], woven[1::2] = outer, inner
    return woven
