"""Batches of bench.embedding as TorchRec's pipelines take them: ids of jagged histories, and labels (section 5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from .embedding_workload import NUM_CLASSES, Workload


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # torchrec is not checked
    """What a rank trains on in a step.

    Attributes:
        ids: Keyed by feature, one feature a table; all have the same lengths.
        starts: First id of every history, and their number. Shape [batch_size + 1], int32.
        labels: One an id. Shape [num_ids], float32.
        longest: Length of the longest history.
    """

    ids: KeyedJaggedTensor
    starts: Tensor
    labels: Tensor
    longest: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Copy to a device."""
        return Batch(
            self.ids.to(device, non_blocking=non_blocking),
            self.starts.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.longest,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until a stream is done with it."""
        self.ids.record_stream(stream)
        self.starts.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Copy to pinned memory."""
        return Batch(self.ids.pin_memory(), self.starts.pin_memory(), self.labels.pin_memory(), self.longest)


class Feed(Iterator[Batch]):
    """Gives batches without end, a ring of them again and again; the ring can be changed between steps.

    Pipelines look ahead, so the first few batches after a change are still those of the ring before.
    """

    def __init__(self) -> None:
        self._ring: list[Batch] = []
        self._next = 0

    def use(self, ring: list[Batch]) -> None:
        """Give other batches from now on."""
        if not ring or len(ring) % NUM_CLASSES:
            raise ValueError(f"ring must have a multiple of {NUM_CLASSES} batches, got {len(ring)}")
        self._ring, self._next = ring, 0

    def __next__(self) -> Batch:
        batch = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        return batch


def features(num_tables: int) -> list[str]:
    """Names of the features, one a table."""
    return [f"history_{table}" for table in range(num_tables)]


def make_ring(workload: Workload, rank: int, pinned: bool) -> list[Batch]:
    """Make a rank's batches of consecutive steps; after the last one comes the first again."""
    return [make_batch(workload, step, rank, pinned) for step in range(NUM_CLASSES)]


def make_batch(workload: Workload, step: int, rank: int, pinned: bool) -> Batch:
    """Make the batch of one step and rank, in host memory."""
    lengths = workload.lengths(step, rank)
    ids = [workload.global_ids(step, table)[rank] for table in range(workload.num_tables)]
    names = features(workload.num_tables)
    keyed = KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths.repeat(len(names))).sync()
    starts = torch.zeros(workload.batch_size + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    random = torch.Generator().manual_seed(1000 * step + rank)
    labels = (torch.rand(int(starts[-1]), generator=random) < 0.3).float()
    batch = Batch(keyed, starts, labels, int(lengths.max()))
    return batch.pin_memory() if pinned else batch
