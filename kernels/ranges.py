"""What a jagged copy is told about its ranges, and the offsets that it may need first (paper, section 4.2)."""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

STARTS, ROWS, TRANSPOSED = 0, 1, 2  # how a range finds its place
BLOCK = 1024  # lengths that one program scans
BEFORE = 8192  # earlier lengths that it adds up at a time
MAX_BLOCKS = 32  # beyond, torch.cumsum is faster, as every program adds up all that lies before its block


@dataclass
class Ranges:
    """Ranges of rows: how long each is, in packed order, and where its place is.

    Attributes:
        order: STARTS: range r has `lengths[r]` rows and begins at `starts[r]`. ROWS: range r is row `rows[r]` of the
            jagged tensor with these lengths. TRANSPOSED: range r = s * K + k is row k * B + s of it.
        lengths: Contiguous; shape [n] for STARTS, [B] for ROWS, [K * B] for TRANSPOSED; int64 or int32.
        starts: For STARTS; contiguous. After a scan, where each row of the jagged tensor begins.
        rows: For ROWS; contiguous, shape [n], int64 or int32.
        shape: (K, B) for TRANSPOSED, otherwise (1, number of lengths).
        gathered: Takes the ranges' lengths in packed order, unless the order is STARTS. Shape [n].
        offsets: After a scan, the first packed row of each range and the end of the last. Shape [n + 1], int64.
    """

    order: int
    lengths: Tensor
    starts: Tensor | None = None
    rows: Tensor | None = None
    shape: tuple[int, int] = (1, 1)
    gathered: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of ranges."""
        return (self.lengths if self.rows is None else self.rows).shape[0]

    def scan(self) -> Tensor:
        """Fill `offsets`, `gathered` and, for jagged tensors, `starts`. Returns the offsets."""
        n, own = self.count, self.lengths.shape[0]
        device = self.lengths.device
        self.offsets = torch.empty(n + 1, dtype=torch.int64, device=device)
        if self.order != STARTS:
            self.starts = torch.empty(own + 1, dtype=torch.int64, device=device)
        if not 0 < min(n, own) <= max(n, own) <= BLOCK * MAX_BLOCKS:
            self._scan_with_torch()
            return self.offsets
        starts = None if self.order == STARTS else self.starts
        launch(
            scan_kernel,
            device.index,
            (-(-max(n, own) // BLOCK), 1 if starts is None else 2, 1),
            (self.lengths.dtype, None if self.rows is None else self.rows.dtype),
            (self.lengths, self.rows, starts, self.offsets, self.gathered),
            (n, own, *self.shape),
            (self.order, BLOCK, BEFORE),
            num_warps=16,
        )
        return self.offsets

    def _scan_with_torch(self) -> None:
        assert self.offsets is not None
        lengths = self.lengths
        if self.order != STARTS:
            assert self.gathered is not None
            assert self.starts is not None
            _cumulate(lengths, self.starts)
            lengths = self.gathered.copy_(
                lengths.view(self.shape).t().reshape(-1) if self.rows is None else lengths[self.rows]
            )
        _cumulate(lengths, self.offsets)


def _cumulate(lengths: Tensor, offsets: Tensor) -> None:
    offsets[:1].zero_()
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])


@triton.jit
def row_of(r, rows, num_keys, num_samples, ORDER: tl.constexpr):
    """Return the row of the jagged tensor that range r is."""
    if ORDER == 1:
        r = tl.load(rows + r).to(tl.int64)
    if ORDER == 2:
        r = (r % num_keys) * num_samples + r // num_keys
    return r


@triton.jit(
    do_not_specialize=["n", "own", "num_keys", "num_samples"],
    do_not_specialize_on_alignment=["lengths", "rows", "starts", "offsets", "gathered"],
)
def scan_kernel(
    lengths, rows, starts, offsets, gathered, n: tl.int64, own: tl.int64, num_keys: tl.int64, num_samples: tl.int64,
    ORDER: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Scan one block: program (b, 0) in packed order, program (b, 1) as the lengths lie."""
    if tl.program_id(1) == 0:
        scan_block(lengths, rows, offsets, gathered, n, num_keys, num_samples, ORDER, BLOCK, BEFORE)
    elif ORDER != 0:
        scan_block(lengths, rows, starts, None, own, num_keys, num_samples, 0, BLOCK, BEFORE)


@triton.jit
def scan_block(
    lengths, rows, offsets, gathered, n, num_keys, num_samples,
    ORDER: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Write the offset behind each length of a block, and the lengths themselves where they come in a new order."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    before = tl.zeros([BEFORE], tl.int64)
    at = tl.arange(0, BEFORE).to(tl.int64)
    limit = tl.minimum(first, n)  # a block beyond n writes nothing
    while limit > tl.min(at):
        earlier = at < limit
        row = row_of(tl.where(earlier, at, 0), rows, num_keys, num_samples, ORDER)
        before += tl.load(lengths + row, mask=earlier, other=0).to(tl.int64)
        at += BEFORE
    at = first + tl.arange(0, BLOCK)
    inside = at < n
    row = row_of(tl.where(inside, at, 0), rows, num_keys, num_samples, ORDER)
    length = tl.load(lengths + row, mask=inside, other=0)
    tl.store(offsets + 1 + at, tl.sum(before) + tl.cumsum(length.to(tl.int64)), mask=inside)
    tl.store(offsets + at, tl.zeros_like(at), mask=at == 0)
    if ORDER != 0:
        tl.store(gathered + at, length, mask=inside)
