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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import can_follow, launch

STARTS, ROWS, TRANSPOSED = 0, 1, 2  # how a range finds its place
BLOCK = 1024  # lengths that one program scans; of no more, one launch scans all
GROUP = 128  # lengths that one program adds up, where two launches scan
GROUPS = 256  # groups whose sums the programs of the second launch add up; beyond, torch.cumsum scans


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
        followed: Whether the scan's last act was a launch during which another may start.
    """

    order: int
    lengths: Tensor
    starts: Tensor | None = None
    rows: Tensor | None = None
    shape: tuple[int, int] = (1, 1)
    gathered: Tensor | None = None
    offsets: Tensor | None = None
    followed: bool = False

    @property
    def count(self) -> int:
        """Number of ranges."""
        return (self.lengths if self.rows is None else self.rows).shape[0]

    def scan(self) -> Tensor:
        """Fill `offsets`, `gathered` and, for jagged tensors, `starts`. Returns the offsets."""
        n, own = self.count, self.lengths.shape[0]
        device = self.lengths.device
        self.offsets = torch.empty(n + 1, dtype=torch.int64, device=device)
        if not 0 < min(n, own) <= max(n, own) <= GROUP * GROUPS:
            self._scan_with_torch()
        elif max(n, own) > BLOCK:
            self._scan_in_two()
        else:
            self._scan_in_one()
        return self.offsets

    def _scan_in_one(self) -> None:
        n, own = self.count, self.lengths.shape[0]
        if self.order != STARTS:
            self.starts = torch.empty(own + 1, dtype=torch.int64, device=self.lengths.device)
        starts = None if self.order == STARTS else self.starts
        launch(
            scan_kernel,
            self.lengths.device.index,
            (1, 1 if starts is None else 2, 1),
            (self.lengths.dtype, None if self.rows is None else self.rows.dtype),
            (self.lengths, self.rows, starts, self.offsets, self.gathered),
            (n, own, *self.shape),
            (self.order, BLOCK, can_follow(self.lengths.device.index)),
            num_warps=16,
        )
        self.followed = can_follow(self.lengths.device.index)

    def _scan_in_two(self) -> None:
        """Add up groups of lengths in one launch; in another the groups before each, and find the ranges' places."""
        n, own = self.count, self.lengths.shape[0]
        device = self.lengths.device
        groups, own_groups = -(-n // GROUP), -(-own // GROUP)
        jagged, follows = self.order != STARTS, can_follow(device.index)
        sums = torch.empty(groups + own_groups + own if jagged else groups, dtype=torch.int64, device=device)
        places = torch.empty(n, dtype=torch.int64, device=device) if jagged else None
        key = (self.lengths.dtype, None if self.rows is None else self.rows.dtype)
        launch(
            group_kernel,
            device.index,
            (max(groups, own_groups), 2, 1) if jagged else (groups, 1, 1),
            key,
            (self.lengths, self.rows, sums, self.gathered),
            (n, own, *self.shape),
            (self.order, GROUP, follows),
            num_warps=1,
        )
        launch(
            place_kernel,
            device.index,
            (-(-n // BLOCK), 1, 1),
            key,
            (self.gathered if jagged else self.lengths, self.rows, sums, places, self.offsets),
            (n, own, *self.shape),
            (self.order, BLOCK, GROUP, GROUPS, follows),
            num_warps=8,
            follows=follows,
        )
        self.followed = follows
        if jagged:
            self.order, self.starts = STARTS, places

    def _scan_with_torch(self) -> None:
        assert self.offsets is not None
        lengths = self.lengths
        if self.order != STARTS:
            assert self.gathered is not None
            self.starts = torch.empty(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
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
    ORDER: tl.constexpr, BLOCK: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Scan at most BLOCK lengths: program (0, 0) in packed order, program (0, 1) as they lie."""
    if FOLLOWED:
        gdc_launch_dependents()
    if tl.program_id(1) == 0:
        scan_block(lengths, rows, offsets, gathered, n, num_keys, num_samples, ORDER, BLOCK)
    elif ORDER != 0:
        scan_block(lengths, rows, starts, None, own, num_keys, num_samples, 0, BLOCK)


@triton.jit
def scan_block(
    lengths, rows, offsets, gathered, n, num_keys, num_samples, ORDER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the offset behind each length, and the lengths themselves where they come in a new order."""
    at = tl.arange(0, BLOCK).to(tl.int64)
    inside = at < n
    row = row_of(tl.where(inside, at, 0), rows, num_keys, num_samples, ORDER)
    length = tl.load(lengths + row, mask=inside, other=0)
    tl.store(offsets + 1 + at, tl.cumsum(length.to(tl.int64)), mask=inside)
    tl.store(offsets + at, tl.zeros_like(at), mask=at == 0)
    if ORDER != 0:
        tl.store(gathered + at, length, mask=inside)


@triton.jit(
    do_not_specialize=["n", "own", "num_keys", "num_samples"],
    do_not_specialize_on_alignment=["lengths", "rows", "sums", "gathered"],
)
def group_kernel(
    lengths, rows, sums, gathered, n: tl.int64, own: tl.int64, num_keys: tl.int64, num_samples: tl.int64,
    ORDER: tl.constexpr, GROUP: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Add up one group of lengths: program (g, 0) in packed order, program (g, 1) as they lie.

    `sums` takes the groups' sums, for jagged tensors then those of the groups as they lie, and where each row begins,
    counted from the first of its group.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    group = tl.program_id(0).to(tl.int64)
    at = group * GROUP + tl.arange(0, GROUP)
    num_groups = tl.cdiv(n, GROUP)
    if tl.program_id(1) == 0:
        inside = at < n
        row = row_of(tl.where(inside, at, 0), rows, num_keys, num_samples, ORDER)
        length = tl.load(lengths + row, mask=inside, other=0)
        if ORDER != 0:
            tl.store(gathered + at, length, mask=inside)
        tl.store(sums + group, tl.sum(length.to(tl.int64)), mask=group < num_groups)
    elif ORDER != 0:
        here = at < own
        as_it_lies = tl.load(lengths + at, mask=here, other=0).to(tl.int64)
        own_groups = tl.cdiv(own, GROUP)
        tl.store(sums + num_groups + group, tl.sum(as_it_lies), mask=group < own_groups)
        tl.store(sums + num_groups + own_groups + at, tl.cumsum(as_it_lies) - as_it_lies, mask=here)


@triton.jit(
    do_not_specialize=["n", "own", "num_keys", "num_samples"],
    do_not_specialize_on_alignment=["lengths", "rows", "sums", "places", "offsets"],
)
def place_kernel(
    lengths, rows, sums, places, offsets, n: tl.int64, own: tl.int64, num_keys: tl.int64, num_samples: tl.int64,
    ORDER: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Write the offset behind each range of a block, and for jagged tensors its place; `lengths` in packed order."""
    if FOLLOWS:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, GROUPS)
    before = tl.sum(tl.load(sums + lane, mask=lane < first // GROUP, other=0))
    at = first + tl.arange(0, BLOCK)
    inside = at < n
    length = tl.load(lengths + at, mask=inside, other=0)
    tl.store(offsets + 1 + at, before + tl.cumsum(length.to(tl.int64)), mask=inside)
    tl.store(offsets + at, tl.zeros_like(at), mask=at == 0)
    if ORDER != 0:
        num_groups, own_groups = tl.cdiv(n, GROUP), tl.cdiv(own, GROUP)
        own_sums = tl.load(sums + num_groups + lane, mask=lane < own_groups, other=0)
        row = row_of(tl.where(inside, at, 0), rows, num_keys, num_samples, ORDER)
        place = tl.load(sums + num_groups + own_groups + row, mask=inside, other=0)
        place += tl.gather(tl.cumsum(own_sums) - own_sums, (row // GROUP).to(tl.int32), 0)
        tl.store(places + at, place, mask=inside)
