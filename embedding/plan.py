"""All index arrays of one batch and one group, made on the host before the data moves (section 3.2, Algorithm 2).

A rank asks (batch-major) and is asked (shard-major). The rows of a batch arrive in two parts: *early* ones, which the
batch before does not touch, and *late* ones, which wait for its update. They lie in that order, each part by key. Its
gradients leave in two parts: *urgent* ones, which the next batch reads, and *deferred* ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.sum_tree import SumTree
from .device_arrays import Upload
from .forms import Bits, Ints, Layout, Occurrences, find_occurrences
from .index_arrays import call_arrays, gradient_arrays, parts


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
    _place: Tensor | None = (
        None  # where each key's row lies among the batch's rows, early ones first; None: at its turn
    )

    @property
    def num_rows(self) -> int:
        """Distinct rows that this rank asked for."""
        return len(self.keys)

    def index(self, upload: Upload) -> None:
        """Make what the forward of this batch needs, from `keys`, `rows` and `late`."""
        rows, sent, received = (torch.from_numpy(each) for each in (self.rows, self.sent, self.received))
        if self.late is None or self.late_rows is None:
            self.num_early, self.early, self._place = 0, None, None
            self.late_values = Values(self.sent, self.received, upload.add(rows))
        else:
            late, late_rows = torch.from_numpy(self.late), torch.from_numpy(self.late_rows)
            self._place, early, later, asked, served = parts(late, late_rows, rows, sent, received)
            self.early = Values((sent - asked).numpy(), (received - served).numpy(), upload.add(early))
            self.late_values = Values(asked.numpy(), served.numpy(), upload.add(later))
            self.num_early = int(self.early.asked.sum())
        self.calls = [self._index_call(found, upload) for found in self.occurrences]

    def index_successor(self, urgent: Bits, urgent_rows: Bits, upload: Upload) -> None:
        """Make what the backward of this batch needs, now that it is known what the next batch reads."""
        bits = torch.from_numpy(urgent), torch.from_numpy(urgent_rows)
        rows, sent, received = (torch.from_numpy(each) for each in (self.rows, self.sent, self.received))
        now, num_now, later, num_later = gradient_arrays(*bits, rows, sent, received, self._place)
        self.urgent_gradients = _gradients(now, num_now, upload)
        self.deferred_gradients = _gradients(later, num_later, upload)

    def all_gradients(self, upload: Upload) -> Gradients:
        """What a backward needs that updates all rows at once."""
        if self._all_gradients is None:
            everything = torch.ones(len(self.keys), dtype=torch.bool), torch.ones(len(self.rows), dtype=torch.bool)
            rows, sent, received = (torch.from_numpy(each) for each in (self.rows, self.sent, self.received))
            arrays, num_scratch, _, _ = gradient_arrays(*everything, rows, sent, received, self._place)
            self._all_gradients = _gradients(arrays, num_scratch, upload)
        return self._all_gradients

    def _index_call(self, found: Occurrences, upload: Upload) -> CallIndex:
        """A call may ask for some of the batch's rows only: the others have no summands."""
        arrays = (self.keys, found.keys, found.counts, found.order, found.inverse)
        keys, *of_call = (torch.from_numpy(each) for each in arrays)
        inverse, rounds, num_scratch = call_arrays(keys, self._place, *of_call)
        return CallIndex(upload.add(inverse), _tree(len(self.keys), rounds, num_scratch, upload))


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


def _gradients(arrays: list[Tensor], num_scratch: int, upload: Upload) -> Gradients:
    sent, received, positions, rows, *rounds = arrays
    tree = _tree(len(rows), rounds, num_scratch, upload)
    return Gradients(sent.numpy(), received.numpy(), upload.add(positions), upload.add(rows), tree)


def _tree(size: int, arrays: list[Tensor], num_scratch: int, upload: Upload) -> SumTree:
    """Send the rounds of a sum to where it is taken; a first and only round may lack its targets."""
    sent: list[Tensor | None] = [upload.add(each) for each in arrays]
    if len(sent) == 2:
        sent.append(None)
    rounds: list[Any] = list(zip(sent[::3], sent[1::3], sent[2::3], strict=True))
    return SumTree(size, num_scratch, rounds)
