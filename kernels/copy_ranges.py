"""The Triton kernel behind every jagged copy: rows between a packed buffer and places anywhere (paper, section 4.2).

One side of every operation is packed: its ranges lie one after the other, so ascending offsets tell the range of any
of its rows. The other side is placed: each range has a start of its own. Permute, dispatch and transpose gather (placed
to packed), combine scatters (packed to placed); only the direction of the copy differs.

Work is split by packed rows, never by ranges, so one giant range beside thousands of short ones costs nothing extra. A
program finds the ranges of its rows in one of two ways:

- Of few ranges, it scans all lengths itself and keeps offsets and starts in registers: one launch does everything.
- Of many, offsets come from a launch before, and it searches them for its first and last row with a vector of probes at
  a time (two steps for 16,000 ranges, three for two million).

Then there are two ways to copy:

- Row by row, for wide rows, wherever many short ranges meet, and for few bytes: each row finds its range, and its words
  move, all at once.
- Range by range, for many narrow rows in few ranges: what a range has in the tile is a run of bytes, which moves in
  aligned 8-byte words whatever the dtype; where source and result are not aligned alike, a word comes from two of the
  source. Rows of 1, 2 or 4 bytes would otherwise be limited by instructions, not by memory.

Row numbers and addresses are int64 throughout.
"""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .copy_run import copy_run
from .launch import Words, launch
from .ranges import Ranges, row_of

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
TILE_BYTES = 8192  # that one program copies, about
SMALL_BYTES = 3 * 2**19  # up to which it copies half of that, to keep all processors busy
CHUNK_ROWS = 512  # rows that are copied one by one at a time; more would take registers from all other ways
MAX_COLUMNS = 512  # words of a row that one program copies
NARROW_BYTES = 64  # rows up to this size are copied range by range
# Up to so many bytes, of 4-byte and of 8-byte words, waiting counts more than instructions: copied row by row.
LATENT_BYTES = {4: 6 * 2**20, 8: 2**25}
LATENT_ROWS = 1024  # of a tile then, all at a time
WALKED = 16  # ranges that are walked instead of searched
WINDOW = 32  # ranges whose numbers a walk holds in registers
WAYS = 128  # probes of one search step
SCANNED_SIZES = (128, 256, 512)  # lengths that every program may scan itself; more than the first only
MAX_TILES_SCANNING = 2048  # if there are at most so many programs


@triton.jit
def search_pair(offsets, n, first, last, WAYS: tl.constexpr):
    """Return the ranges that hold packed rows `first` and `last`: how many of offsets[1..n] are not above each."""
    pair = tl.arange(0, 2)
    target = tl.where(pair == 0, first, last)
    low = pair.to(tl.int64) * 0
    probes = tl.arange(1, WAYS + 1).to(tl.int64)
    span = n
    while span > 0:
        step = (span + WAYS - 1) // WAYS
        at = low[:, None] + probes[None, :] * step
        inside = at <= n
        bound = tl.load(offsets + at, mask=inside, other=0)
        low += step * tl.sum((inside & (bound <= target[:, None])).to(tl.int64), axis=1)
        span = step - 1
    return tl.sum(tl.where(pair == 0, low, 0)), tl.sum(tl.where(pair == 1, low, 0))


@triton.jit
def search_rows(offsets, position, low, high):
    """Return for each packed row the range that holds it, between the ranges `low` and `high`."""
    lows = low + tl.zeros_like(position)
    highs = high + tl.zeros_like(position)
    span = high - low
    while span > 0:
        middle = (lows + highs) // 2
        open_ = lows < highs
        beyond = open_ & (tl.load(offsets + middle + 1, mask=open_, other=0) <= position)
        lows = tl.where(beyond, middle + 1, lows)
        highs = tl.where(beyond, highs, middle)
        span = span // 2
    return lows


@triton.jit
def scan_all(
    lengths, starts, rows, gathered, n, own, num_keys, num_samples, ORDER: tl.constexpr, SCANNED: tl.constexpr
):
    """Return all ranges' ends in packed rows and their places; the first program also writes the gathered lengths."""
    lane = tl.arange(0, SCANNED)
    inside = lane < n
    row = row_of(tl.where(inside, lane, 0), rows, num_keys, num_samples, ORDER)
    length = tl.load(lengths + row, mask=inside, other=0)
    if ORDER == 0:
        start = tl.load(starts + lane, mask=inside, other=0).to(tl.int64)
    else:
        tl.store(gathered + lane, length, mask=inside & (tl.program_id(0) + tl.program_id(1) == 0))
        as_they_lie = tl.load(lengths + lane, mask=lane < own, other=0).to(tl.int64)
        start = tl.gather(tl.cumsum(as_they_lie) - as_they_lie, row.to(tl.int32), 0)
    return tl.cumsum(length.to(tl.int64)), start


@triton.jit
def pick(vector, i):
    """Return element i of a vector."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == i, vector, 0))


@triton.jit
def range_at(ends, places, rows, base, r, num_keys, num_samples, ORDER: tl.constexpr, SCANNED: tl.constexpr):
    """Return where range r ends in packed rows, and its place: from vectors that begin at range `base`, or memory."""
    if SCANNED > 0:
        end = pick(ends, r - base)
        place = pick(places, r - base)
    else:
        end = tl.load(ends + r + 1)
        place = tl.load(places + row_of(r, rows, num_keys, num_samples, ORDER)).to(tl.int64)
    return end, place


@triton.jit
def shifts_by_walk(
    position, begin, ends, places, rows, base, low, high, num_keys, num_samples,
    ORDER: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Return how far from each packed row its place is, range by range from `low`, which begins at `begin`."""
    shift = tl.zeros_like(position)
    r = low
    while r <= high:
        behind, place = range_at(ends, places, rows, base, r, num_keys, num_samples, ORDER, SCANNED)
        shift = tl.where(position >= begin, place - begin, shift)
        begin = behind
        r += 1
    return shift


@triton.jit
def copy_rows(
    packed, placed, position, shift, end, num_placed,
    GATHER: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Copy the rows at `position` that lie before `end`."""
    place = position + shift
    valid = (position < end) & (place >= 0) & (place < num_placed)
    for i in tl.static_range(len(UNITS)):
        column = tl.program_id(1) * COLUMNS[i] + tl.arange(0, COLUMNS[i])
        packed_at = packed[i] + position[:, None] * UNITS[i] + column[None, :]
        placed_at = placed[i] + place[:, None] * UNITS[i] + column[None, :]
        mask = valid[:, None]
        if UNITS[i] != COLUMNS[i] * BLOCKS:  # also where a wider tensor has more blocks
            mask = mask & (column < UNITS[i])[None, :]
        if GATHER:
            tl.store(packed_at, tl.load(placed_at, mask=mask), mask=mask)
        else:
            tl.store(placed_at, tl.load(packed_at, mask=mask), mask=mask)


@triton.jit
def copy_parts(
    packed, placed, begin, ends, places, rows, base, low, high, first, end, num_keys, num_samples, num_packed,
    num_placed, ORDER: tl.constexpr, GATHER: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr,
    LANES: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Copy what ranges `low` to `high` have between packed rows `first` and `end`, one range at a time."""
    r = low
    while r <= high:
        behind, start = range_at(ends, places, rows, base, r, num_keys, num_samples, ORDER, SCANNED)
        near = tl.maximum(begin, first)
        count = tl.minimum(behind, end) - near
        far = start + near - begin
        if (far >= 0) & (far + count <= num_placed) & (count > 0):
            for i in tl.static_range(len(UNITS)):
                near_from, far_from = packed[i].to(tl.int64), placed[i].to(tl.int64)
                near_at, far_at = near_from + near * UNITS[i] * WORDS[i], far_from + far * UNITS[i] * WORDS[i]
                size = count * UNITS[i] * WORDS[i]
                if GATHER:
                    bound = far_from + num_placed * UNITS[i] * WORDS[i]
                    copy_run(far_at, near_at, size, far_from, bound, WORDS[i], LANES[i])
                else:
                    bound = near_from + num_packed * UNITS[i] * WORDS[i]
                    copy_run(near_at, far_at, size, near_from, bound, WORDS[i], LANES[i])
        begin = behind
        r += 1


@triton.jit
def copy_tile(
    packed, placed, begin, ends, places, rows, base, low, high, first, end, num_keys, num_samples, num_packed,
    num_placed, ORDER: tl.constexpr, GATHER: tl.constexpr, SCANNED: tl.constexpr, WORDS: tl.constexpr,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, NUM_ROWS: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, WALKED: tl.constexpr,
):  # fmt: skip
    """Copy packed rows `first` to `end`, which ranges `low` to `high` hold, in the better one of the two ways."""
    if PARTS and high - low <= WALKED:
        copy_parts(
            packed, placed, begin, ends, places, rows, base, low, high, first, end, num_keys, num_samples, num_packed,
            num_placed, ORDER, GATHER, WORDS, UNITS, LANES, SCANNED,
        )  # fmt: skip
    else:
        while first < end:
            position = first + tl.arange(0, NUM_ROWS)
            if SCANNED > 0 or high - low <= WALKED:
                shift = shifts_by_walk(
                    position, begin, ends, places, rows, base, low, high, num_keys, num_samples, ORDER, SCANNED
                )
            else:
                found = search_rows(ends, tl.minimum(position, end - 1), low, high)
                place = tl.load(places + row_of(found, rows, num_keys, num_samples, ORDER)).to(tl.int64)
                shift = place - tl.load(ends + found)
            copy_rows(packed, placed, position, shift, end, num_placed, GATHER, UNITS, COLUMNS, BLOCKS)
            first += NUM_ROWS


@triton.jit(
    do_not_specialize=["n", "own", "total", "num_keys", "num_samples", "num_placed"],
    do_not_specialize_on_alignment=["offsets", "lengths", "starts", "rows", "gathered"],
)
def copy_kernel(
    packed, placed, offsets, lengths, starts, rows, gathered,
    n: tl.int64, own: tl.int64, total: tl.int64, num_keys: tl.int64, num_samples: tl.int64, num_placed: tl.int64,
    ORDER: tl.constexpr, GATHER: tl.constexpr, SCANNED: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, NUM_ROWS: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, WALKED: tl.constexpr, WINDOW: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Copy TILE_ROWS packed rows of every tensor; `packed` and `placed` are tuples of word pointers."""
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    end = tl.minimum(first + TILE_ROWS, total)
    if SCANNED > 0:
        ends, places = scan_all(lengths, starts, rows, gathered, n, own, num_keys, num_samples, ORDER, SCANNED)
        end = tl.minimum(tl.max(ends), end)
        low = tl.sum((ends <= first).to(tl.int64))
        high = tl.sum((ends < end).to(tl.int64))
        begin = tl.max(tl.where(ends <= first, ends, 0))
        near = tl.minimum(low + tl.arange(0, WINDOW), SCANNED - 1).to(tl.int32)
        near_ends = tl.gather(ends, near, 0)  # which every warp holds: a walk need not wait for other warps
        near_places = tl.gather(places, near, 0)
        if (first < end) & (high - low < WINDOW):
            copy_tile(
                packed, placed, begin, near_ends, near_places, rows, low, low, high, first, end, num_keys, num_samples,
                total, num_placed, ORDER, GATHER, SCANNED, WORDS, UNITS, COLUMNS, BLOCKS, NUM_ROWS, PARTS, LANES,
                WALKED,
            )  # fmt: skip
        elif first < end:
            copy_tile(
                packed, placed, begin, ends, places, rows, 0, low, high, first, end, num_keys, num_samples,
                total, num_placed, ORDER, GATHER, SCANNED, WORDS, UNITS, COLUMNS, BLOCKS, NUM_ROWS, False, LANES,
                WALKED,
            )  # fmt: skip
    else:
        end = tl.minimum(tl.load(offsets + n), end)
        if first < end:
            low, high = search_pair(offsets, n, first, end - 1, WAYS)
            begin = tl.load(offsets + low)
            copy_tile(
                packed, placed, begin, offsets, starts, rows, 0, low, high, first, end, num_keys, num_samples,
                total, num_placed, ORDER, GATHER, SCANNED, WORDS, UNITS, COLUMNS, BLOCKS, NUM_ROWS, PARTS, LANES,
                WALKED,
            )  # fmt: skip


def copy_ranges(packed: list[Tensor], placed: list[Tensor], ranges: Ranges, total: int, *, gather: bool) -> None:
    """Copy ranges of rows of several tensors, without synchronising.

    Args:
        packed: Tensors of the packed side, contiguous. Each [total, ...].
        placed: Their partners on the placed side, contiguous. Each [num_placed, ...].
        ranges: Which rows; places outside of `placed` are neither read nor written.
        total: Packed rows; what lies beyond the last range is left alone.
        gather: From placed to packed; otherwise from packed to placed.
    """
    count, num_placed = ranges.count, placed[0].shape[0]
    sizes = [row_bytes(tensor) for tensor in packed]
    if 0 in sizes:
        packed, placed = ([side[i] for i, size in enumerate(sizes) if size] for side in (packed, placed))
        sizes = [size for size in sizes if size]
    if not (sizes and count and total and num_placed):
        if ranges.gathered is not None and ranges.offsets is None:
            ranges.scan()  # fills the gathered lengths
        return
    addresses = [(near.data_ptr(), far.data_ptr()) for near, far in zip(packed, placed, strict=True)]
    words = tuple([math.gcd(8, size, *pair) for size, pair in zip(sizes, addresses, strict=True)])
    tile_bytes = TILE_BYTES if total * sum(sizes) > SMALL_BYTES else TILE_BYTES // 2
    latent = total * sum(sizes) <= LATENT_BYTES.get(min(words), 0) and max(sizes) <= NARROW_BYTES
    tile_rows, blocks, constants = _tiling(tuple(sizes), words, tile_bytes, latent)
    scanned = 0 if ranges.offsets is not None else _scanned(ranges, total, tile_rows)
    if not scanned and ranges.offsets is None:
        ranges.scan()
    types, rows, starts = [_WORDS[word] for word in words], ranges.rows, ranges.starts
    aligned = tuple([address % 16 == 0 for pair in addresses for address in pair])
    launch(
        copy_kernel,
        packed[0].device.index,
        (-(-total // tile_rows), blocks, 1),
        (aligned, ranges.lengths.dtype, None if starts is None else starts.dtype, None if rows is None else rows.dtype),
        (
            Words(packed, types), Words(placed, types), None if scanned else ranges.offsets,
            ranges.lengths if scanned else None, starts, rows, ranges.gathered if scanned else None,
        ),
        (count, ranges.lengths.shape[0], total, *ranges.shape, num_placed),
        (ranges.order, gather, scanned, *constants),
    )  # fmt: skip


def _scanned(ranges: Ranges, total: int, tile_rows: int) -> int:
    """Lanes of a scan in every program; 0 if a launch before is better, or so many ranges meet in a tile."""
    longest = max(ranges.count, ranges.lengths.shape[0])
    lanes = next((size for size in SCANNED_SIZES if longest <= size), 0)
    if lanes > SCANNED_SIZES[0] and total > MAX_TILES_SCANNING * tile_rows:
        return 0
    return lanes if ranges.count * min(tile_rows, total) <= WALKED * total else 0


@cache
def _tiling(
    sizes: tuple[int, ...], words: tuple[int, ...], tile_bytes: int, latent: bool
) -> tuple[int, int, tuple[Any, ...]]:
    """Rows a tile, blocks of columns, and the kernel's constants for rows of `sizes` bytes in `words` of bytes."""
    units = tuple(size // word for size, word in zip(sizes, words, strict=True))
    columns = tuple(min(power_of_2(unit), MAX_COLUMNS) for unit in units)
    blocks = -(-max(units) // MAX_COLUMNS)
    row_size = sum(width * word for width, word in zip(columns, words, strict=True))
    parts = blocks == 1 and not latent and (max(sizes) <= NARROW_BYTES or min(words) < 8)
    tile_rows = max(1, power_of_2(tile_bytes // row_size + 1) // 2)
    if latent:
        tile_rows = min(tile_rows, LATENT_ROWS)
    lanes = tuple(power_of_2(-(-tile_rows * size // 8)) for size in sizes)
    chunk_rows = tile_rows if latent else min(tile_rows, CHUNK_ROWS)
    return tile_rows, blocks, (words, units, columns, blocks, tile_rows, chunk_rows, parts, lanes, WALKED, WINDOW, WAYS)


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return int(1 << (number - 1).bit_length())
