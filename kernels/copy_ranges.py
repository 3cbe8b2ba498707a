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
# ruff: noqa: N803, SIM108
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import Words, launch
from .ranges import Ranges, row_of

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
TILE_BYTES = 8192  # that one program copies, about
SMALL_BYTES = 2**20  # up to which it copies half of that, to keep all processors busy
CHUNK_ROWS = 1024  # rows that are copied one by one at a time
MAX_COLUMNS = 512  # words of a row that one program copies
NARROW_BYTES = 64  # rows up to this size are copied range by range
LATENT_BYTES = 2**25  # up to which waiting counts more than instructions: rows of whole words are copied one by one
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
    """Return all ranges' first packed rows, places, and total; the first program also writes the gathered lengths."""
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
    length = length.to(tl.int64)
    return tl.cumsum(length) - length, start, tl.sum(length)


@triton.jit
def window_at(
    offsets, starts, rows, first, n, num_keys, num_samples,
    ORDER: tl.constexpr, SCANNED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the ends in packed rows, and the places, of WINDOW ranges from `first` on, which all warps then hold."""
    r = first + tl.arange(0, WINDOW)
    if SCANNED > 0:
        start = tl.gather(starts, tl.minimum(r, SCANNED - 1).to(tl.int32), 0)
        end = tl.gather(offsets, tl.minimum(r + 1, SCANNED - 1).to(tl.int32), 0)
    else:
        inside = r < n
        end = tl.load(offsets + 1 + r, mask=inside, other=0)
        row = row_of(tl.where(inside, r, 0), rows, num_keys, num_samples, ORDER)
        start = tl.load(starts + row, mask=inside, other=0).to(tl.int64)
    return end, start


@triton.jit
def pick(vector, i):
    """Return element i of a vector."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == i, vector, 0))


@triton.jit
def shifts_by_walk(
    position, begin, offsets, starts, rows, low, high, n, num_keys, num_samples,
    ORDER: tl.constexpr, SCANNED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return how far from each packed row its place is, range by range from `low`, which begins at `begin`."""
    shift = tl.zeros_like(position)
    r, base = low, low
    ends, places = window_at(offsets, starts, rows, base, n, num_keys, num_samples, ORDER, SCANNED, WINDOW)
    while r <= high:
        if r == base + WINDOW:
            base = r
            ends, places = window_at(offsets, starts, rows, base, n, num_keys, num_samples, ORDER, SCANNED, WINDOW)
        shift = tl.where(position >= begin, pick(places, r - base) - begin, shift)
        begin = pick(ends, r - base)
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
def copy_words(source, target, size, LANES: tl.constexpr):
    """Copy at most LANES * 8 bytes between two addresses; all three are multiples of 8."""
    lane = tl.arange(0, LANES)
    mask = lane < size // 8
    word = tl.load(source.to(tl.pointer_type(tl.int64)) + lane, mask=mask)
    tl.store(target.to(tl.pointer_type(tl.int64)) + lane, word, mask=mask)


@triton.jit
def copy_halves(source, target, size, LANES: tl.constexpr):
    """Copy at most LANES * 8 bytes between two addresses; all three are multiples of 4."""
    head = tl.minimum((-target) & 7, size)
    words = (size - head) // 8
    edge = tl.arange(0, 2)  # a half before the aligned words, a half behind
    at = tl.where(edge == 0, 0, (head + words * 8) // 4)
    mask = tl.where(edge == 0, head > 0, head + words * 8 < size)
    half = tl.load(source.to(tl.pointer_type(tl.int32)) + at, mask=mask)
    tl.store(target.to(tl.pointer_type(tl.int32)) + at, half, mask=mask)
    lane = tl.arange(0, LANES)
    mask = lane < words
    halves = (source + head).to(tl.pointer_type(tl.uint32)) + lane * 2
    low = tl.load(halves, mask=mask, other=0).to(tl.uint64)
    high = tl.load(halves + 1, mask=mask, other=0).to(tl.uint64)
    tl.store((target + head).to(tl.pointer_type(tl.uint64)) + lane, low | (high << 32), mask=mask)


@triton.jit
def copy_bytes(source, target, size, lower, upper, LANES: tl.constexpr):
    """Copy at most LANES * 8 bytes between any two addresses. Reads nothing outside of `lower` to `upper`."""
    head = tl.minimum((-target) & 7, size)
    words = (size - head) // 8
    near = (source + head) & -8
    early = ((near < lower) & (words > 0)).to(tl.int64)  # the first source word begins before the buffer
    head += early * 8
    words -= early
    near += early * 8
    shift = ((source + head - near) * 8).to(tl.uint64)
    late = (shift > 0) & (near + words * 8 + 8 > upper) & (words > 0)  # the last one ends behind it
    words -= late.to(tl.int64)
    edge = tl.arange(0, 32)  # fewer than 16 bytes before the words, fewer than 16 behind
    at = tl.where(edge < 16, edge, edge - 16 + head + words * 8)
    mask = tl.where(edge < 16, edge < head, at < size)
    byte = tl.load(source.to(tl.pointer_type(tl.int8)) + at, mask=mask)
    tl.store(target.to(tl.pointer_type(tl.int8)) + at, byte, mask=mask)
    lane = tl.arange(0, LANES)
    mask = lane < words
    word = tl.load(near.to(tl.pointer_type(tl.uint64)) + lane, mask=mask, other=0)
    if shift > 0:
        following = tl.load((near + 8).to(tl.pointer_type(tl.uint64)) + lane, mask=mask, other=0)
        word = (word >> shift) | (following << (64 - shift))
    tl.store((target + head).to(tl.pointer_type(tl.uint64)) + lane, word, mask=mask)


@triton.jit
def copy_run(source, target, size, lower, upper, WORD: tl.constexpr, LANES: tl.constexpr):
    """Copy at most LANES * 8 bytes between two addresses; all three are multiples of WORD."""
    if WORD == 8:
        copy_words(source, target, size, LANES)
    elif WORD == 4:
        copy_halves(source, target, size, LANES)
    else:
        copy_bytes(source, target, size, lower, upper, LANES)


@triton.jit
def copy_parts(
    packed, placed, begin, offsets, starts, rows, low, high, first, end, n, num_keys, num_samples, num_packed,
    num_placed, ORDER: tl.constexpr, GATHER: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr,
    LANES: tl.constexpr, SCANNED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Copy what ranges `low` to `high` have between packed rows `first` and `end`, one range at a time."""
    r, base = low, low
    ends, places = window_at(offsets, starts, rows, base, n, num_keys, num_samples, ORDER, SCANNED, WINDOW)
    while r <= high:
        if r == base + WINDOW:
            base = r
            ends, places = window_at(offsets, starts, rows, base, n, num_keys, num_samples, ORDER, SCANNED, WINDOW)
        behind = tl.where(r < high, pick(ends, r - base), end)
        start = pick(places, r - base)
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
    if SCANNED > 0:
        offsets, starts, found = scan_all(
            lengths, starts, rows, gathered, n, own, num_keys, num_samples, ORDER, SCANNED
        )
        end = tl.minimum(found, total)
    else:
        end = tl.minimum(tl.load(offsets + n), total)
    end = tl.minimum(end, first + TILE_ROWS)
    if first < end:
        if SCANNED > 0:
            bound = tl.where(tl.arange(0, SCANNED) > 0, offsets, -1)
            low = tl.sum(((bound >= 0) & (bound <= first)).to(tl.int64))
            high = tl.sum(((bound >= 0) & (bound < end)).to(tl.int64))
        else:
            low, high = search_pair(offsets, n, first, end - 1, WAYS)
        if SCANNED > 0:
            begin = pick(offsets, low)
        else:
            begin = tl.load(offsets + low)
        if PARTS and high - low <= WALKED:
            copy_parts(
                packed, placed, begin, offsets, starts, rows, low, high, first, end, n, num_keys, num_samples, total,
                num_placed, ORDER, GATHER, WORDS, UNITS, LANES, SCANNED, WINDOW,
            )  # fmt: skip
        else:
            while first < end:
                position = first + tl.arange(0, NUM_ROWS)
                if SCANNED > 0 or high - low <= WALKED:
                    shift = shifts_by_walk(
                        position, begin, offsets, starts, rows, low, high, n, num_keys, num_samples,
                        ORDER, SCANNED, WINDOW,
                    )  # fmt: skip
                else:
                    found = search_rows(offsets, tl.minimum(position, end - 1), low, high)
                    start = tl.load(starts + row_of(found, rows, num_keys, num_samples, ORDER)).to(tl.int64)
                    shift = start - tl.load(offsets + found)
                copy_rows(packed, placed, position, shift, end, num_placed, GATHER, UNITS, COLUMNS, BLOCKS)
                first += NUM_ROWS


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
    latent = total * sum(sizes) <= LATENT_BYTES and min(words) >= 4
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
    narrow = max(sizes) <= NARROW_BYTES
    parts = blocks == 1 and not (latent and narrow) and (narrow or min(words) < 8)
    tile_rows = max(1, power_of_2(tile_bytes // row_size + 1) // 2)
    lanes = tuple(power_of_2(-(-tile_rows * size // 8)) for size in sizes)
    chunk_rows = min(tile_rows, CHUNK_ROWS)
    return tile_rows, blocks, (words, units, columns, blocks, tile_rows, chunk_rows, parts, lanes, WALKED, WINDOW, WAYS)


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return int(1 << (number - 1).bit_length())
