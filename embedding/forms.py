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
        num_keys: All keys are below it.

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
        self.num_keys = world_size * self.local_rows
        self._bounds = np.arange(world_size + 1, dtype=np.int64) * self.local_rows

    def keys(self, table: int, ids: Ints) -> Ints:
        """Keys of ids of a table. Shape of `ids`."""
        block = self.blocks[table]
        if len(self.tables) == 1:
            return ids  # every owner's rows are one block of this table
        return ids + (ids // block) * (self.local_rows - block) + self.starts[table]

    def splits(self, keys: Ints) -> Ints:
        """How many of the sorted keys each rank owns. Shape [world_size]."""
        at = keys.searchsorted(self._bounds)
        return at[1:] - at[:-1]

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
        offsets: Where each one's places begin in `order`, and where the last ones end. Shape [u + 1].
        order: Places of the first key in the list, ascending, then of the second, …, apart from places that are left
            out. Shape [offsets[-1]].
        inverse: Which distinct key each place of the list holds. Shape [n].
    """

    keys: Ints
    offsets: Ints
    order: Ints
    inverse: Ints

    def without(self, left_out: Bits) -> Occurrences:
        """The same keys and inverse, but some places of the list count no more. Shape of `left_out`: [n]."""
        kept = ~left_out[self.order]
        ends = np.concatenate([[0], np.cumsum(kept)])
        return Occurrences(self.keys, ends[self.offsets], self.order[kept], self.inverse)


def find_occurrences(keys: Ints, num_keys: int) -> Occurrences:
    """Sort keys, keeping equal ones in their order.

    Torch sorts large lists of integers by radix, which takes less than NumPy's stable sort.

    Args:
        keys: Shape [n], not negative.
        num_keys: All are below it.

    Example:
        >>> found = find_occurrences(np.array([7, 3, 7]), num_keys=8)
        >>> found.keys.tolist(), found.offsets.tolist(), found.order.tolist()
        ([3, 7], [0, 1, 3], [1, 0, 2])
    """
    n = len(keys)
    if n == 0:
        return Occurrences(keys, np.zeros(1, dtype=np.int64), keys, keys)
    narrow = keys.astype(np.int32) if num_keys <= 2**31 else keys
    ordered, order = torch.sort(torch.from_numpy(narrow), stable=True)
    starts, distinct, offsets = _find_runs(ordered.numpy())
    turn = starts.cumsum(dtype=np.int64)
    turn -= 1
    inverse = torch.empty(n, dtype=torch.int64).scatter_(0, order, torch.from_numpy(turn))
    return Occurrences(distinct, offsets, order.numpy(), inverse.numpy())


@dataclass(frozen=True, eq=False)
class Merged:
    """Distinct keys of a few ascending lists, as several ranks send them one after the other, and where each occurs.

    Attributes:
        keys: Distinct, ascending. Shape [u].
        offsets: See `Occurrences`. Shape [u + 1].
        order: See `Occurrences`. Shape [n].
    """

    keys: Ints
    offsets: Ints
    order: Ints


def merge_pieces(keys: Ints, num_keys: int, first: int) -> tuple[Merged, Merged]:
    """Merge ascending lists: those of the first places, and those of all others by themselves, places from 0 too.

    It is NumPy that notices the lists and merges them; key and place travel in one number there, where both fit. That
    is faster than `find_occurrences` for small batches; from 100,000 keys on it is not. Both are done at once, since
    each call may let another thread have the interpreter, and what the trainer waits for is getting it back.

    Args:
        keys: Shape [n], not negative.
        num_keys: All are below it.
        first: How many places are merged by themselves.

    Example:
        >>> one, other = merge_pieces(np.array([3, 7, 7, 9, 2, 1]), num_keys=10, first=4)
        >>> one.keys.tolist(), one.offsets.tolist(), one.order.tolist()
        ([3, 7, 9], [0, 1, 3, 4], [0, 1, 2, 3])
        >>> other.keys.tolist(), other.offsets.tolist(), other.order.tolist()
        ([1, 2], [0, 1, 2], [1, 0])
    """
    n = len(keys)
    bits = n.bit_length()
    if n == 0 or num_keys.bit_length() + bits > 63:
        one, other = (find_occurrences(each, num_keys) for each in (keys[:first], keys[first:]))
        return Merged(one.keys, one.offsets, one.order), Merged(other.keys, other.offsets, other.order)
    packed = keys << bits
    for part in (packed[:first], packed[first:]):
        if len(part):
            part |= count_up(len(part))
            part.sort(kind="stable")
    _, distinct, offsets = _find_runs(packed >> bits, first)
    packed &= (1 << bits) - 1
    at = int(offsets.searchsorted(first))
    return (
        Merged(distinct[:at], offsets[: at + 1], packed[:first]),
        Merged(distinct[at:], offsets[at:] - first, packed[first:]),
    )


def count_up(n: int) -> Ints:
    """0, 1, … n - 1, not to be changed: one array for all who ask, since making it is a hand-over of the interpreter.

    Example:
        >>> count_up(3).tolist()
        [0, 1, 2]
    """
    global _counted
    counted = _counted  # read once: another thread may put a shorter one there
    if n > len(counted):
        counted = np.arange(2 * n)
        counted.flags.writeable = False
        _counted = counted
    return counted[:n]


_counted: Ints = np.arange(0)


def _find_runs(ordered: NDArray[np.integer], begin: int = 0) -> tuple[Bits, Ints, Ints]:
    """Where a number is the first of its kind, these numbers, and their places, last of all the end.

    Args:
        ordered: Shape [n], at least one.
        begin: A number begins here too, even if it is the one before.

    Returns:
        Shapes [n], [u], [u + 1].
    """
    n = len(ordered)
    starts = np.empty(n, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=starts[1:])
    starts[0] = True
    if begin < n:
        starts[begin] = True
    firsts = starts.nonzero()[0]
    offsets = np.empty(len(firsts) + 1, dtype=np.int64)
    offsets[:-1], offsets[-1] = firsts, n
    return starts, ordered.take(firsts).astype(np.int64, copy=False), offsets
