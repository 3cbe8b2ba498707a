"""The jagged operations on GPU memory: offsets in one launch, then all tensors in another (paper, section 4.2).

Only a call without `total` synchronises, to learn the size of its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .copy_ranges import copy_ranges
from .ranges import ROWS, STARTS, TRANSPOSED, Ranges
from .sum_ranges import sum_ranges as launch_sum


def permute_jagged(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    """GPU path of `freescale.kernels.permute_jagged`."""
    permuted = lengths.new_empty(rows.shape[0])
    shape = (1, lengths.shape[0])
    ranges = Ranges(ROWS, lengths.contiguous(), rows=rows.contiguous(), shape=shape, gathered=permuted)
    return _gather(values, ranges, total), permuted


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    """GPU path of `freescale.kernels.dispatch_ranges`."""
    return _gather(values, Ranges(STARTS, lengths.contiguous(), starts.contiguous()), total)


def combine_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """GPU path of `freescale.kernels.combine_ranges`.

    Pieces that do not overlap and hold as many rows as the result leave no gap, which saves filling it with zeros.
    """
    covered = values[0].shape[0] == size
    combined = [_sized(tensor, size) if covered else _sized(tensor, size).zero_() for tensor in values]
    pieces = [tensor.contiguous() for tensor in values]
    ranges = Ranges(STARTS, lengths.contiguous(), starts.contiguous())
    copy_ranges(pieces, combined, ranges, values[0].shape[0], gather=False)
    return combined


def sum_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """GPU path of the gradient of `dispatch_ranges`."""
    sums = [_sized(tensor, size) for tensor in values]
    starts, lengths = starts.long().contiguous(), lengths.long().contiguous()
    offsets = Ranges(STARTS, lengths, starts).scan()
    for tensor, result in zip(values, sums, strict=True):
        if tensor.is_complex():
            tensor, result = torch.view_as_real(tensor.contiguous()), torch.view_as_real(result)
        launch_sum(tensor.contiguous(), result, starts, lengths, offsets)
    return sums


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """GPU path of `freescale.kernels.transpose_keyed`."""
    keys, samples = lengths.shape
    transposed = lengths.new_empty((samples, keys))
    flat = lengths.contiguous().view(-1)
    ranges = Ranges(TRANSPOSED, flat, shape=(keys, samples), gathered=transposed.view(-1))
    return _gather(values, ranges, values[0].shape[0]), transposed


def _gather(values: list[Tensor], ranges: Ranges, total: int | None) -> list[Tensor]:
    if total is None:
        total = int(ranges.scan()[-1])
    gathered = [_sized(tensor, total) for tensor in values]
    copy_ranges(gathered, [tensor.contiguous() for tensor in values], ranges, total, gather=True)
    return gathered


def _sized(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))
