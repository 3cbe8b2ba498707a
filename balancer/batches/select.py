"""Select, join and cut the samples of a column, byte for byte, at any depth (paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import dispatch_ranges, gather_ranges
from .column import Column, as_bytes, offsets_of, row_bytes

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take_samples(column: Column, indices: Tensor) -> Column:
    """Copy the samples at `indices`, in that order; repeats are allowed.

    Args:
        column: Checked; its values are contiguous.
        indices: In [0, batch_size). Shape [n], int64, on the column's device.
    """
    if not column.levels:
        return Column(_take_rows(column.values, indices))
    levels: list[Tensor] = []
    starts, sizes = column.offsets[indices], column.lengths[indices]
    levels.append(sizes)
    for lengths in column.levels[1:]:
        levels.append(take_ranges(lengths, starts, sizes))
        offsets = offsets_of(lengths)
        starts, sizes = offsets[starts], offsets[starts + sizes] - offsets[starts]
    return Column(take_ranges(column.values, starts, sizes), tuple(levels))


def take_ranges(rows: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Copy ranges of rows, one after the other. Synchronises on an accelerator.

    Args:
        rows: Contiguous. Shape [n, ...], any dtype.
        starts: First row of each range. Shape [k], int64.
        sizes: Rows of each range. Shape [k], int64.

    Returns:
        Shape [sizes.sum(), ...], in memory of its own.
    """
    row = row_bytes(rows)
    if row == 0 or len(rows) == 0:
        return rows.new_empty((int(sizes.sum()), *rows.shape[1:]))
    if rows.device.type == "cpu":
        copied = gather_ranges(rows.data_ptr() + starts.numpy() * row, sizes.numpy() * row)
        return copied.view(rows.dtype).view(-1, *rows.shape[1:])
    return dispatch_ranges(rows, starts, sizes, int(sizes.sum()))


def _take_rows(rows: Tensor, indices: Tensor) -> Tensor:
    if rows.device.type == "cpu" and row_bytes(rows) not in _WORDS:
        return take_ranges(rows, indices, torch.ones_like(indices))
    return _index(rows, indices)


def _index(rows: Tensor, indices: Tensor) -> Tensor:
    """`rows[indices]` through whole words: not every dtype has an index operation."""
    row = row_bytes(rows)
    if row == 0 or len(rows) == 0:
        return rows.new_empty((len(indices), *rows.shape[1:]))
    flat = as_bytes(rows)
    words = flat.view(_WORDS[row]) if row in _WORDS else flat
    return words.index_select(0, indices).view(rows.dtype).view(-1, *rows.shape[1:])


def concat_samples(columns: Sequence[Column]) -> Column:
    """Join the samples of several columns of one spec. Copies, unless there is but one."""
    if len(columns) == 1:
        return columns[0]
    levels = tuple(torch.cat(lengths) for lengths in zip(*(c.levels for c in columns), strict=True))
    return Column(_concat_rows([c.values for c in columns]), levels)


def _concat_rows(pieces: Sequence[Tensor]) -> Tensor:
    first = pieces[0]
    if row_bytes(first) == 0:
        return first.new_empty((sum(map(len, pieces)), *first.shape[1:]))
    joined = torch.cat([as_bytes(piece) for piece in pieces])
    return joined.view(first.dtype).view(-1, *first.shape[1:])


def split_samples(column: Column, sizes: Sequence[int]) -> list[Column]:
    """Cut into runs of `sizes` samples. Views of the same memory. Synchronises."""
    bounds = offsets_of(torch.tensor(sizes, dtype=torch.int64))
    levels: list[tuple[Tensor, ...]] = []
    for lengths in column.levels:
        levels.append(lengths.split(bounds.diff().tolist()))
        bounds = offsets_of(lengths).cpu()[bounds]
    values = column.values.split(bounds.diff().tolist())
    pieces = zip(*levels, strict=True) if levels else [()] * len(values)
    return [Column(piece, tuple(level)) for piece, level in zip(values, pieces, strict=True)]
