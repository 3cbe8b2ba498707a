"""The Triton kernel that copies ranges of rows of 4 or 8 bytes, such as ids: every row by itself (section 4.2).

Ranges of ids are about as long as what a program copies at a time. Copied range by range, one load would wait for the
other, and most lanes would have nothing to do; here the ranges of a piece are walked first, so that each row knows its
place, and then all rows are on their way at once.
"""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803, SIM300
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from .find_ranges import search_first
from .launch import Words, launch
from .ranges import Ranges, row_of

STEP = 2  # ranges that a walk looks at together
MANY_BYTES = 12 * 2**20  # from which on programs copy several pieces
_WORDS = {4: tl.int32, 8: tl.int64}
_REACH = 2**31 - 2**16  # rows that 32 bits number, with room for a program's rows


class Layout(NamedTuple):
    """How the work is divided.

    Attributes:
        piece_rows: Rows that a program copies at a time.
        pieces: How many of them it copies one after the other, with one search.
        num_warps: Warps of a program.
        ways: Probes of a search step.
    """

    piece_rows: int
    pieces: int
    num_warps: int
    ways: int


def layout_of(words: tuple[int, ...], total: int, *, gather: bool) -> Layout:
    """The fastest of those that were tried on an H200.

    Args:
        words: Bytes of a row of each tensor.
        total: Packed rows.
        gather: From placed to packed rows.
    """
    if gather and min(words) == 8:
        return Layout(1024, 1, 4, 128)
    return Layout(256, 4 if total * sum(words) >= MANY_BYTES else 1, 1, 64)


@triton.jit
def shift_rows(
    offsets, places, rows, r, first, until, n, num_keys, num_samples,
    ORDER: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Return how far from each of PIECE packed rows its place is, and a range to begin with in the next piece."""
    local = tl.arange(0, PIECE)
    shift = tl.zeros([PIECE], NUMBER)
    more = True
    while more:
        for i in tl.static_range(STEP):
            at = tl.minimum(r + i, n - 1)
            begin = tl.load(offsets + at)
            place = tl.load(places + row_of(at, rows, num_keys, num_samples, ORDER)).to(tl.int64)
            far = place - begin
            if NUMBER == tl.int32:  # places outside of the tensor stay so
                far = tl.minimum(tl.maximum(far, -(2**31) + 1), 2**31 - 1).to(tl.int32)
            near = tl.minimum(tl.maximum(begin - first, -1), PIECE).to(tl.int32)
            shift = tl.where(local >= near, far, shift)
        r += STEP
        more = (r < n) & (tl.load(offsets + tl.minimum(r, n)) < until)
    return shift, r - STEP


@triton.jit(
    do_not_specialize=["n", "total", "tile_rows", "num_keys", "num_samples", "num_placed"],
    do_not_specialize_on_alignment=["offsets", "places", "rows"],
)
def narrow_kernel(
    packed, placed, offsets, places, rows,
    n: tl.int64, total: tl.int64, tile_rows: tl.int64, num_keys: tl.int64, num_samples: tl.int64, num_placed: tl.int64,
    ORDER: tl.constexpr, GATHER: tl.constexpr, FOLLOWS: tl.constexpr, TENSORS: tl.constexpr, PIECE: tl.constexpr,
    STEP: tl.constexpr, WAYS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Copy `tile_rows` packed rows of every tensor; `packed` and `placed` are tuples of TENSORS word pointers.

    `tile_rows` is no constant on purpose: rows known to be aligned would be stored several a lane, and change lanes by
    way of shared memory before.
    """
    if FOLLOWS:
        gdc_wait()  # for the launch before, which this one may overtake until here
    first = tl.program_id(0).to(tl.int64) * tile_rows
    last = tl.load(offsets + n)
    end = tl.minimum(tl.minimum(first + tile_rows, total), last)
    if first < end:
        r = search_first(offsets, n, first, last, WAYS)
        local = tl.arange(0, PIECE)
        while first < end:
            until = tl.minimum(first + PIECE, end)
            shift, r = shift_rows(
                offsets, places, rows, r, first, until, n, num_keys, num_samples, ORDER, PIECE, STEP, NUMBER
            )
            position = local + first.to(NUMBER)
            place = position + shift
            valid = (local < (until - first).to(tl.int32)) & (place >= 0) & (place < num_placed.to(NUMBER))
            for i in tl.static_range(TENSORS):
                if GATHER:
                    tl.store(packed[i] + position, tl.load(placed[i] + place, mask=valid), mask=valid)
                else:
                    tl.store(placed[i] + place, tl.load(packed[i] + position, mask=valid), mask=valid)
            first += PIECE


def copy_narrow(
    packed: list[Tensor],
    placed: list[Tensor],
    words: tuple[int, ...],
    ranges: Ranges,
    total: int,
    *,
    gather: bool,
    follows: bool,
) -> None:
    """Copy ranges of rows of 4 or 8 bytes, aligned to as many; the ranges were scanned.

    Args:
        packed: Tensors of the packed side, contiguous. Each [total, ...].
        placed: Their partners on the placed side, contiguous. Each [num_placed, ...].
        words: Bytes of a row of each.
        ranges: Which rows; places outside of `placed` are neither read nor written.
        total: Packed rows; what lies beyond the last range is left alone.
        gather: From placed to packed; otherwise from packed to placed.
        follows: Whether the launch before was the scan's, during which this one may start.
    """
    types, num_placed = [_WORDS[word] for word in words], placed[0].shape[0]
    starts, rows = ranges.starts, ranges.rows
    assert starts is not None
    layout = layout_of(words, total, gather=gather)
    tile_rows = layout.piece_rows * layout.pieces
    aligned = [tensor.data_ptr() % 16 == 0 for tensor in (*packed, *placed)]
    number = tl.int32 if max(total, num_placed) < _REACH else tl.int64
    launch(
        narrow_kernel,
        packed[0].device.index,
        (-(-total // tile_rows), 1, 1),
        (*words, *aligned, starts.dtype, None if rows is None else rows.dtype),
        (Words(packed, types), Words(placed, types), ranges.offsets, starts, rows),
        (ranges.count, total, tile_rows, *ranges.shape, num_placed),
        (ranges.order, gather, follows, len(words), layout.piece_rows, STEP, layout.ways, number),
        layout.num_warps,
        follows=follows,
    )
