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

from .index_arrays import occurrences
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
    distinct, counts, order, inverse = occurrences(torch.from_numpy(keys))
    return Occurrences(distinct.numpy(), counts.numpy(), order.numpy(), inverse.numpy())
