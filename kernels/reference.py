"""Plain PyTorch definition of every jagged operation: what the fast paths are tested against (paper, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def row_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """Spell out ranges of rows, one index a row.

    Args:
        starts: First row of each range. Shape [n], integer.
        lengths: Rows of each range. Shape [n], integer.

    Returns:
        `starts[0], starts[0] + 1, …, starts[1], …`. Shape [lengths.sum()], int64.

    Example:
        >>> row_indices(torch.tensor([7, 0]), torch.tensor([2, 3]))
        tensor([7, 8, 0, 1, 2])
    """
    starts, lengths = starts.long(), lengths.long()
    shifts = starts - (lengths.cumsum(0) - lengths)
    shift_of_row = shifts.repeat_interleave(lengths)
    return shift_of_row + torch.arange(len(shift_of_row), device=starts.device)


def permute_jagged(values: Tensor, lengths: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a jagged tensor in a new order; see `freescale.kernels.permute_jagged`."""
    starts = lengths.long().cumsum(0) - lengths
    return dispatch_ranges(values, starts[rows.long()], lengths[rows.long()]), lengths[rows.long()]


def dispatch_ranges(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Ranges of rows, one after the other; see `freescale.kernels.dispatch_ranges`."""
    return values[row_indices(starts, lengths)]


def combine_ranges(values: Tensor, starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Contiguous pieces put to their places; see `freescale.kernels.combine_ranges`."""
    combined = values.new_zeros((size, *values.shape[1:]))
    combined[row_indices(starts, lengths)] = values
    return combined


def transpose_keyed(values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Feature-major to batch-major and back; see `freescale.kernels.transpose_keyed`."""
    order = torch.arange(lengths.numel(), device=lengths.device).view(lengths.shape).t().reshape(-1)
    return permute_jagged(values, lengths.reshape(-1), order)[0], lengths.t().contiguous()


def sum_ranges(values: Tensor, starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Contiguous pieces added into their places, which may overlap: the gradient of `dispatch_ranges`.

    Every row of the result adds its pieces one at a time, in ascending order of (start, place in `starts`), in
    float32 for narrower types, and rounds once: the same bits every time and on every device.

    Args:
        values: The pieces, one after the other. Shape [lengths.sum(), ...], floating.
        starts: Where each piece goes. Shape [n], integer.
        lengths: Rows of each piece. Shape [n], integer.
        size: Rows of the result.

    Returns:
        The sums, zero where no piece goes. Shape [size, ...].
    """
    order = starts.argsort(stable=True)
    offsets = lengths.long().cumsum(0) - lengths
    sources = row_indices(offsets[order], lengths[order])
    targets, by_target = row_indices(starts[order], lengths[order]).sort(stable=True)
    sources = sources[by_target]
    counts = torch.bincount(targets, minlength=size)
    turn = torch.arange(len(targets), device=values.device) - (counts.cumsum(0) - counts)[targets]
    wide = torch.promote_types(values.dtype, torch.float32)
    sums = torch.zeros((size, *values.shape[1:]), dtype=wide, device=values.device)
    for step in range(int(counts.max()) if size else 0):
        now = turn == step
        sums[targets[now]] += values[sources[now]].to(wide)
    return sums.to(values.dtype)
