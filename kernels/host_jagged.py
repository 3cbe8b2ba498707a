"""The jagged operations on host memory: checks, then one `gather_ranges` for each tensor (paper, section 4.2)."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import host_fbgemm, reference
from .host_copy import gather_ranges

_Integers = NDArray[np.int64]


def permute_jagged(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.permute_jagged`."""
    all_lengths, chosen = _integers("lengths", lengths), _integers("rows", rows)
    _check_jagged(values, all_lengths)
    if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(all_lengths)):
        raise ValueError(f"rows must be from 0 to {len(all_lengths) - 1}, got {chosen.min()} to {chosen.max()}")
    moved = _permute(values, lengths, rows, all_lengths, chosen, total)
    return moved, lengths.index_select(0, rows)


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    """CPU path of `freescale.kernels.dispatch_ranges`."""
    first, sizes = _integers("starts", starts), _integers("lengths", lengths)
    _check_ranges(first, sizes, len(values[0]), "rows of values")
    count = _checked_total(sizes, total)
    return [_gather_rows(tensor.contiguous(), first, sizes, count) for tensor in values]


def combine_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of `freescale.kernels.combine_ranges`."""
    first, sizes = _integers("starts", starts), _integers("lengths", lengths)
    _check_ranges(first, sizes, size, "size")
    _check_jagged(values, sizes)
    order = _ascending(first, sizes)
    clash = _first_overlap(first[order], sizes[order])
    if clash is not None:
        earlier, later = (f"[{first[order[i]]}, {first[order[i]] + sizes[order[i]]})" for i in (clash, clash + 1))
        raise ValueError(f"ranges must not overlap, got {earlier} and {later}")
    return _scatter(values, first, sizes, order, size)


def sum_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """CPU path of the gradient of `dispatch_ranges`: a plain copy unless ranges overlap."""
    first, sizes = _integers("starts", starts), _integers("lengths", lengths)
    order = _ascending(first, sizes)
    if _first_overlap(first[order], sizes[order]) is None:
        return _scatter(values, first, sizes, order, size)
    return [reference.sum_ranges(tensor, starts, lengths, size) for tensor in values]


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """CPU path of `freescale.kernels.transpose_keyed`."""
    sizes = _integers("lengths", lengths.reshape(-1))
    _check_jagged(values, sizes)
    order = np.arange(len(sizes)).reshape(tuple(lengths.shape)).T.reshape(-1)
    moved = _permute(values, lengths.reshape(-1), torch.from_numpy(order), sizes, order, None)
    return moved, lengths.t().contiguous()


def _permute(
    values: list[Tensor], lengths: Tensor, rows: Tensor, all_lengths: _Integers, chosen: _Integers, total: int | None
) -> list[Tensor]:
    """Permute checked rows, given as tensors and as arrays."""
    sizes = all_lengths[chosen]
    count = _checked_total(sizes, total)
    values = [tensor.contiguous() for tensor in values]
    if all(host_fbgemm.serves(tensor, count) for tensor in values):
        return [host_fbgemm.permute_rows(tensor, lengths.long(), rows.int(), count) for tensor in values]
    starts = np.cumsum(all_lengths) - all_lengths
    return [_gather_rows(tensor, starts[chosen], sizes, count) for tensor in values]


def _integers(name: str, tensor: Tensor) -> _Integers:
    numbers = tensor.long().contiguous().numpy()
    if name == "lengths" and len(numbers) and numbers.min() < 0:
        raise ValueError(f"lengths must not be negative, got {numbers.min()}")
    return numbers


def _check_jagged(values: list[Tensor], lengths: _Integers) -> None:
    if len(values[0]) != lengths.sum():
        raise ValueError(f"lengths must add up to the rows of values ({len(values[0])}), got {lengths.sum()}")


def _check_ranges(starts: _Integers, lengths: _Integers, limit: int, limit_name: str) -> None:
    outside = (starts < 0) | (starts > limit - lengths)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"starts and lengths must stay within {limit_name} ({limit}), "
            f"got [{starts[i]}, {starts[i] + lengths[i]}) at {i}"
        )


def _ascending(starts: _Integers, lengths: _Integers) -> _Integers:
    """Indices of the ranges that hold anything, by start."""
    filled = np.flatnonzero(lengths)
    return filled[np.argsort(starts[filled], kind="stable")]


def _first_overlap(starts: _Integers, lengths: _Integers) -> int | None:
    """Index of the first of the ascending ranges that reaches into its follower."""
    overlaps = starts[:-1] + lengths[:-1] > starts[1:]
    return int(overlaps.argmax()) if overlaps.any() else None


def _checked_total(lengths: _Integers, total: int | None) -> int:
    found = int(lengths.sum())
    if total is not None and total != found:
        raise ValueError(f"total must be the sum of the lengths ({found}), got {total}")
    return found


def _gather_rows(values: Tensor, starts: _Integers, lengths: _Integers, total: int) -> Tensor:
    row_bytes = _row_bytes(values)
    if row_bytes == 0 or total == 0:
        return values.new_empty((total, *values.shape[1:]))
    gathered = gather_ranges(values.data_ptr() + starts * row_bytes, lengths * row_bytes)
    return gathered.view(values.dtype).view(total, *values.shape[1:])


def _scatter(values: list[Tensor], starts: _Integers, lengths: _Integers, order: _Integers, size: int) -> list[Tensor]:
    """Gather the pieces in the order of their places, with zeros for the gaps between them."""
    offsets = (np.cumsum(lengths) - lengths)[order]
    starts, lengths = starts[order], lengths[order]
    ends = np.concatenate([[0], starts + lengths])
    gaps = np.concatenate([starts, [size]]) - ends
    return [_scatter_rows(tensor.contiguous(), offsets, lengths, gaps, size) for tensor in values]


def _scatter_rows(values: Tensor, offsets: _Integers, lengths: _Integers, gaps: _Integers, size: int) -> Tensor:
    row_bytes = _row_bytes(values)
    if row_bytes == 0 or size == 0:
        return values.new_empty((size, *values.shape[1:]))
    addresses, sizes = values.data_ptr() + offsets * row_bytes, lengths * row_bytes
    zeros = torch.zeros(int(gaps.max()) * row_bytes, dtype=torch.uint8)
    if len(zeros):
        addresses = _between(np.full(len(gaps), zeros.data_ptr()), addresses)
        sizes = _between(gaps * row_bytes, sizes)
    return gather_ranges(addresses, sizes).view(values.dtype).view(size, *values.shape[1:])


def _between(outer: _Integers, inner: _Integers) -> _Integers:
    """`outer[0], inner[0], outer[1], …, outer[-1]`."""
    woven = np.empty(len(outer) + len(inner), dtype=np.int64)
    woven[::2], woven[1::2] = outer, inner
    return woven


def _row_bytes(values: Tensor) -> int:
    return values.element_size() * math.prod(values.shape[1:])
