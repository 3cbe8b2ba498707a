"""The jagged operations on host memory: checks, then one call that copies for each tensor (paper, section 4.2)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import host_fbgemm, host_rows, reference
from .host_checks import Integers, ends_of, ends_of_ranges, integers, taken_lengths, total_of
from .host_copy import gather_ranges, gather_rows

_UNWOVEN = 1 << 12  # rows of a dispatch, of which an index is ready before the stretches that FBGEMM wants
_FEW = 4  # ranges, of which torch copies each by itself before anything else is ready


def permute_jagged(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.permute_jagged`."""
    all_lengths = integers(lengths)
    ends = ends_of(all_lengths, values[0].shape[0])
    sizes, numbers = taken_lengths(all_lengths, rows)
    count = total_of(sizes, total)
    values = _contiguous(values)
    if host_fbgemm.serves(values, count):
        order = rows.contiguous() if rows.dtype is torch.int32 else _narrowed(numbers)
        moved, permuted = _permuted_by_fbgemm(values, lengths, order, count)
    else:
        moved, permuted = _gather(values, (ends - all_lengths).take(numbers), sizes, count), None
    return moved, torch.from_numpy(sizes).to(lengths.dtype) if permuted is None else permuted


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    """CPU path of `freescale.kernels.dispatch_ranges`."""
    first, sizes = integers(starts), integers(lengths)
    ends = ends_of_ranges(first, sizes, values[0].shape[0], "rows of values")
    count = total_of(sizes, total)
    values = _contiguous(values)
    if count > _UNWOVEN and host_fbgemm.serves(values, count):
        pieces = host_fbgemm.stretches(first, sizes, ends)
        return [host_fbgemm.gather_rows(tensor, pieces, count) for tensor in values]
    return _gather(values, first, sizes, count)


def combine_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of `freescale.kernels.combine_ranges`."""
    first, sizes = integers(starts), integers(lengths)
    ends = ends_of(sizes, values[0].shape[0])
    order = _covering_order(first, sizes, size) if values[0].shape[0] == size else None
    if order is not None:
        return _reordered(values, lengths, ends, order, size)
    ends_of_ranges(first, sizes, size, "size", known=True)
    places = _ascending(first, sizes)
    clash = _first_overlap(places)
    if clash is not None:
        earlier, later = (f"[{places.starts[i]}, {places.ends[i]})" for i in (clash, clash + 1))
        raise ValueError(f"ranges must not overlap, got {earlier} and {later}")
    return _scatter(values, lengths, ends, places, size)


def sum_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of the gradient of `dispatch_ranges`: a plain copy unless ranges overlap."""
    first, sizes = integers(starts), integers(lengths)
    ends = ends_of(sizes, values[0].shape[0])
    ends_of_ranges(first, sizes, size, "size", known=True)
    places = _ascending(first, sizes)
    if _first_overlap(places) is None:
        return _scatter(values, lengths, ends, places, size)
    return [reference.sum_ranges(tensor, starts, lengths, size) for tensor in values]


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.transpose_keyed`."""
    num_keys, num_samples = lengths.shape
    flat, count = lengths.reshape(-1), values[0].shape[0]
    sizes = integers(flat)
    ends = ends_of(sizes, count)
    order, rows = _transposed_order(num_keys, num_samples)
    values = _contiguous(values)
    if host_fbgemm.serves(values, count):
        moved, permuted = _permuted_by_fbgemm(values, flat, order, count)
    else:
        turned = sizes.take(rows)
        moved, permuted = _gather(values, (ends - sizes).take(rows), turned, count), torch.from_numpy(turned)
    if permuted is None:
        return moved, lengths.t().clone(memory_format=torch.contiguous_format)  # of one row, a view would do for torch
    if permuted.dtype is not lengths.dtype:
        permuted = permuted.to(lengths.dtype)
    return moved, permuted.view(num_samples, num_keys)


@functools.lru_cache(maxsize=8)
def _transposed_order(num_keys: int, num_samples: int) -> tuple[Tensor, Integers]:
    """Rows in their new order, as FBGEMM wants them and as NumPy does, which takes twice as long by 32 bits."""
    rows: Integers = np.arange(num_keys * num_samples).reshape(num_keys, num_samples).T.reshape(-1)
    return _narrowed(rows), rows


def _gather(values: list[Tensor], starts: Integers, sizes: Integers, count: int) -> list[Tensor]:
    """Copy checked ranges without FBGEMM, in the way that is fastest for so many of such lengths."""
    if 0 < len(starts) <= _FEW:
        ranges = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        return [torch.cat([tensor[start : start + size] for start, size in ranges]) for tensor in values]
    if host_rows.serves(values, len(starts), count):
        index = host_rows.row_index(starts, sizes, count)
        return [host_rows.take_rows(tensor, index) for tensor in values]
    return [gather_rows(tensor, starts, sizes, count) for tensor in values]


def _permuted_by_fbgemm(
    values: list[Tensor], lengths: Tensor, rows: Tensor, count: int
) -> tuple[list[Tensor], Tensor | None]:
    """Rows of every tensor in their order, and their lengths where FBGEMM has told them as they were given."""
    lengths = lengths.contiguous()
    moved, known = [], None
    for tensor in values:
        permuted, told = host_fbgemm.permute_rows(tensor, lengths, rows, count)
        moved.append(permuted)
        known = known if told is None else told
    return moved, known


def _contiguous(values: list[Tensor]) -> list[Tensor]:
    for tensor in values:
        if not tensor.is_contiguous():
            return [each.contiguous() for each in values]
    return values


def _narrowed(numbers: Integers) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


class _Places(NamedTuple):
    """Where pieces go that hold anything, in ascending order.

    Attributes:
        order: Which pieces they are.
        starts: Where each begins.
        sizes: Rows of each.
        ends: `starts + sizes`.
    """

    order: Integers
    starts: Integers
    sizes: Integers
    ends: Integers


def _ascending(starts: Integers, sizes: Integers) -> _Places:
    if np.count_nonzero(sizes) == sizes.size:
        order = starts.argsort(kind="stable")
    else:
        filled = sizes.nonzero()[0]
        order = filled.take(starts.take(filled).argsort(kind="stable"))
    begins, sorted_sizes = starts.take(order), sizes.take(order)
    return _Places(order, begins, sorted_sizes, begins + sorted_sizes)


def _first_overlap(places: _Places) -> int | None:
    """Index of the first piece that reaches into its follower."""
    if places.starts.size < 2:
        return None
    overlaps = places.ends[:-1] > places.starts[1:]
    first = int(overlaps.argmax())
    return first if overlaps[first] else None


def _covering_order(starts: Integers, lengths: Integers, size: int) -> Integers | None:
    """Pieces in the order of their places, where each begins at another's end, from 0 to `size`: as dispatched ones do.

    Of two at one place, the empty one comes first. `lengths` are checked to add up to `size`.
    """
    order: Integers = (starts + starts + lengths).argsort()
    begins, ends = starts.take(order), np.add.accumulate(lengths.take(order))
    covered = size and begins.item(0) == 0 and begins[1:].tobytes() == ends[:-1].tobytes()
    return order if covered else None


def _reordered(values: list[Tensor], lengths: Tensor, ends: Integers, order: Integers, size: int) -> list[Tensor]:
    """Pieces in a new order, in which all are that hold anything."""
    values = _contiguous(values)
    if host_fbgemm.serves(values, size):
        return _permuted_by_fbgemm(values, lengths, _narrowed(order), size)[0]
    sizes = integers(lengths).take(order)
    return _gather(values, ends.take(order) - sizes, sizes, size)


def _scatter(values: list[Tensor], lengths: Tensor, ends: Integers, places: _Places, size: int) -> list[Tensor]:
    """Gather the pieces in the order of their places, with zeros for the gaps between them.

    `lengths` and `ends` are all pieces', as they lie.
    """
    if values[0].shape[0] == size:  # nothing is left over
        return _reordered(values, lengths, ends, places.order, size)
    values = _contiguous(values)
    offsets = ends.take(places.order) - places.sizes
    gaps = np.concatenate([places.starts, [size]]) - np.concatenate([[0], places.ends])
    return [_scatter_rows(tensor, offsets, places.sizes, gaps, size) for tensor in values]


def _scatter_rows(values: Tensor, offsets: Integers, lengths: Integers, gaps: Integers, size: int) -> Tensor:
    row_bytes = host_rows.row_bytes(values)
    if row_bytes == 0 or size == 0:
        return values.new_empty((size, *values.shape[1:]))
    zeros = torch.zeros(int(gaps.max()) * row_bytes, dtype=torch.uint8)
    addresses = _between(np.full(len(gaps), zeros.data_ptr()), values.data_ptr() + offsets * row_bytes)
    sizes = _between(gaps * row_bytes, lengths * row_bytes)
    return gather_ranges(addresses, sizes).view(values.dtype).view(size, *values.shape[1:])


def _between(outer: Integers, inner: Integers) -> Integers:
    """`outer[0], inner[0], outer[1], …, outer[-1]`."""
    woven = np.empty(len(outer) + len(inner), dtype=np.int64)
    woven[::2], woven[1::2] = outer, inner
    return woven
