"""Which rows two consecutive batches share, found by their owner, and how it tells the ranks that asked (section 3.2).

Each local row carries the number of the last batch that asked for it, so the test costs what the batch has in rows,
whatever the table has. Answers travel one bit a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .forms import Bits, Ints

_LAST_GENERATION = 2**15 - 1


class Stamps:
    """The generation of the last batch that asked for each local row.

    Args:
        local_rows: Rows of the shard.

    Example:
        >>> stamps = Stamps(6)
        >>> stamps.mark(np.array([1, 4])).tolist()
        [False, False]
        >>> stamps.mark(np.array([4, 5])).tolist(), stamps.is_latest(np.array([1, 4])).tolist()
        ([True, False], [False, True])
    """

    def __init__(self, local_rows: int) -> None:
        # Two bytes a row, not eight: what this costs is misses of the processor's cache.
        self._last = np.zeros(local_rows, dtype=np.int16)
        self._generation = 1

    def mark(self, rows: Ints) -> Bits:
        """Stamp the rows of the next batch; says which of them the batch before asked for. Shape of `rows`."""
        collides: Bits = self._last[rows] == self._generation
        if self._generation == _LAST_GENERATION:
            np.equal(self._last, self._generation, out=self._last)  # numbers begin anew, with the batch before as 1
            self._generation = 1
        self._generation += 1
        self._last[rows] = self._generation
        return collides

    def is_latest(self, rows: Ints) -> Bits:
        """Which rows the batch that was marked last asked for. Shape of `rows`."""
        latest: Bits = self._last[rows] == self._generation
        return latest


def num_bytes(splits: Sequence[Ints]) -> Ints:
    """Bytes of packed masks for each rank. Shape [world_size]."""
    sizes: Ints = np.sum([-(-split // 8) for split in splits], axis=0)
    return sizes


def pack_masks(masks: Sequence[Bits], splits: Sequence[Ints]) -> NDArray[np.uint8]:
    """Pack masks bit by bit, all for rank 0 first, each rank's part of a mask from a whole byte on.

    Args:
        masks: Bits ordered by rank. Shapes [splits[k].sum()].
        splits: Bits of each mask for each rank. Shapes [world_size].

    Returns:
        Shape [num_bytes(splits).sum()].
    """
    ends = [np.cumsum(split) for split in splits]
    pieces = [
        np.packbits(mask[end[rank] - split[rank] : end[rank]])
        for rank in range(len(splits[0]))
        for mask, split, end in zip(masks, splits, ends, strict=True)
    ]
    return np.concatenate(pieces)


def unpack_masks(packed: NDArray[np.uint8], splits: Sequence[Ints]) -> list[Bits]:
    """Reverse of `pack_masks`.

    Example:
        >>> splits = [np.array([3, 1]), np.array([0, 2])]
        >>> masks = [np.array([True, False, True, True]), np.array([False, True])]
        >>> [mask.tolist() for mask in unpack_masks(pack_masks(masks, splits), splits)]
        [[True, False, True, True], [False, True]]
    """
    pieces: list[list[Bits]] = [[] for _ in splits]
    start = 0
    for rank in range(len(splits[0])):
        for found, split in zip(pieces, splits, strict=True):
            count = int(split[rank])
            stop = start + -(-count // 8)
            found.append(np.unpackbits(packed[start:stop], count=count).view(np.bool_))
            start = stop
    return [np.concatenate(found) for found in pieces]
