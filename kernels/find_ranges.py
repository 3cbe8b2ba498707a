"""Triton code by which a program finds the ranges of its packed rows (paper, section 4.2)."""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .ranges import row_of


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
def search_first(offsets, n, first, end, WAYS: tl.constexpr):
    """Return the range that holds packed row `first`: how many of offsets[1..n] are not above it; `end` is the last.

    The first step looks where the range would be were all of one length: for most rows it is near, and found.
    """
    probes = tl.arange(1, WAYS + 1).to(tl.int64)
    likely = (first.to(tl.float32) / end.to(tl.float32) * n.to(tl.float32)).to(tl.int64) - WAYS // 2
    base = tl.maximum(tl.minimum(likely, n - WAYS), 0)
    at = base + probes
    bound = tl.load(offsets + at, mask=at <= n, other=0)
    count = tl.sum(((at <= n) & (bound <= first)).to(tl.int32))
    low, span = base * 0, n
    if ((count > 0) | (base == 0)) & ((count < WAYS) | (base + WAYS >= n)):
        low, span = base + count, n * 0
    while span > 0:
        step = (span + WAYS - 1) // WAYS
        at = low + probes * step
        inside = at <= n
        bound = tl.load(offsets + at, mask=inside, other=0)
        low += step * tl.sum((inside & (bound <= first)).to(tl.int32))
        span = step - 1
    return low


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
