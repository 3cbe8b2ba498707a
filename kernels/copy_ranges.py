"""The Triton kernel behind every jagged copy: rows between a packed buffer and places anywhere (paper, section 4.2).

One side of every operation is packed: its ranges lie one after the other, so ascending offsets tell the range of any
of its rows. The other side is placed: each range has a start of its own. Permute, dispatch and transpose gather (placed
to packed), combine scatters (packed to placed); only the direction of the copy differs.

Work is split by packed rows, never by ranges, so one giant range beside thousands of short ones costs nothing extra. A
program searches the offsets for its first and last row with a vector of probes at a time (two steps for 16,000 ranges,
three for two million). Then there are two ways to copy:

- Row by row, for wide rows and wherever many short ranges meet: each row finds its range, and its words move.
- Range by range, for narrow rows in few ranges: what a range has in the tile is a run of bytes, which moves in aligned
  8-byte words whatever the dtype; where source and result are not aligned alike, two source words are shifted
  together. Rows of 1, 2 or 4 bytes would otherwise be limited by instructions, not by memory.

Row numbers and addresses are int64 throughout.
"""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
TILE_BYTES = 8192  # that one program copies row by row, about
PARTS_BYTES = 8192  # that one program copies range by range, about
CHUNK_ROWS = 512  # rows that are copied one by one at a time
MAX_COLUMNS = 512  # words of a row that one program copies
NARROW_BYTES = 64  # rows up to this size are copied range by range
WALKED = 16  # ranges that are copied one by one
WAYS = 128  # probes of one search step

STARTS, ROWS, TRANSPOSED = 0, 1, 2  # how a range finds its place


@dataclass(frozen=True)
class Places:
    """Where the ranges lie on the placed side.

    Attributes:
        order: STARTS: range r begins at row `starts[r]`. ROWS: at `starts[rows[r]]`. TRANSPOSED: range r = s * K + k at
            `starts[k * B + s]`.
        starts: Rows, int64 or int32.
        rows: Only for ROWS; shape [n], int64 or int32.
        shape: (K, B), only for TRANSPOSED.
    """

    order: int
    starts: Tensor
    rows: Tensor | None = None
    shape: tuple[int, int] = (1, 1)


@triton.jit
def row_of(r, rows, num_keys, num_samples, ORDER: tl.constexpr):
    """Return the row of the placed side that range r is."""
    if ORDER == 1:
        r = tl.load(rows + r).to(tl.int64)
    if ORDER == 2:
        r = (r % num_keys) * num_samples + r // num_keys
    return r


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
def copy_rows(
    packed, placed, offsets, starts, rows, low, high, first, end, num_keys, num_samples, num_placed,
    ORDER: tl.constexpr, GATHER: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, NUM_ROWS: tl.constexpr, WALKED: tl.constexpr,
):  # fmt: skip
    """Copy packed rows from `first` to `end`, at most NUM_ROWS, that lie in ranges `low` to `high`."""
    position = first + tl.arange(0, NUM_ROWS)
    if high - low <= WALKED:
        shift = tl.load(starts + row_of(low, rows, num_keys, num_samples, ORDER)).to(tl.int64) - tl.load(offsets + low)
        shift += tl.zeros_like(position)
        r = low + 1
        while r <= high:
            begin = tl.load(offsets + r)
            start = tl.load(starts + row_of(r, rows, num_keys, num_samples, ORDER)).to(tl.int64)
            shift = tl.where(position >= begin, start - begin, shift)
            r += 1
    else:
        found = search_rows(offsets, tl.minimum(position, end - 1), low, high)
        shift = tl.load(starts + row_of(found, rows, num_keys, num_samples, ORDER)).to(tl.int64)
        shift -= tl.load(offsets + found)
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
def copy_bytes(source, target, size, ALIGNED: tl.constexpr, LANES: tl.constexpr):
    """Copy at most LANES * 8 bytes between two addresses. Reads only words that hold at least one byte asked for."""
    lane = tl.arange(0, LANES)
    if ALIGNED:
        mask = lane < size // 8
        word = tl.load(source.to(tl.pointer_type(tl.int64)) + lane, mask=mask)
        tl.store(target.to(tl.pointer_type(tl.int64)) + lane, word, mask=mask)
    else:
        head = tl.minimum((-target) & 7, size)
        words = (size - head) // 8
        tail = size - head - words * 8
        edge = tl.arange(0, 16)  # up to 7 bytes before the aligned words, up to 7 behind
        at = tl.where(edge < 8, edge, edge - 8 + head + words * 8)
        mask = tl.where(edge < 8, edge < head, edge - 8 < tail)
        byte = tl.load(source.to(tl.pointer_type(tl.int8)) + at, mask=mask)
        tl.store(target.to(tl.pointer_type(tl.int8)) + at, byte, mask=mask)
        mask = lane < words
        source += head
        near = source.to(tl.int64) & -8
        shift = ((source - near) * 8).to(tl.uint64)
        word = tl.load(near.to(tl.pointer_type(tl.uint64)) + lane, mask=mask, other=0)
        if shift > 0:
            following = tl.load((near + 8).to(tl.pointer_type(tl.uint64)) + lane, mask=mask, other=0)
            word = (word >> shift) | (following << (64 - shift))
        tl.store((target + head).to(tl.pointer_type(tl.uint64)) + lane, word, mask=mask)


@triton.jit
def copy_parts(
    packed, placed, offsets, starts, rows, low, high, first, end, num_keys, num_samples, num_placed,
    ORDER: tl.constexpr, GATHER: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Copy what ranges `low` to `high` have between packed rows `first` and `end`, one range at a time."""
    r = low
    begin = tl.load(offsets + low)
    while r <= high:
        behind = tl.load(offsets + r + 1)
        start = tl.load(starts + row_of(r, rows, num_keys, num_samples, ORDER)).to(tl.int64)
        near = tl.maximum(begin, first)
        count = tl.minimum(behind, end) - near
        far = start + near - begin
        if (far >= 0) & (far + count <= num_placed) & (count > 0):
            for i in tl.static_range(len(UNITS)):
                packed_at = packed[i].to(tl.int64) + near * (UNITS[i] * WORDS[i])
                placed_at = placed[i].to(tl.int64) + far * (UNITS[i] * WORDS[i])
                size = (count * (UNITS[i] * WORDS[i])).to(tl.int32)
                if GATHER:
                    copy_bytes(placed_at, packed_at, size, WORDS[i] == 8, LANES[i])
                else:
                    copy_bytes(packed_at, placed_at, size, WORDS[i] == 8, LANES[i])
        begin = behind
        r += 1


@triton.jit(
    do_not_specialize=["n", "total", "num_keys", "num_samples", "num_placed"],
    do_not_specialize_on_alignment=["offsets", "starts", "rows"],
)
def copy_kernel(
    packed, placed, offsets, starts, rows,
    n: tl.int64, total: tl.int64, num_keys: tl.int64, num_samples: tl.int64, num_placed: tl.int64,
    ORDER: tl.constexpr, GATHER: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, NUM_ROWS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    WALKED: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Copy TILE_ROWS packed rows of every tensor; `packed` and `placed` are tuples of word pointers."""
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    end = tl.minimum(first + TILE_ROWS, tl.minimum(total, tl.load(offsets + n)))
    if first < end:
        low, high = search_pair(offsets, n, first, end - 1, WAYS)
        if PARTS and high - low <= WALKED:
            copy_parts(
                packed, placed, offsets, starts, rows, low, high, first, end, num_keys, num_samples, num_placed,
                ORDER, GATHER, WORDS, UNITS, LANES,
            )  # fmt: skip
        else:
            while first < end:
                copy_rows(
                    packed, placed, offsets, starts, rows, low, high, first, end, num_keys, num_samples, num_placed,
                    ORDER, GATHER, UNITS, COLUMNS, BLOCKS, NUM_ROWS, WALKED,
                )  # fmt: skip
                first += NUM_ROWS


def copy_ranges(
    packed: list[Tensor], placed: list[Tensor], offsets: Tensor, total: int, places: Places, *, gather: bool
) -> None:
    """Copy ranges of rows of several tensors in one launch, without synchronising.

    Args:
        packed: Tensors of the packed side, contiguous. Each [total, ...].
        placed: Their partners on the placed side, contiguous. Each [num_placed, ...].
        offsets: First packed row of each range, and the end of the last. Shape [n + 1], int64.
        total: Packed rows; what lies beyond `offsets[-1]` is left alone.
        places: Where the ranges lie on the placed side. Rows outside of it are neither read nor written.
        gather: From placed to packed; otherwise from packed to placed.
    """
    num_ranges, num_placed = len(offsets) - 1, len(placed[0])
    sizes = [row_bytes(tensor) for tensor in packed]
    if 0 in sizes:
        packed, placed = ([side[i] for i, size in enumerate(sizes) if size] for side in (packed, placed))
        sizes = [size for size in sizes if size]
    if not (sizes and num_ranges and total and num_placed):
        return
    addresses = [(near.data_ptr(), far.data_ptr()) for near, far in zip(packed, placed, strict=True)]
    words = tuple(math.gcd(8, size, *pair) for size, pair in zip(sizes, addresses, strict=True))
    tile_rows, blocks, constants = _tiling(tuple(sizes), words)
    types, rows = [_WORDS[word] for word in words], places.rows
    aligned = tuple(address % 16 == 0 for pair in addresses for address in pair)
    launch(
        copy_kernel,
        (-(-total // tile_rows), blocks, 1),
        (aligned, places.starts.dtype, None if rows is None else rows.dtype),
        (
            tuple(zip(packed, types, strict=True)), tuple(zip(placed, types, strict=True)), offsets, places.starts,
            rows, num_ranges, total, *places.shape, num_placed,
        ),
        (places.order, gather, *constants),
    )  # fmt: skip


@cache
def _tiling(sizes: tuple[int, ...], words: tuple[int, ...]) -> tuple[int, int, tuple[Any, ...]]:
    """Rows a tile, blocks of columns, and the kernel's constants for rows of `sizes` bytes in `words` of bytes."""
    units = tuple(size // word for size, word in zip(sizes, words, strict=True))
    columns = tuple(min(power_of_2(unit), MAX_COLUMNS) for unit in units)
    blocks = -(-max(units) // MAX_COLUMNS)
    row_size = sum(width * word for width, word in zip(columns, words, strict=True))
    parts = blocks == 1 and (max(sizes) <= NARROW_BYTES or min(words) < 8)
    tile_rows = max(1, power_of_2((PARTS_BYTES if parts else TILE_BYTES) // row_size + 1) // 2)
    lanes = tuple(power_of_2(-(-tile_rows * size // 8)) for size in sizes)
    chunk_rows = max(1, min(tile_rows, CHUNK_ROWS))
    return tile_rows, blocks, (words, units, columns, blocks, tile_rows, chunk_rows, parts, lanes, WALKED, WAYS)


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return int(1 << (number - 1).bit_length())
