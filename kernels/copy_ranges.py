"""The Triton kernel behind every jagged copy: rows between a packed buffer and places anywhere (paper, section 4.2).

One side of every operation is packed: its ranges lie one after the other, so ascending offsets tell the range of any
of its rows. The other side is placed: each range has a start of its own. Permute, dispatch and transpose gather (placed
to packed), combine scatters (packed to placed); only the direction of the copy differs.

Work is split by packed rows, never by ranges, so one giant range beside thousands of short ones costs nothing extra. A
program searches the offsets for its first and last row with a vector of probes at a time (two steps for 16,000 ranges,
three for two million). If few ranges meet in its rows it walks them; if many do, each row searches between the two.
Bytes move in the widest words that rows and addresses allow, whatever the dtype. Row numbers and addresses are int64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import TensorWrapper

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
MAX_COLUMNS = 512  # words of a row that one program moves
TILE_BYTES = 8192  # that one program moves, about
MAX_TILE_ROWS = 2048
WALKED = 16  # at most this many ranges are walked
WAYS = 128  # probes of one search step
NUM_WARPS = 4

STARTS, ROWS, TRANSPOSED = 0, 1, 2  # how a range finds its place


@dataclass(frozen=True)
class Places:
    """Where the ranges lie on the placed side.

    Attributes:
        order: STARTS: range r begins at row `starts[r]`. ROWS: at `starts[rows[r]]`. TRANSPOSED: at `starts[s * K + k]`
            turned round, r counting [B, K] (sample-major) and `starts` lying in [K, B].
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


@triton.jit(do_not_specialize=["n", "total", "num_keys", "num_samples", "num_placed"])
def copy_kernel(
    packed, placed, offsets, starts, rows, n, total, num_keys, num_samples, num_placed,
    ORDER: tl.constexpr, GATHER: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, WALKED: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Copy TILE_ROWS packed rows of every tensor; `packed` and `placed` are tuples of word pointers."""
    n = n.to(tl.int64)
    num_keys = num_keys.to(tl.int64)
    total = tl.minimum(total.to(tl.int64), tl.load(offsets + n))
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    position = first + tl.arange(0, TILE_ROWS)
    last = tl.minimum(first + TILE_ROWS, total) - 1
    searched = tl.maximum(tl.minimum(position, last), 0)
    low, high = search_pair(offsets, n, tl.maximum(tl.minimum(first, last), 0), tl.maximum(last, 0), WAYS)
    high = tl.minimum(high, n - 1)
    low = tl.minimum(low, high)
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
        found = search_rows(offsets, searched, low, high)
        shift = tl.load(starts + row_of(found, rows, num_keys, num_samples, ORDER)).to(tl.int64)
        shift -= tl.load(offsets + found)
    place = position + shift
    valid = (position < total) & (place >= 0) & (place < num_placed)
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
    n, num_placed = len(offsets) - 1, len(placed[0])
    pairs = [(near, far) for near, far in zip(packed, placed, strict=True) if math.prod(near.shape[1:])]
    if not (pairs and n and total and num_placed):
        return
    words = [widest_word(near, far) for near, far in pairs]
    units = tuple(row_bytes(near) // word for (near, _), word in zip(pairs, words, strict=True))
    columns = tuple(min(triton.next_power_of_2(unit), MAX_COLUMNS) for unit in units)
    tile_bytes = sum(width * word for width, word in zip(columns, words, strict=True))
    tile_rows = max(1, min(MAX_TILE_ROWS, triton.next_power_of_2(TILE_BYTES // tile_bytes + 1) // 2))
    blocks = max(-(-unit // width) for unit, width in zip(units, columns, strict=True))
    copy_kernel[(-(-total // tile_rows), blocks)](
        tuple(TensorWrapper(near, _WORDS[word]) for (near, _), word in zip(pairs, words, strict=True)),
        tuple(TensorWrapper(far, _WORDS[word]) for (_, far), word in zip(pairs, words, strict=True)),
        offsets, places.starts, places.rows, n, total, *places.shape, num_placed,
        ORDER=places.order, GATHER=gather, UNITS=units, COLUMNS=columns,
        BLOCKS=blocks, TILE_ROWS=tile_rows, WALKED=WALKED, WAYS=WAYS, num_warps=NUM_WARPS,
    )  # fmt: skip


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def widest_word(near: Tensor, far: Tensor) -> int:
    """Bytes of the widest word that rows and both addresses are multiples of, at most 8."""
    return math.gcd(8, row_bytes(near), near.data_ptr(), far.data_ptr())
