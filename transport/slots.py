"""The schedule of a copy engine: pieces cut to slots, in an order that cannot deadlock (paper, sections 3.3 and 5.3).

Between every pair of ranks lies a ring of slots in the receiver's memory. The sender copies a chunk into the next slot
and raises the count of chunks that arrived; the receiver copies it out and raises the count of those consumed. Both
counts only grow, over all transfers of a channel. All of a rank's sends are in one stream and all of its receives in
another, each in order of rounds: round k holds the k-th chunk of every pair. A send of round k waits, at most, for the
receiver to have consumed an earlier chunk of the same pair, and a receive of round k for its send; so nothing waits,
even through others, for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

_TAIL_DIVISOR = 8
_SMALLEST_CUT = 1 << 20
_MASK = 2**32 - 1


class Chunk(NamedTuple):
    """Bytes `start` to `start + size` of the piece between this rank and a peer."""

    peer: int
    start: int
    size: int


def cut(size: int, slot_bytes: int) -> list[int]:
    """Cut a piece into chunks of at most a slot, the last ones ever smaller.

    While the receiver copies a chunk out of its slot, the next one travels. Only the last copy is not hidden, so it is
    a short one.

    Args:
        size: Bytes of the piece.
        slot_bytes: Bytes of a slot.

    Returns:
        Bytes of each chunk, none of them zero; they add up to `size`.

    Example:
        >>> mib = 1 << 20
        >>> [chunk / mib for chunk in cut(96 * mib, 32 * mib)]
        [32.0, 32.0, 28.0, 4.0]
        >>> cut(0, mib)
        []
    """
    full, rest = divmod(size, slot_bytes)
    if full and not rest:
        full, rest = full - 1, slot_bytes
    chunks = [slot_bytes] * full
    while rest > 4 * _SMALLEST_CUT:
        tail = max(_SMALLEST_CUT, rest // _TAIL_DIVISOR)
        chunks.append(rest - tail)
        rest = tail
    return [*chunks, rest] if rest else chunks


def in_rounds(
    rank: int, peers: Sequence[int], sizes: Sequence[int], slot_bytes: int, sends: bool
) -> Iterator[list[Chunk]]:
    """Order all chunks of one direction of a transfer, one round after the other.

    In a round a rank sends to the next member, the one after that, and so on, while it receives from the one before,
    and so on: at any time every member sends to one other and receives from one other.

    Args:
        rank: This rank.
        peers: All members in order, this rank among them.
        sizes: Bytes for, or from, each rank of the world.
        slot_bytes: Bytes of a slot.
        sends: Whether these are the chunks that this rank sends.

    Example:
        >>> [[(c.peer, c.start) for c in chunks] for chunks in in_rounds(1, [0, 1, 2], [5, 0, 3], 4, sends=True)]
        [[(2, 0), (0, 0)], [(0, 4)]]
    """
    here, n = peers.index(rank), len(peers)
    step = 1 if sends else -1
    others = [peers[(here + step * distance) % n] for distance in range(1, n)]
    others = [peer for peer in others if sizes[peer]]
    if all(sizes[peer] <= slot_bytes for peer in others):
        if others:
            yield [Chunk(peer, 0, int(sizes[peer])) for peer in others]
        return
    pieces = {peer: _chunks(peer, int(sizes[peer]), slot_bytes) for peer in others}
    for number in range(max((len(chunks) for chunks in pieces.values()), default=0)):
        yield [chunks[number] for chunks in pieces.values() if number < len(chunks)]


def _chunks(peer: int, size: int, slot_bytes: int) -> list[Chunk]:
    sizes = cut(size, slot_bytes)
    return [Chunk(peer, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def low(count: int) -> int:
    """What a flag of 32 bits shows of a count that never wraps."""
    return count & _MASK


def has_reached(flag: int, count: int) -> bool:
    """Whether a flag shows at least this count, as streams compare: what lies less than 2³¹ ahead is reached.

    Example:
        >>> has_reached(2, 2**32 + 1), has_reached(2, 2**32 + 3)
        (True, False)
    """
    return (flag - count) & _MASK < 2**31
