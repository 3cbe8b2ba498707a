"""Batch-major and shard-major form: which rank owns which row, and a batch's ids as sorted keys (section 3.2).

Batch-major are the ids of the samples that a rank trains on; shard-major are the rows that a rank owns. A key is
`owner * local_rows + local row`, so that sorting a batch's keys once finds its distinct rows and puts them in the
order in which they go to their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .tables import Table

Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]


class Layout:
    """The row space of one group: tables of one dimension, dtype and optimizer, one after the other on every rank.

    Rank k owns rows `[k * block, (k + 1) * block)` of a table, `block = ceil(num_embeddings / world_size)`, as torchrec
    and DTensor place them.

    Args:
        tables: The tables of the group.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        local_rows: Rows that every rank keeps; at the end of a table some may be unused.

    Example:
        >>> layout = Layout([Table("a", 5, 4), Table("b", 2, 4)], rank=0, world_size=2)
        >>> layout.local_rows, layout.keys(0, np.array([0, 2, 3])).tolist(), layout.keys(1, np.array([1])).tolist()
        (4, [0, 2, 4], [7])
    """

    def __init__(self, tables: Sequence[Table], rank: int, world_size: int) -> None:
        self.tables, self.rank, self.world_size = tuple(tables), rank, world_size
        self.blocks = [-(-table.num_embeddings // world_size) for table in tables]
        self.starts = [sum(self.blocks[:i]) for i in range(len(tables))]
        self.local_rows = sum(self.blocks)

    def keys(self, table: int, ids: Ints) -> Ints:
        """Keys of ids of a table. Shape of `ids`."""
        block = self.blocks[table]
        if len(self.tables) == 1:
            return ids  # every owner's rows are one block of this table
        return ids + (ids // block) * (self.local_rows - block) + self.starts[table]

    def splits(self, keys: Ints) -> Ints:
        """How many of the sorted keys each rank owns. Shape [world_size]."""
        bounds = np.arange(self.world_size + 1, dtype=np.int64) * self.local_rows
        return np.diff(np.searchsorted(keys, bounds))

    def local(self, keys: Ints) -> Ints:
        """Rows of this rank's shard that keys of its own mean. Shape of `keys`."""
        return keys - self.rank * self.local_rows

    def place(self, table: int) -> tuple[int, int, int]:
        """Where this rank keeps its part of a table: first local row, first row of the table, number of rows."""
        rows, block = self.tables[table].num_embeddings, self.blocks[table]
        first = min(self.rank * block, rows)
        return self.starts[table], first, min(block, rows - first)


@dataclass(frozen=True, eq=False)
class Occurrences:
    """Distinct keys of a list of keys, and where each occurs.

    Attributes:
        keys: Distinct, ascending. Shape [u].
        counts: How often each occurs, apart from places that are left out. Shape [u].
        order: Places of the first key in the list, ascending, then of the second, … Shape [counts.sum()].
        inverse: Which distinct key each place of the list holds. Shape [n].
    """

    keys: Ints
    counts: Ints
    order: Ints
    inverse: Ints

    def without(self, left_out: Bits) -> Occurrences:
        """The same keys and inverse, but some places of the list count no more. Shape of `left_out`: [n]."""
        kept = ~left_out[self.order]
        ends = np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], np.cumsum(self.counts)])]
        return Occurrences(self.keys, np.diff(ends), self.order[kept], self.inverse)


def find_occurrences(keys: Ints) -> Occurrences:
    """Sort keys, keeping equal ones in their order.

    Torch sorts large lists of integers by radix, which takes less than NumPy's stable sort.

    Args:
        keys: Shape [n], not negative.

    Example:
        >>> found = find_occurrences(np.array([7, 3, 7]))
        >>> found.keys.tolist(), found.counts.tolist(), found.order.tolist()
        ([3, 7], [1, 2], [1, 0, 2])
    """
    n = len(keys)
    if n == 0:
        return Occurrences(keys, keys, keys, keys)
    narrow = keys.astype(np.int32) if int(keys.max()) < 2**31 else keys
    ordered, order = torch.sort(torch.from_numpy(narrow), stable=True)
    distinct, counts, turn = _find_runs(ordered.numpy())
    inverse = torch.empty(n, dtype=torch.int64).scatter_(0, order, torch.from_numpy(turn))
    return Occurrences(distinct, counts, order.numpy(), inverse.numpy())


def merge_pieces(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Distinct keys, counts and order, as in `Occurrences`, of a few ascending pieces, as several ranks send them.

    It is NumPy that notices the pieces and merges them; key and place travel in one number there, where both fit. That
    is faster than `find_occurrences` for small batches; from 100,000 keys on it is not.

    Args:
        keys: Shape [n], not negative.

    Example:
        >>> [found.tolist() for found in merge_pieces(np.array([3, 7, 7, 9]))]
        [[3, 7, 9], [1, 2, 1], [0, 1, 2, 3]]
    """
    n = len(keys)
    if n == 0:
        return keys, keys, keys
    bits = n.bit_length()
    if int(keys.max()).bit_length() + bits > 63:
        found = find_occurrences(keys)
        return found.keys, found.counts, found.order
    packed = keys << bits
    packed |= np.arange(n)
    packed.sort(kind="stable")
    distinct, counts, _ = _find_runs(packed >> bits)
    packed &= (1 << bits) - 1
    return distinct, counts, packed


def _find_runs(ordered: NDArray[np.integer]) -> tuple[Ints, Ints, Ints]:
    """Each number once, how often it occurs, and the turn of each place's number. Shapes [u], [u], [n]."""
    starts = np.empty(len(ordered), dtype=np.bool_)
    starts[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=starts[1:])
    firsts = np.flatnonzero(starts)
    turn: Ints = np.cumsum(starts, dtype=np.int64)
    turn -= 1
    counts: Ints = np.diff(firsts, append=len(ordered))
    return ordered[firsts].astype(np.int64), counts, turn
