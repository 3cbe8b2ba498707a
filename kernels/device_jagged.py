"""The jagged operations on GPU memory: offsets in one launch, then all tensors in another (paper, section 4.2).

Only a call without `total` synchronises, to learn the size of its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .copy_ranges import ROWS, STARTS, TRANSPOSED, Places, copy_ranges
from .scan import offsets_of, permuted_offsets, transposed_offsets
from .sum_ranges import sum_ranges as launch_sum


def permute_jagged(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    """GPU path of `freescale.kernels.permute_jagged`."""
    lengths, rows = lengths.contiguous(), rows.contiguous()
    starts, offsets, permuted_lengths = permuted_offsets(lengths, rows)
    return _gather(values, offsets, total, Places(ROWS, starts, rows)), permuted_lengths


def dispatch_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    """GPU path of `freescale.kernels.dispatch_ranges`."""
    return _gather(values, offsets_of(lengths.contiguous()), total, Places(STARTS, starts.contiguous()))


def combine_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """GPU path of `freescale.kernels.combine_ranges`.

    Pieces that do not overlap and hold as many rows as the result leave no gap, which saves filling it with zeros.
    """
    covered = len(values[0]) == size
    combined = [_sized(tensor, size) if covered else _sized(tensor, size).zero_() for tensor in values]
    pieces = [tensor.contiguous() for tensor in values]
    offsets = offsets_of(lengths.contiguous())
    copy_ranges(pieces, combined, offsets, len(values[0]), Places(STARTS, starts.contiguous()), gather=False)
    return combined


def sum_ranges(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    """GPU path of the gradient of `dispatch_ranges`."""
    sums = [_sized(tensor, size) for tensor in values]
    starts, lengths = starts.long().contiguous(), lengths.long().contiguous()
    offsets = offsets_of(lengths)
    for tensor, result in zip(values, sums, strict=True):
        if tensor.is_complex():
            tensor, result = torch.view_as_real(tensor.contiguous()), torch.view_as_real(result)
        launch_sum(tensor.contiguous(), result, starts, lengths, offsets)
    return sums


def transpose_keyed(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """GPU path of `freescale.kernels.transpose_keyed`."""
    keys, samples = lengths.shape
    starts, offsets, transposed = transposed_offsets(lengths.contiguous())
    places = Places(TRANSPOSED, starts, shape=(keys, samples))
    return _gather(values, offsets, len(values[0]), places), transposed


def _gather(values: list[Tensor], offsets: Tensor, total: int | None, places: Places) -> list[Tensor]:
    total = int(offsets[-1]) if total is None else total
    gathered = [_sized(tensor, total) for tensor in values]
    copy_ranges(gathered, [tensor.contiguous() for tensor in values], offsets, total, places, gather=True)
    return gathered


def _sized(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))
