"""All index arrays of one batch and one group, made on the host before the data moves (section 3.2, Algorithm 2).

A rank asks (batch-major) and is asked (shard-major). The rows of a batch arrive in two parts: *early* ones, which the
batch before does not touch, and *late* ones, which wait for its update. They lie in that order, each part by key. Its
gradients leave in two parts: *urgent* ones, which the next batch reads, and *deferred* ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..kernels.sum_tree import SumTree, TreeArrays, plan_tree
from .device_arrays import Upload
from .forms import Bits, Ints, Layout, Occurrences, find_occurrences, merge_pieces


@dataclass(frozen=True, eq=False)
class CallIndex:
    """How a call reads the batch's rows, and how its gradients are added up.

    Attributes:
        inverse: Row of the batch for each id. Shape [n], int64.
        tree: Sums the gradients of a row's ids. `tree.size` is the number of the batch's rows.
    """

    inverse: Tensor
    tree: SumTree


@dataclass(frozen=True, eq=False)
class Values:
    """Rows on their way from owners to askers.

    Attributes:
        asked: Rows from each rank. Shape [world_size].
        served: Rows for each rank. Shape [world_size].
        rows: Local rows to read, ordered by asker. Shape [served.sum()], int64.
    """

    asked: Ints
    served: Ints
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients on their way from askers to owners.

    Attributes:
        sent: Rows for each rank. Shape [world_size].
        received: Rows from each rank. Shape [world_size].
        positions: Rows of the batch to send, ordered by owner. Shape [sent.sum()], int64.
        rows: Distinct local rows to update. Shape [u], int64.
        tree: Sums what the ranks sent for one row, in rank order.
    """

    sent: Ints
    received: Ints
    positions: Tensor
    rows: Tensor
    tree: SumTree


@dataclass(eq=False)
class GroupPlan:
    """One batch's requests of one group.

    Attributes:
        keys: Distinct keys asked for, ascending. Shape [u].
        sent: How many of each rank. Shape [world_size].
        occurrences: Where each call's keys occur; one a call.
        rows: Local rows that this rank is asked for, ordered by asker. Shape [received.sum()].
        received: How many by each rank. Shape [world_size].
        late: Bits of `keys`: the batch before touches the row. None: all count as late.
        late_rows: The same of `rows`.
        num_early: Rows that arrive early.
        calls: How each reads the rows; one a call.
        early: Values of the early part; None where all is late.
        late_values: Values of the late part.
        urgent_gradients: Set once the next batch is known.
        deferred_gradients: Set once the next batch is known.
    """

    keys: Ints
    sent: Ints
    occurrences: list[Occurrences]
    rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    received: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    late: Bits | None = None
    late_rows: Bits | None = None
    num_early: int = 0
    calls: list[CallIndex] = field(default_factory=list)
    early: Values | None = None
    late_values: Values = field(init=False)
    urgent_gradients: Gradients | None = None
    deferred_gradients: Gradients | None = None
    _all_gradients: Gradients | None = None
    _place: Ints | None = None  # where each key's row lies among the batch's rows, early ones first; None: at its turn

    @property
    def num_rows(self) -> int:
        """Distinct rows that this rank asked for."""
        return len(self.keys)

    def index(self, upload: Upload) -> None:
        """Make what the forward of this batch needs, from `keys`, `rows` and `late`."""
        if self.late is None or self.late_rows is None:
            self.num_early, self.early, self._place = 0, None, None
            self.late_values = Values(self.sent, self.received, upload.add(self.rows))
        else:
            early, early_rows = ~self.late, ~self.late_rows
            self.num_early = int(np.count_nonzero(early))
            self.early = self._values(early, early_rows, upload)
            self.late_values = self._values(self.late, self.late_rows, upload)
            self._place = np.empty(len(early), dtype=np.int64)
            self._place[early] = np.arange(self.num_early)
            self._place[self.late] = np.arange(self.num_early, len(early))
        self.calls = [self._index_call(found, upload) for found in self.occurrences]

    def index_successor(self, urgent: Bits, urgent_rows: Bits, upload: Upload) -> None:
        """Make what the backward of this batch needs, now that it is known what the next batch reads."""
        self.urgent_gradients = self._gradients(urgent, urgent_rows, upload)
        self.deferred_gradients = self._gradients(~urgent, ~urgent_rows, upload)

    def all_gradients(self, upload: Upload) -> Gradients:
        """What a backward needs that updates all rows at once."""
        if self._all_gradients is None:
            everything = np.ones(len(self.keys), dtype=np.bool_), np.ones(len(self.rows), dtype=np.bool_)
            self._all_gradients = self._gradients(*everything, upload)
        return self._all_gradients

    def _values(self, chosen: Bits, chosen_rows: Bits, upload: Upload) -> Values:
        rows = upload.add(self.rows[chosen_rows])
        return Values(count_by(chosen, self.sent), count_by(chosen_rows, self.received), rows)

    def _gradients(self, chosen: Bits, chosen_rows: Bits, upload: Upload) -> Gradients:
        rows, counts, order = merge_pieces(self.rows[chosen_rows])
        return Gradients(
            sent=count_by(chosen, self.sent),
            received=count_by(chosen_rows, self.received),
            positions=upload.add(np.flatnonzero(chosen) if self._place is None else self._place[chosen]),
            rows=upload.add(rows),
            tree=add_tree(plan_tree(order, counts), upload),
        )

    def _index_call(self, found: Occurrences, upload: Upload) -> CallIndex:
        """A call may ask for some of the batch's rows only: the others have no summands."""
        counts, place = found.counts, self._place
        if len(found.keys) < len(self.keys):
            at = np.searchsorted(self.keys, found.keys)
            counts = np.zeros(len(self.keys), dtype=np.int64)
            counts[at] = found.counts
            place = at if place is None else place[at]
        inverse = found.inverse if place is None else place.take(found.inverse)
        return CallIndex(upload.add(inverse), add_tree(plan_tree(found.order, counts, self._place), upload))


def ask(layout: Layout, calls: Sequence[Sequence[tuple[int, Ints]]]) -> GroupPlan:
    """Find the distinct keys of a batch.

    Args:
        layout: The group's row space.
        calls: For each call, the table and the ids of each of its features.
    """
    occurrences = [_occurrences(layout, call) for call in calls]
    if len(occurrences) == 1:
        keys = occurrences[0].keys
    else:
        keys = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *[found.keys for found in occurrences]]))
    return GroupPlan(keys, layout.splits(keys), occurrences)


def _occurrences(layout: Layout, call: Sequence[tuple[int, Ints]]) -> Occurrences:
    pieces = [layout.keys(table, ids) for table, ids in call]
    found = find_occurrences(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
    paddings = [(ids, layout.tables[table].padding_idx) for table, ids in call]
    if all(padding is None for _, padding in paddings):
        return found
    return found.without(np.concatenate([ids == (-1 if padding is None else padding) for ids, padding in paddings]))


def count_by(chosen: Bits, splits: Ints) -> Ints:
    """How many bits are set in each of consecutive pieces. Shape of `splits`."""
    ends = np.cumsum(splits).tolist()
    return np.array([np.count_nonzero(chosen[a:b]) for a, b in zip([0, *ends], ends, strict=False)], dtype=np.int64)


def add_tree(arrays: TreeArrays, upload: Upload) -> SumTree:
    """Send the rounds of a sum to where it is taken."""
    rounds: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (upload.add(order), upload.add(offsets), None if targets is None else upload.add(targets))
        for order, offsets, targets in arrays.rounds
    ]
    return SumTree(arrays.size, arrays.num_scratch, rounds)
