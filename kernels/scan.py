"""Offsets of jagged lengths, the lengths before and after a permutation at once, in one launch (paper, section 4.2)."""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .copy_ranges import ROWS, STARTS, TRANSPOSED, row_of
from .launch import launch

BLOCK = 2048  # lengths that one program scans
MAX_BLOCKS = 8  # above it torch.cumsum is faster, as every program adds up all that lies before its block


@triton.jit(
    do_not_specialize=["n", "num_rows", "num_keys", "num_samples"],
    do_not_specialize_on_alignment=["lengths", "rows", "own_offsets", "offsets", "gathered"],
)
def scan_kernel(
    lengths, rows, own_offsets, offsets, gathered,
    n: tl.int64, num_rows: tl.int64, num_keys: tl.int64, num_samples: tl.int64,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scan one block: program (b, 0) of the lengths as they lie, program (b, 1) of the lengths in their new order."""
    block = tl.program_id(0)
    if tl.program_id(1) == 0:
        scan_block(lengths, rows, own_offsets, None, block, n, num_keys, num_samples, 0, BLOCK)
    elif ORDER != 0:
        scan_block(lengths, rows, offsets, gathered, block, num_rows, num_keys, num_samples, ORDER, BLOCK)


@triton.jit
def scan_block(
    lengths, rows, offsets, gathered, block, n, num_keys, num_samples, ORDER: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the offsets after each length of the block, and the lengths themselves where they come in a new order."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    before = tl.zeros([BLOCK], tl.int64)
    earlier = block * 0
    while earlier < block:
        at = tl.minimum(earlier * BLOCK + lane, n - 1)  # a block beyond n has nothing to write
        before += tl.load(lengths + row_of(at, rows, num_keys, num_samples, ORDER)).to(tl.int64)
        earlier += 1
    at = block * BLOCK + lane
    inside = at < n
    row = row_of(tl.minimum(at, n - 1), rows, num_keys, num_samples, ORDER)
    length = tl.load(lengths + row, mask=inside, other=0)
    tl.store(offsets + 1 + at, tl.sum(before) + tl.cumsum(length.to(tl.int64)), mask=inside)
    tl.store(offsets + lane, tl.zeros_like(lane), mask=(lane == 0) & (block == 0))
    if ORDER != 0:
        tl.store(gathered + at, length, mask=inside)


def offsets_of(lengths: Tensor) -> Tensor:
    """First row of each range and the end of the last. Shape [n + 1], int64."""
    offsets = torch.empty(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    if len(lengths) <= BLOCK * MAX_BLOCKS and len(lengths):
        blocks = -(-len(lengths) // BLOCK)
        arguments = (lengths, None, offsets, None, None, len(lengths), 0, 1, 1)
        launch(scan_kernel, (blocks, 1, 1), (lengths.dtype,), arguments, (STARTS, BLOCK), num_warps=8)
    else:
        offsets[:1].zero_()
        torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def permuted_offsets(lengths: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of the lengths, offsets of `lengths[rows]`, and `lengths[rows]` itself."""
    if max(len(lengths), len(rows)) > BLOCK * MAX_BLOCKS or not len(lengths) or not len(rows):
        gathered = lengths[rows]
        return offsets_of(lengths), offsets_of(gathered), gathered
    return _scan_both(lengths, rows, (1, 1), lengths.new_empty(len(rows)))


def transposed_offsets(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of `lengths [K, B]`, offsets of its transpose, and the transpose itself."""
    if lengths.numel() > BLOCK * MAX_BLOCKS or not lengths.numel():
        gathered = lengths.t().contiguous()
        return offsets_of(lengths.reshape(-1)), offsets_of(gathered.view(-1)), gathered
    keys, samples = lengths.shape
    gathered = lengths.new_empty((samples, keys))
    return _scan_both(lengths.reshape(-1), None, (keys, samples), gathered)


def _scan_both(
    lengths: Tensor, rows: Tensor | None, shape: tuple[int, int], gathered: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    own = torch.empty(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    new = torch.empty(gathered.numel() + 1, dtype=torch.int64, device=lengths.device)
    blocks = -(-max(len(lengths), gathered.numel()) // BLOCK)
    order = TRANSPOSED if rows is None else ROWS
    key = (lengths.dtype, None if rows is None else rows.dtype)
    arguments = (lengths, rows, own, new, gathered, len(lengths), gathered.numel(), *shape)
    launch(scan_kernel, (blocks, 2, 1), key, arguments, (order, BLOCK), num_warps=8)
    return own, new, gathered
