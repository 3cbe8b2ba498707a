"""Batches of bench.end_to_end: uneven histories as a loader gives them, and as models take them (section 5.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from ..balancer import Column, JaggedBatch, Report
from .embedding_batch import features
from .embedding_workload import Workload

HISTORY, LABEL = "history", "label"


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # torchrec is not checked
    """What a rank trains on in a step.

    Attributes:
        ids: Keyed by the one feature.
        starts: First id of every history, and their number. Shape [batch_size + 1], int32.
        labels: One an id. Shape [num_ids], float32.
        longest: Length of the longest history.
        scale: Of the mean loss over this rank's ids, so that the average over ranks is the mean over all.
    """

    ids: KeyedJaggedTensor
    starts: Tensor
    labels: Tensor
    longest: int
    scale: float

    on_device: ClassVar[tuple[str, ...]] = ("ids", "starts", "labels")

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy to a device."""
        return replace(self, **{n: getattr(self, n).to(device, non_blocking=non_blocking) for n in self.on_device})

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until a stream is done with it."""
        for name in self.on_device:
            getattr(self, name).record_stream(stream)

    def pin_memory(self) -> Self:
        """Copy to pinned memory; what is there stays."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in self.on_device})


class IdsOnHost(Batch):
    """A batch whose ids stay in host memory, where prioritized tables read them: two copies and a check less a step."""

    on_device = ("starts", "labels")

    @classmethod
    def of(cls, batch: Batch) -> IdsOnHost:
        """The same batch."""
        return cls(batch.ids, batch.starts, batch.labels, batch.longest, batch.scale)


def batch_of(columns: JaggedBatch, global_ids: int, world_size: int) -> Batch:
    """Make what models take of what loaders give.

    Args:
        columns: This rank's samples.
        global_ids: Ids of all ranks' samples.
        world_size: Ranks.
    """
    history = columns[HISTORY]
    lengths, num_ids = history.levels[0], len(history.values)
    # What `sync()` would find out in operations of its own.
    sizes = {"length_per_key": [num_ids], "offset_per_key": [0, num_ids]}
    keyed = KeyedJaggedTensor(features(1), history.values, lengths=lengths, **sizes)
    starts = torch.zeros(columns.batch_size + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    longest = int(lengths.max()) if columns.batch_size else 0
    return Batch(keyed, starts, columns[LABEL].values, longest, num_ids * world_size / global_ids)


def balanced_batch(columns: JaggedBatch, report: Report | None) -> Batch:
    """Make what models take of a balanced batch."""
    assert report is not None
    return batch_of(columns, round(report.world_size / report.loss_scale(HISTORY)), report.world_size)


@dataclass
class Ring:
    """A rank's batches of consecutive steps, again and again without end, as a DataLoader would give them.

    Attributes:
        steps: Each is a batch in host memory.
        global_ids: Of each step, ids of all ranks.
        world_size: Ranks.
    """

    steps: list[JaggedBatch]
    global_ids: list[int]
    world_size: int
    pinned: bool = False
    _ready: list[Batch] = field(default_factory=list)

    def __iter__(self) -> Iterator[JaggedBatch]:
        while True:
            yield from self.steps

    def ready(self) -> Iterator[Batch]:
        """The same as models take them, made once."""
        if not self._ready:
            made = (batch_of(b, n, self.world_size) for b, n in zip(self.steps, self.global_ids, strict=True))
            self._ready = [batch.pin_memory() if self.pinned else batch for batch in made]
        while True:
            yield from self._ready


def make_ring(workload: Workload, num_steps: int, rank: int, world_size: int, pinned: bool) -> Ring:
    """Deal global batches to ranks at random.

    Every step has the same lengths over all ranks together, in another order, so that steps are alike and ranks are
    not; as uneven as independent samples are, or a little less.

    Args:
        workload: Of all ranks as one: its batch size is that of the global batch.
        num_steps: Different global batches.
        rank: This rank.
        world_size: Ranks.
        pinned: Whether `ready` gives batches in pinned memory.
    """
    share = workload.batch_size // world_size
    ring = Ring([], [], world_size, pinned)
    for step in range(num_steps):
        lengths, ids = workload.lengths(step, 0), workload.global_ids(step)[0]
        ends = lengths.cumsum(0)
        mine = slice(rank * share, (rank + 1) * share)
        begin = int(ends[rank * share - 1]) if rank else 0
        values = ids[begin : int(ends[mine.stop - 1])].clone()
        labels = (values * 2_654_435_761 % 1000 < 300).float()  # of the id, so that there is something to learn
        columns = {HISTORY: Column(values, (lengths[mine].clone(),)), LABEL: Column(labels, (lengths[mine].clone(),))}
        ring.steps.append(JaggedBatch(columns, share))
        ring.global_ids.append(int(ends[-1]))
    return ring
