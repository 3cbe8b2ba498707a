"""The jagged operations on host memory: checks, then one call that copies for each tensor (paper, section 4.2).

A call that copies little costs what its checks cost, so each check is one pass of NumPy's, and only a failure looks at
what failed.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import host_fbgemm, reference
from .host_copy import gather_ranges, gather_rows

_Integers = NDArray[np.int64]
_sum, _least, _most = np.add.reduce, np.minimum.reduce, np.maximum.reduce  # without the methods' Python wrappers


def permute_jagged(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.permute_jagged`."""
    all_lengths, chosen = _integers(lengths), _integers(rows)
    _check_jagged(values, all_lengths)
    # Negative numbers are huge ones without a sign.
    if len(chosen) and int(_most(chosen.view(np.uint64))) >= len(all_lengths):
        raise ValueError(f"rows must be from 0 to {len(all_lengths) - 1}, got {chosen.min()} to {chosen.max()}")
    moved = _permute(values, lengths, rows, all_lengths, chosen, total)
    return moved, lengths.index_select(0, rows)


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    """CPU path of `freescale.kernels.dispatch_ranges`."""
    first, sizes = _integers(starts), _integers(lengths)
    _check_ranges(first, sizes, values[0].shape[0], "rows of values")
    count = _checked_total(sizes, total)
    return [gather_rows(tensor.contiguous(), first, sizes, count) for tensor in values]


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
    return _scatter(values, sizes, order, begins, sorted_sizes, size)


def sum_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of the gradient of `dispatch_ranges`: a plain copy unless ranges overlap."""
    first, sizes = _integers(starts), _integers(lengths)
    order = _ascending(first, sizes)
    begins, sorted_sizes = first.take(order), sizes.take(order)
    if _first_overlap(begins, sorted_sizes) is None:
        return _scatter(values, sizes, order, begins, sorted_sizes, size)
    return [reference.sum_ranges(tensor, starts, lengths, size) for tensor in values]


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.transpose_keyed`."""
    flat = lengths.reshape(-1)
    sizes = _integers(flat)
    _check_jagged(values, sizes)
    order = np.arange(len(sizes)).reshape(lengths.shape).T.reshape(-1)
    moved = _permute(values, flat, torch.from_numpy(order), sizes, order, None)
    return moved, lengths.t().contiguous()


def _permute(
    values: list[Tensor], lengths: Tensor, rows: Tensor, all_lengths: _Integers, chosen: _Integers, total: int | None
) -> list[Tensor]:
    """Permute checked rows, given as tensors and as arrays."""
    sizes = all_lengths.take(chosen)
    count = _checked_total(sizes, total)
    values = [tensor.contiguous() for tensor in values]
    if all(host_fbgemm.serves(tensor, count) for tensor in values):
        lengths, rows = lengths.contiguous(), rows.to(torch.int32).contiguous()
        return [host_fbgemm.permute_rows(tensor, lengths, rows, count) for tensor in values]
    starts = (np.add.accumulate(all_lengths) - all_lengths).take(chosen)
    return [gather_rows(tensor, starts, sizes, count) for tensor in values]


def _integers(tensor: Tensor) -> _Integers:
    numbers: _Integers = tensor.numpy()
    return numbers if numbers.dtype == np.int64 else numbers.astype(np.int64)


def _check_jagged(values: list[Tensor], lengths: _Integers) -> None:
    rows = values[0].shape[0]
    if len(lengths) and _least(lengths) < 0:
        _refuse_negative(lengths)
    if rows != _sum(lengths):
        raise ValueError(f"lengths must add up to the rows of values ({rows}), got {lengths.sum()}")


def _check_ranges(starts: _Integers, lengths: _Integers, limit: int, limit_name: str) -> None:
    if not len(starts):
        return
    if _least(starts | lengths) >= 0 and int(_most((starts + lengths).view(np.uint64))) <= limit:
        return  # what is above 2^63 has no sign
    if lengths.min() < 0:
        _refuse_negative(lengths)
    i = int(((starts < 0) | (starts > limit - lengths)).argmax())
    raise ValueError(
        f"starts and lengths must stay within {limit_name} ({limit}), "
        f"got [{starts[i]}, {starts[i] + lengths[i]}) at {i}"
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
    values: list[Tensor], sizes: _Integers, order: _Integers, starts: _Integers, lengths: _Integers, size: int
) -> list[Tensor]:
    """Gather the pieces in the order of their places, with zeros for the gaps between them.

    `starts` and `lengths` are the pieces' in that order, `sizes` all lengths as they lie.
    """
    offsets = (np.add.accumulate(sizes) - sizes).take(order)
    if values[0].shape[0] == size:  # nothing is left uncovered
        return [gather_rows(tensor.contiguous(), offsets, lengths, size) for tensor in values]
    ends = np.concatenate([[0], starts + lengths])
    gaps = np.concatenate([starts, [size]]) - ends
    return [_scatter_rows(tensor.contiguous(), offsets, lengths, gaps, size) for tensor in values]


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
