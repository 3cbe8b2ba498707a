"""All index arrays of one batch and one group, made on the host before the data moves (section 3.2, Algorithm 2).

A rank asks (batch-major) and is asked (shard-major). The rows of a batch arrive in two parts: *early* ones, which the
batch before does not touch, and *late* ones, which wait for its update. They lie in that order, each part by key. Its
gradients leave in two parts: *urgent* ones, which the next batch reads, and *deferred* ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..kernels.sum_tree import SumTree, TreeArrays, plan_tree
from .device_arrays import Upload
from .forms import Bits, Ints, Layout, Occurrences, count_up, find_occurrences, merge_pieces


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
        local_rows: Rows that each rank has.
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
        all_gradients: What a backward needs that updates all rows at once; see `add_all_gradients`.
    """

    keys: Ints
    sent: Ints
    occurrences: list[Occurrences]
    local_rows: int
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
    all_gradients: Gradients | None = None
    _place: Ints | None = None  # where each key's row lies among the batch's rows, early ones first; None: at its turn

    @property
    def num_rows(self) -> int:
        """Distinct rows that this rank asked for."""
        return len(self.keys)

    def index(self, upload: Upload) -> None:
        """Make what the forward of this batch needs, from `keys`, `rows` and `late`."""
        self.num_early, self.early, self._place, self.calls = 0, None, None, []
        if self.late is None or self.late_rows is None:
            upload.add([self.rows], self._take_late)
        else:
            asked, served = divide(self.late, self.sent), divide(self.late_rows, self.received)
            self._place = np.empty(len(self.keys), dtype=np.int64)
            self.num_early = len(asked.others)
            self._place[asked.others] = count_up(len(self.keys))[: self.num_early]
            self._place[asked.chosen] = count_up(len(self.keys))[self.num_early :]

            def take(tensors: Sequence[Tensor]) -> None:
                self.early = Values(asked.num_others, served.num_others, tensors[0])
                self.late_values = Values(asked.num_chosen, served.num_chosen, tensors[1])

            upload.add([self.rows.take(served.others), self.rows.take(served.chosen)], take)
        for found in self.occurrences:
            self._index_call(found, upload)

    def index_successor(self, urgent: Bits, urgent_rows: Bits, upload: Upload) -> None:
        """Make what the backward of this batch needs, now that it is known what the next batch reads."""
        sent, received = divide(urgent, self.sent), divide(urgent_rows, self.received)
        rows = self.rows.take(np.concatenate([received.chosen, received.others]))
        one, other = merge_pieces(rows, self.local_rows, len(received.chosen))
        positions = sent.chosen, sent.others
        if self._place is not None:
            positions = self._place.take(sent.chosen), self._place.take(sent.others)
        trees = [plan_tree(each.order, each.offsets, most=len(self.sent)) for each in (one, other)]

        def take(tensors: Sequence[Tensor]) -> None:
            left = iter(tensors)
            parts = (sent.num_chosen, received.num_chosen), (sent.num_others, received.num_others)
            self.urgent_gradients, self.deferred_gradients = (
                Gradients(*counts, next(left), next(left), take_tree(tree, left))
                for counts, tree in zip(parts, trees, strict=True)
            )

        first = [positions[0], one.keys, *arrays_of(trees[0])]
        upload.add([*first, positions[1], other.keys, *arrays_of(trees[1])], take)

    def add_all_gradients(self, upload: Upload) -> None:
        """Make what a backward needs that updates all rows at once, unless it is there."""
        if self.all_gradients is not None:
            return
        found, _ = merge_pieces(self.rows, self.local_rows, len(self.rows))
        tree = plan_tree(found.order, found.offsets, most=len(self.sent))
        positions = np.arange(len(self.keys)) if self._place is None else self._place

        def take(tensors: Sequence[Tensor]) -> None:
            left = iter(tensors)
            self.all_gradients = Gradients(self.sent, self.received, next(left), next(left), take_tree(tree, left))

        upload.add([positions, found.keys, *arrays_of(tree)], take)

    def _take_late(self, tensors: Sequence[Tensor]) -> None:
        self.late_values = Values(self.sent, self.received, tensors[0])

    def _index_call(self, found: Occurrences, upload: Upload) -> None:
        """A call may ask for some of the batch's rows only: the others have no summands."""
        offsets, place = found.offsets, self._place
        if len(found.keys) < len(self.keys):
            at = self.keys.searchsorted(found.keys)
            counts = np.zeros(len(self.keys) + 1, dtype=np.int64)
            counts[at + 1] = offsets[1:] - offsets[:-1]
            offsets = counts.cumsum()
            place = at if place is None else place[at]
        tree = plan_tree(found.order, offsets, self._place)

        def take(tensors: Sequence[Tensor]) -> None:
            left = iter(tensors)
            self.calls.append(CallIndex(next(left), take_tree(tree, left)))

        upload.add([found.inverse if place is None else place.take(found.inverse), *arrays_of(tree)], take)


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
    return GroupPlan(keys, layout.splits(keys), occurrences, layout.local_rows)


def _occurrences(layout: Layout, call: Sequence[tuple[int, Ints]]) -> Occurrences:
    pieces = [layout.keys(table, ids) for table, ids in call]
    found = find_occurrences(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), layout.num_keys)
    paddings = [(ids, layout.tables[table].padding_idx) for table, ids in call]
    if all(padding is None for _, padding in paddings):
        return found
    return found.without(np.concatenate([ids == (-1 if padding is None else padding) for ids, padding in paddings]))


@dataclass(frozen=True, eq=False)
class Divided:
    """Where bits are set, and where not.

    Attributes:
        chosen: Places of those that are set, ascending.
        others: Places of the others, ascending.
        num_chosen: How many are set for each rank. Shape [world_size].
        num_others: The others. Shape [world_size].
    """

    chosen: Ints
    others: Ints
    num_chosen: Ints
    num_others: Ints


def divide(bits: Bits, splits: Ints) -> Divided:
    """Find where bits are set, in each of consecutive pieces.

    Example:
        >>> found = divide(np.array([True, False, True, True]), np.array([2, 2]))
        >>> found.chosen.tolist(), found.others.tolist(), found.num_chosen.tolist(), found.num_others.tolist()
        ([0, 2, 3], [1], [1, 2], [1, 0])
    """
    chosen, others = bits.nonzero()[0], (~bits).nonzero()[0]
    num_chosen = chosen.searchsorted(splits.cumsum())
    num_chosen[1:] -= num_chosen[:-1].copy()
    return Divided(chosen, others, num_chosen, splits - num_chosen)


def arrays_of(tree: TreeArrays) -> list[Ints]:
    """The rounds' arrays, one after the other."""
    return [array for each in tree.rounds for array in each if array is not None]


def take_tree(tree: TreeArrays, tensors: Iterator[Tensor]) -> SumTree:
    """The same tree made of tensors, in the order of `arrays_of`."""
    rounds = [
        (next(tensors), next(tensors), None if targets is None else next(tensors)) for _, _, targets in tree.rounds
    ]
    return SumTree(tree.size, tree.num_scratch, rounds)
