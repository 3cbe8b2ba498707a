"""The id plane: deduplicates, sends ids to owners, finds collisions and answers, ahead of the trainer (section 3.2).

It runs on the host, on a channel of its own, and blocks in the transport rather than in Python. A batch passes three
threads: one finds its distinct ids, one talks to the other ranks, one makes index arrays. So three batches are on their
way at once, and what limits the pace is the slowest of three waits, not their sum. Every rank hands it the same jobs in
the same order. What goes wrong in it is raised at the trainer's next call; but an id out of range, which all ranks hear
of at the same batch, where that batch is needed, so that all of them can go on alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..transport import Transport
from .collision import Stamps, num_bytes, pack_masks, unpack_masks
from .device_arrays import Upload
from .errors import EmbeddingError, IdOutOfRange, OutOfStep, SettingsDiffer
from .forms import Bits, Ints, Layout
from .host_ids import HostIds, fingerprint
from .lanes import end_threads, finish_threads
from .plan import GroupPlan, ask
from .settings import digest
from .stages import Batch, Indexing, Job, start_stages

_HEAD = 5  # numbers that a rank says before its counts


class Kind(IntEnum):
    """What a rank asks of the id plane; compared between ranks before anything else."""

    PREFETCH = 0
    FORWARD = 1
    EVALUATION = 2
    COMPARISON = 3
    SETTINGS = 4


@dataclass(frozen=True)
class Slot:
    """One list of ids of every batch.

    Attributes:
        feature: Its name, for error messages.
        group: Index of its table's group.
        table: Index of the table within the group.
        call: Index of the call within the group.
    """

    feature: str
    group: int
    table: int
    call: int


class Planner:
    """The id plane, as the trainer's thread sees it.

    Args:
        transport: A channel of its own, for host memory.
        layouts: One a group.
        slots: What every batch consists of, the slots of a call next to each other.
        device: Where the tables are.
        collides: Whether to look for collisions; all rows are late without.
        settings: What all ranks must have alike, by name; compared before the first batch.
    """

    def __init__(
        self,
        transport: Transport,
        layouts: Sequence[Layout],
        slots: Sequence[Slot],
        device: torch.device,
        settings: Mapping[str, str],
        *,
        collides: bool = True,
    ) -> None:
        self._work = _Work(transport, layouts, slots, device, collides)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = start_stages(self._jobs, self._work, transport.close)
        self._end = weakref.finalize(self, end_threads, self._jobs, self._threads, transport)
        work = self._work
        self._submit(Batch(HostIds([])), lambda _: work.agree(settings))

    def prefetch(self, ids: HostIds) -> Batch:
        """Plan the batch that follows the one planned last. Returns at once."""
        return self._submit(Batch(ids), lambda batch: self._work.serve(batch, Kind.PREFETCH))

    def forward(self, ids: HostIds, followers: Sequence[Batch]) -> Batch:
        """Plan a batch that is needed now; batches that were planned before turn out to follow it."""
        return self._submit(Batch(ids), lambda batch: self._work.serve(batch, Kind.FORWARD, followers))

    def evaluate(self, ids: HostIds) -> Batch:
        """Plan a batch that leaves no trace."""
        return self._submit(Batch(ids), lambda batch: self._work.serve(batch, Kind.EVALUATION))

    def all_agree(self, agrees: bool) -> bool:
        """Whether all ranks say yes; waits for them."""
        answer: list[bool] = []

        def compare(batch: Batch) -> list[Indexing]:
            if self._work.skips(batch):
                return []
            answer.append(self._work.compare(agrees))
            return []

        self.wait(self._submit(Batch(HostIds([])), compare))
        return answer[0]

    def wait(self, batch: Batch) -> None:
        """Wait until a batch is planned; its plan can then be used on the current stream.

        Raises:
            IdOutOfRange: Some rank looked up an id that its table does not have.
            TransportError: The id plane's channel failed.
        """
        if not batch.ready.is_set():
            batch.ready.wait()
        self.check()
        if batch.error is not None:
            raise batch.error

    def forget(self) -> None:
        """Go on after an id out of range, with batches that are planned from here on."""
        self._submit(Batch(HostIds([])), lambda _: self._work.forget())

    def check(self) -> None:
        """Raise what went wrong in the thread and cannot be mended."""
        if self._work.error is not None:
            raise self._work.error

    def close(self) -> None:
        """End the thread after what it has to do; may be called twice."""
        self._end()

    def finish(self) -> None:
        """As `close`, with more patience: the process ends."""
        finish_threads(self._jobs, self._threads)
        self._end()

    def _submit(self, batch: Batch, talk: Callable[[Batch], list[Indexing]]) -> Batch:
        self.check()
        batch.ids.begin()
        self._jobs.put(Job(batch, talk))
        return batch


class _Work:
    """What the threads do; refers to nothing that the trainer holds, so that forgetting that ends the threads."""

    def __init__(
        self,
        transport: Transport,
        layouts: Sequence[Layout],
        slots: Sequence[Slot],
        device: torch.device,
        collides: bool,
    ) -> None:
        self.transport, self._collides = transport, collides
        self.error: BaseException | None = None
        self._layouts, self._slots, self._device = layouts, slots, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stamps = [Stamps(layout.local_rows) for layout in layouts]
        self._last: Batch | None = None  # strong: whether it is still there must not depend on a rank's memory
        self._sequence = 0
        self._fault: IdOutOfRange | None = None
        # What ranks say to each other: always the same two tensors, so that the transport lays the exchange out once.
        counts = transport.world_size * len(layouts)
        self._said = torch.zeros((1, _HEAD + counts), dtype=torch.int64)
        self._heard = torch.zeros((transport.world_size, _HEAD + counts), dtype=torch.int64)
        most = np.array([layout.local_rows for layout in layouts]).repeat(transport.world_size)
        no_limit = np.iinfo(np.int64)
        self._least = np.array([-1, no_limit.min, no_limit.min, *np.zeros_like(most)])
        self._most = np.array([len(slots) - 1, no_limit.max, no_limit.max, *most])

    def fail(self, error: BaseException) -> None:
        """Remember the first error. Unless all ranks have it alike, let the others know by closing the channel."""
        self.error = self.error or error
        if not isinstance(error, SettingsDiffer):
            self.transport.close()

    def ask(self, batch: Batch) -> None:
        """Find a batch's distinct ids, or an id that there is not."""
        batch.ids.wait()
        ids = batch.ids.arrays
        if not ids:
            return  # a comparison
        if self._device.type == "cuda":
            batch.ids.fingerprints = [fingerprint(each) for each in ids]
        batch.fault = self._find_fault(ids)
        if batch.fault is None:
            batch.groups = [ask(layout, self._calls(g, ids)) for g, layout in enumerate(self._layouts)]

    def agree(self, settings: Mapping[str, str]) -> list[Indexing]:
        """Refuse ranks that were made with different settings."""
        header = np.array([Kind.SETTINGS, 0, *map(digest, settings.values())], dtype=np.int64)
        world = self.transport.all_gather(torch.from_numpy(header).reshape(1, -1)).wait().numpy()
        self._check_turn(world, Kind.SETTINGS)
        differs = world[:, 2:] != header[2:]
        for at, (name, value) in enumerate(settings.items()):
            if differs[:, at].any():
                raise SettingsDiffer(name, value, self.transport.rank, int(differs[:, at].argmax()))
        return []

    def serve(self, batch: Batch, kind: Kind, followers: Sequence[Batch] = ()) -> list[Indexing]:
        """Plan a batch, unless one before it had an id out of range: every rank does the same."""
        if kind != Kind.EVALUATION and self.skips(batch):
            return []
        try:
            return self.insert(batch, followers) if kind == Kind.FORWARD else self.plan(batch, kind)
        except IdOutOfRange as error:
            batch.error = error.with_traceback(None)  # which would keep the batch alive
            if kind != Kind.EVALUATION:
                self._fault = error
            return []

    def skips(self, batch: Batch) -> bool:
        """Whether a batch is not planned because of one before it, whose error it then has."""
        batch.error = self._fault
        return self._fault is not None

    def forget(self) -> list[Indexing]:
        """Plan batches again."""
        self._fault = None
        return []

    def plan(self, batch: Batch, kind: Kind) -> list[Indexing]:
        """Send ids to their owners and, but for evaluations, find collisions with the batch before."""
        self._exchange(batch, kind)
        if kind == Kind.EVALUATION or not self._collides:
            return [Indexing(batch, trains=kind != Kind.EVALUATION)]
        return [self._collide(batch, self._last)]

    def insert(self, batch: Batch, followers: Sequence[Batch]) -> list[Indexing]:
        """Plan a batch before others that are planned already; their collisions are found anew."""
        self._exchange(batch, Kind.FORWARD)
        if not self._collides:
            return [Indexing(batch, trains=True)]
        found = [self._collide(batch, None)]
        for follower in followers:
            follower.ready.wait()  # for what the next thread makes of the collisions found before
            follower.ready.clear()
            found.append(self._collide(follower, batch))
            batch = follower
        return found

    def compare(self, agrees: bool) -> bool:
        """See `Planner.all_agree`."""
        return bool(self._gather(Kind.COMPARISON, (-1, 0, agrees), 0)[:, 4].all())

    def _exchange(self, batch: Batch, kind: Kind) -> None:
        """Fill `batch.groups` up to what each rank is asked for."""
        if batch.fault is None:
            world = self._gather(kind, (-1, 0, 0), np.concatenate([plan.sent for plan in batch.groups]))
        else:
            world = self._gather(kind, batch.fault, 0)
        self._check_told(world)
        self._raise_faults(world[:, 2:_HEAD])
        received = world[:, _HEAD:].reshape(len(world), len(self._layouts), -1)[:, :, self.transport.rank]
        pending = []
        for plan, counts_of_group in zip(batch.groups, received.T, strict=True):
            plan.received = counts_of_group.copy()
            pending.append(self.transport.all_to_all(_as_tensor(plan.keys), plan.sent, plan.received))
        for plan, layout, keys in zip(batch.groups, self._layouts, pending, strict=True):
            plan.rows = layout.local(keys.wait().numpy())
            self._check_rows(plan, layout)

    def _check_told(self, world: Ints) -> None:
        """Refuse what no rank can have said: sizes of messages follow from it."""
        wrong = (world[:, 2:] < self._least) | (world[:, 2:] > self._most)
        if wrong.any():
            rank = int(wrong.any(axis=1).argmax())
            raise EmbeddingError(
                f"ids #{self._sequence - 1}: rank {rank} sent numbers that cannot be: {world[rank].tolist()}"
            )

    def _check_rows(self, plan: GroupPlan, layout: Layout) -> None:
        """Refuse rows that this rank does not have: what a rank sends is used as an index."""
        if len(plan.rows) and _largest(plan.rows) >= layout.local_rows:
            place = int(((plan.rows < 0) | (plan.rows >= layout.local_rows)).argmax())
            rank = int(np.searchsorted(np.cumsum(plan.received), place, side="right"))
            raise EmbeddingError(
                f"ids #{self._sequence - 1}: rank {rank} asks for row {plan.rows[place]} of {layout.local_rows}"
            )

    def _calls(self, group: int, ids: Sequence[Ints]) -> list[list[tuple[int, Ints]]]:
        calls: dict[int, list[tuple[int, Ints]]] = {}
        for slot, each in zip(self._slots, ids, strict=True):
            if slot.group == group:
                calls.setdefault(slot.call, []).append((slot.table, each))
        return [calls[call] for call in sorted(calls)]

    def _find_fault(self, ids: Sequence[Ints]) -> list[int] | None:
        """Slot, place and value of the first id that its table does not have."""
        for i, (slot, each) in enumerate(zip(self._slots, ids, strict=True)):
            rows = self._layouts[slot.group].tables[slot.table].num_embeddings
            if len(each) and _largest(each) >= rows:
                place = int(np.flatnonzero((each < 0) | (each >= rows))[0])
                return [i, place, int(each[place])]
        return None

    def _raise_faults(self, faults: Ints) -> None:
        for rank, (slot, place, value) in enumerate(faults.tolist()):
            if slot >= 0:
                told = self._slots[slot]
                table = self._layouts[told.group].tables[told.table]
                raise IdOutOfRange(rank, table.name, table.num_embeddings, told.feature, place, value)

    def _gather(self, kind: Kind, numbers: Sequence[int], counts: Ints | int) -> Ints:
        """What all ranks say; the next call overwrites it.

        Args:
            kind: What this rank is at.
            numbers: Three.
            counts: Rows for each rank, group by group. Shape [num_groups * world_size].

        Returns:
            Kind, number of the call, numbers and counts of each rank. Shape [world_size, 5 + len(counts)].

        Raises:
            OutOfStep: Ranks are not at the same call.
        """
        said = self._said.numpy()[0]
        said[:2], said[2:_HEAD], said[_HEAD:] = (kind, self._sequence), numbers, counts
        world = self.transport.all_gather(self._said, out=self._heard).wait().numpy()
        self._check_turn(world, kind)
        self._sequence += 1
        return world

    def _check_turn(self, world: Ints, kind: Kind) -> None:
        for rank, (theirs, sequence) in enumerate(world[:, :2].tolist()):
            if (theirs, sequence) != (kind, self._sequence):
                here = f"{kind.name.lower()} #{self._sequence}"
                there = Kind(theirs).name.lower() if theirs in list(Kind) else f"a call of kind {theirs}"
                raise OutOfStep(f"this rank is at {here}, rank {rank} at {there} #{sequence}")

    def _collide(self, batch: Batch, before: Batch | None) -> Indexing:
        """Find out which rows of a batch the one before asked for, on both sides."""
        splits: list[list[Ints]] = [[], []]  # asked, answered
        bits: list[Bits] = []
        for g, (plan, stamps) in enumerate(zip(batch.groups, self._stamps, strict=True)):
            late_rows = stamps.mark(plan.rows)
            plan.late_rows = late_rows if before is not None else None
            if before is None:
                continue
            previous = before.groups[g]
            bits += [late_rows, stamps.is_latest(previous.rows)]
            splits[0] += [plan.sent, previous.sent]
            splits[1] += [plan.received, previous.received]
        if before is not None:
            packed = _as_tensor(pack_masks(bits, splits[1]))
            answer = self.transport.all_to_all(packed, num_bytes(splits[1]), num_bytes(splits[0])).wait()
            answers = unpack_masks(answer.numpy(), splits[0])
        for g, plan in enumerate(batch.groups):
            plan.late = answers[2 * g] if before is not None else None
        self._last = batch
        urgent = [] if before is None else list(zip(answers[1::2], bits[1::2], strict=True))
        return Indexing(batch, before, urgent)

    def index(self, found: Indexing) -> None:
        """Make what the batch's forward needs, and the backward before it."""
        batch, before = found.batch, found.before
        if before is not None:
            upload = Upload(self._device, self._stream)
            for plan, bits in zip(before.groups, found.urgent, strict=True):
                plan.index_successor(*bits, upload)
            upload.send()
            before.successor = upload
        batch.upload = Upload(self._device, self._stream)
        for plan in batch.groups:
            plan.index(batch.upload)
            if found.trains:
                plan.add_all_gradients(batch.upload)
        batch.upload.send()


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over an array's memory. Empty arrays have strides that no view of bytes takes."""
    return torch.from_numpy(array if len(array) else np.empty(1, dtype=array.dtype)[:0])


def _largest(numbers: Ints) -> int:
    """The largest number, where negative ones count as larger than all others: one pass tells of both ends."""
    return int(numbers.view(np.uint64).max())
