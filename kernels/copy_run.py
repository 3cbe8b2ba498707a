"""Triton code that copies a run of bytes in aligned 8-byte words, wherever it begins and ends (paper, section 4.2)."""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


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
    place = (target + head).to(tl.pointer_type(tl.uint64)) + lane
    if ((source + head) & 7) == 0:
        tl.store(place, tl.load((source + head).to(tl.pointer_type(tl.uint64)) + lane, mask=mask), mask=mask)
    else:
        halves = (source + head).to(tl.pointer_type(tl.uint32)) + lane * 2
        low = tl.load(halves, mask=mask, other=0).to(tl.uint64)
        high = tl.load(halves + 1, mask=mask, other=0).to(tl.uint64)
        tl.store(place, low | (high << 32), mask=mask)


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
