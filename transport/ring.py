"""Who sends which bytes to whom, in which order, cut into which chunks: Figure 6's ring, and pairwise (section 3.3).

Pure arithmetic: nothing here moves anything. All ranks compute the same from the sizes that they have in common.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


def ring_sends(rank: int, world_size: int) -> list[int]:
    """Blocks that a rank passes to its successor, in order: its own, then those it receives, but for the last one.

    Source: FreeScale, Figure 6: "each rank propagates the chunk it received from the last stage on the RDMA ring to its
    clockwise neighbor".

    Example:
        >>> ring_sends(1, 4)
        [1, 0, 3]
    """
    return [(rank - step) % world_size for step in range(world_size - 1)]


def ring_receives(rank: int, world_size: int) -> list[int]:
    """Blocks that a rank receives from its predecessor, in order: what the predecessor sends.

    Example:
        >>> ring_receives(2, 4)
        [1, 0, 3]
    """
    return ring_sends((rank - 1) % world_size, world_size)


def pairwise_sends(rank: int, world_size: int) -> list[int]:
    """Peers that a rank sends to, in order. In each step every rank sends to one and receives from one.

    Example:
        >>> pairwise_sends(1, 4)
        [2, 3, 0]
    """
    return [(rank + step) % world_size for step in range(1, world_size)]


def pairwise_receives(rank: int, world_size: int) -> list[int]:
    """Peers that a rank receives from, in order: in step s, the one that sends to it then.

    Example:
        >>> pairwise_receives(1, 4)
        [0, 3, 2]
    """
    return [(rank - step) % world_size for step in range(1, world_size)]


class Chunk(NamedTuple):
    """What one RDMA write carries.

    Attributes:
        owner: The rank whose block it is part of, or, sent pairwise, the peer.
        start: Where it begins in that block, in bytes.
        size: Bytes.
    """

    owner: int
    start: int
    size: int


class Stream:
    """Blocks that go one after the other from one rank to another, each cut into chunks. No chunk spans two blocks.

    Args:
        owners: Whose blocks, in order.
        sizes: Bytes of each. No limit: a block of 2**40 costs nothing here.
        chunk_bytes: Bytes of every chunk but the last of its block.

    Example:
        >>> stream = Stream([2, 0], [10, 4], chunk_bytes=8)
        >>> [stream[i] for i in range(len(stream))]
        [Chunk(owner=2, start=0, size=8), Chunk(owner=2, start=8, size=2), Chunk(owner=0, start=0, size=4)]
    """

    def __init__(self, owners: Sequence[int], sizes: Sequence[int], chunk_bytes: int) -> None:
        self._owners, self._sizes, self._chunk_bytes = list(owners), list(sizes), chunk_bytes
        counts = [-(-size // chunk_bytes) for size in sizes]
        self._ends = list(accumulate(counts))
        self._num_chunks = self._ends[-1] if counts else 0

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> Chunk:
        if not 0 <= index < self._num_chunks:
            raise IndexError(f"a stream of {self._num_chunks} chunks has no chunk {index}")
        block = bisect_right(self._ends, index)
        first = self._ends[block - 1] if block else 0
        start = (index - first) * self._chunk_bytes
        return Chunk(self._owners[block], start, min(self._chunk_bytes, self._sizes[block] - start))
