"""The Triton kernel behind every jagged copy: rows between a packed buffer and places anywhere (paper, section 4.2).

One side of every operation is packed: its ranges lie one after the other, so ascending offsets tell the range of any
of its rows. The other side is placed: each range has a start of its own. Permute, dispatch and transpose gather (placed
to packed), combine scatters (packed to placed); only the direction of the copy differs.

Work is split by packed rows, never by ranges, so one giant range beside thousands of short ones costs nothing extra. A
program finds the ranges of its rows in one of two ways:

- Of few ranges, it scans all lengths itself and keeps offsets and starts in registers: one launch does everything.
- Of many, offsets and places come from launches before (`Ranges.scan`), and it searches them for its first and last row
  with a vector of probes at a time (two steps for 16,000 ranges, three for two million). Its programs may start while
  the scan still runs, and wait for it themselves: a launch costs as much as copying a few MB.

Then there are two ways to copy:

- Row by row, for wide rows, wherever many short ranges meet, and for few bytes: each row finds its range, and its words
  move, all at once.
- Range by range, for many narrow rows in few ranges: what a range has in the tile is a run of bytes, which moves in
  aligned 8-byte words whatever the dtype; where source and result are not aligned alike, a word comes from two of the
  source. Rows of 1, 2 or 4 bytes would otherwise be limited by instructions, not by memory. Of many bytes, a program
  copies several pieces after one search.

Row numbers and addresses are int64 throughout. Rows of 4 or 8 bytes in more ranges than a program scans have a kernel
of their own (copy_narrow.py), unless most ranges are short.
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
from triton.language.extra.cuda import gdc_wait

from .copy_narrow import copy_narrow
from .copy_run import copy_run
from .find_ranges import range_at, scan_all, search_pair, search_rows
from .launch import Words, launch
from .ranges import STARTS, Ranges, row_of

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
SHORTEST = 64  # mean length from which on copy_narrow.py serves, which walks all ranges
JAGGED_SCANNED = 256  # the most for rows of 4 or 8 bytes whose places are sums of lengths, too
MAX_TILES_SCANNING = 2048  # if there are at most so many programs
PIECES = 2  # of TILE_BYTES, that one program copies one after the other, with one search for both,
LARGE_BYTES = 12 * 2**20  # where more than so many bytes move


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
    LANES: tl.constexpr, PIECE: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Copy what ranges `low` to `high` have between packed rows `first` and `end`, PIECE rows of a range at a time."""
    r, near = low, first
    behind, start = range_at(ends, places, rows, base, r, num_keys, num_samples, ORDER, SCANNED)
    while r <= high:
        until = tl.minimum(behind, end)
        count = tl.minimum(until - near, PIECE)
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
        near += tl.maximum(count, 0)
        if near >= until:
            r += 1
            begin = behind
            behind, start = range_at(
                ends, places, rows, base, tl.minimum(r, high), num_keys, num_samples, ORDER, SCANNED
            )


@triton.jit
def copy_tile(
    packed, placed, begin, ends, places, rows, base, low, high, first, end, num_keys, num_samples, num_packed,
    num_placed, ORDER: tl.constexpr, GATHER: tl.constexpr, SCANNED: tl.constexpr, WORDS: tl.constexpr,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, NUM_ROWS: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, PIECE: tl.constexpr, WALKED: tl.constexpr,
):  # fmt: skip
    """Copy packed rows `first` to `end`, which ranges `low` to `high` hold, in the better one of the two ways."""
    if PARTS and high - low <= WALKED:
        copy_parts(
            packed, placed, begin, ends, places, rows, base, low, high, first, end, num_keys, num_samples, num_packed,
            num_placed, ORDER, GATHER, WORDS, UNITS, LANES, PIECE, SCANNED,
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
    ORDER: tl.constexpr, GATHER: tl.constexpr, SCANNED: tl.constexpr, FOLLOWS: tl.constexpr, WORDS: tl.constexpr,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, NUM_ROWS: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr, WALKED: tl.constexpr, WINDOW: tl.constexpr,
    WAYS: tl.constexpr,
):  # fmt: skip
    """Copy TILE_ROWS packed rows of every tensor; `packed` and `placed` are tuples of word pointers."""
    if FOLLOWS:
        gdc_wait()  # for the launch before, which this one may overtake until here
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
                PIECE, WALKED,
            )  # fmt: skip
        elif first < end:
            copy_tile(
                packed, placed, begin, ends, places, rows, 0, low, high, first, end, num_keys, num_samples,
                total, num_placed, ORDER, GATHER, SCANNED, WORDS, UNITS, COLUMNS, BLOCKS, NUM_ROWS, False, LANES,
                PIECE, WALKED,
            )  # fmt: skip
    else:
        end = tl.minimum(tl.load(offsets + n), end)
        if first < end:
            low, high = search_pair(offsets, n, first, end - 1, WAYS)
            begin = tl.load(offsets + low)
            copy_tile(
                packed, placed, begin, offsets, starts, rows, 0, low, high, first, end, num_keys, num_samples,
                total, num_placed, ORDER, GATHER, SCANNED, WORDS, UNITS, COLUMNS, BLOCKS, NUM_ROWS, PARTS, LANES,
                PIECE, WALKED,
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
    num_bytes, narrowest = total * sum(sizes), min(words)
    tile_bytes = TILE_BYTES if num_bytes > SMALL_BYTES else TILE_BYTES // 2
    latent = num_bytes <= LATENT_BYTES.get(narrowest, 0) and max(sizes) <= NARROW_BYTES
    pieces = PIECES if num_bytes > LARGE_BYTES else 1
    tile_rows, blocks, constants = _tiling(tuple(sizes), words, tile_bytes, latent, pieces)
    narrow = narrowest >= 4 and words == tuple(sizes) and count * SHORTEST <= total
    scanned = 0 if ranges.offsets is not None else _scanned(ranges, total, tile_rows, narrow=narrow)
    follows = False
    if not scanned and ranges.offsets is None:
        ranges.scan()
        follows = ranges.followed
    if not scanned and narrow:
        copy_narrow(packed, placed, words, ranges, total, gather=gather, follows=follows)
        return
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
        (ranges.order, gather, scanned, follows, *constants),
        follows=follows,
    )  # fmt: skip


def _scanned(ranges: Ranges, total: int, tile_rows: int, *, narrow: bool) -> int:
    """Lanes of a scan in every program; 0 if a launch before is better, or so many ranges meet in a tile."""
    longest = max(ranges.count, ranges.lengths.shape[0])
    if narrow and ranges.order != STARTS and longest > JAGGED_SCANNED:
        return 0
    lanes = next((size for size in SCANNED_SIZES if longest <= size), 0)
    if lanes > SCANNED_SIZES[0] and total > MAX_TILES_SCANNING * tile_rows:
        return 0
    return lanes if ranges.count * min(tile_rows, total) <= WALKED * total else 0


@cache
def _tiling(
    sizes: tuple[int, ...], words: tuple[int, ...], tile_bytes: int, latent: bool, pieces: int
) -> tuple[int, int, tuple[Any, ...]]:
    """Rows a tile, blocks of columns, and the kernel's constants for rows of `sizes` bytes in `words` of bytes."""
    units = tuple(size // word for size, word in zip(sizes, words, strict=True))
    columns = tuple(min(power_of_2(unit), MAX_COLUMNS) for unit in units)
    blocks = -(-max(units) // MAX_COLUMNS)
    row_size = sum(width * word for width, word in zip(columns, words, strict=True))
    parts = blocks == 1 and not latent and (max(sizes) <= NARROW_BYTES or min(words) < 8)
    piece = max(1, power_of_2(tile_bytes // row_size + 1) // 2)
    if latent:
        piece = min(piece, LATENT_ROWS)
    lanes = tuple(power_of_2(-(-piece * size // 8)) for size in sizes)
    chunk_rows = piece if latent else min(piece, CHUNK_ROWS)
    tile_rows, walked = (piece * pieces, WALKED * pieces) if parts else (piece, WALKED)
    return (
        tile_rows, blocks,
        (words, units, columns, blocks, tile_rows, chunk_rows, parts, lanes, piece, walked, WINDOW, WAYS),
    )  # fmt: skip


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return int(1 << (number - 1).bit_length())
