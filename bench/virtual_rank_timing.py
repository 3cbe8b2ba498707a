"""Times ranks' batches one after the other on one device: only the barrier is computed (paper, Figures 2 and 8)."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..balancer import Partitioner, WorldSamples, sparsity
from .embedding_model import SequenceTower

_FEATURE = "uih"
_WARM_UPS = 3
_ATTEMPTS = 3

Step = Callable[[Tensor], None]
"""Forward and backward of a batch whose samples have these lengths."""


@dataclass(frozen=True)
class ModelSize:
    """What the reference model is made with.

    Attributes:
        width: Width of its layers.
        num_heads: Attention heads.
        num_layers: Layers.
        dim: Width of the embedding rows.
    """

    width: int
    num_heads: int
    num_layers: int
    dim: int = 128


def reference_step(size: ModelSize, device: torch.device, seed: int = 0) -> Step:
    """Forward and backward of the reference model's dense part on batches of given lengths, with rows drawn at random.

    The model is that of bench.embedding and bench.end_to_end: bfloat16 on a GPU, float32 on a CPU. Gradients of the
    looked-up rows are computed; looking up and updating rows is not, since ranks own those evenly.

    Args:
        size: Of the model.
        device: Where to compute.
        seed: Of weights, rows and labels.

    Returns:
        A function of the lengths of a batch's samples.
    """
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tower = SequenceTower([_FEATURE], size.dim, size.width, size.num_layers, size.num_heads, dtype).to(device)
    rows = torch.randn(1 << 12, size.dim, device=device)

    def step(lengths: Tensor) -> None:
        nonlocal rows
        total = int(lengths.sum())
        while total > len(rows):
            rows = torch.cat([rows, rows.flip(0)])
        embedded = {_FEATURE: _Embedded(rows[:total].requires_grad_())}
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=starts[1:])
        labels = (torch.arange(total, device=device) % 2).float()
        tower(embedded, starts.to(device, non_blocking=True), labels, int(lengths.max())).backward()
        tower.zero_grad(set_to_none=True)

    return step


@dataclass(frozen=True)
class _Embedded:
    """Looked-up rows of one feature, as the model takes them."""

    rows: Tensor

    def values(self) -> Tensor:
        """Shape [num_ids, dim]."""
        return self.rows


class RankTimer:
    """Seconds of one rank's step, without waiting for anyone.

    On a GPU by events around the step; on a CPU by the CPU time of the thread, since others may use the machine.

    Args:
        step: What to time.
        device: Where it computes.
        repeats: Times to time a batch; the least counts. More than 1 keeps out the noise of a machine that others use,
            and hiccups of the host, which show where steps are short.
        enough_s: A batch whose repeats have taken so long is not timed again.
    """

    def __init__(self, step: Step, device: torch.device, repeats: int = 1, enough_s: float = math.inf) -> None:
        self._step, self._device, self.repeats, self.enough_s = step, device, repeats, enough_s

    def warm_up(self, largest: Tensor) -> None:
        """Compile and get memory, with the largest batch to come."""
        for _ in range(_WARM_UPS):
            self._step(largest)

    def seconds(self, lengths: Tensor) -> float:
        """Time a step. A GPU's step that had to ask the driver for memory is done again, at most twice.

        Args:
            lengths: Lengths of the rank's samples. Shape [n], int64; 0 seconds when there is nothing in them.
        """
        if int(lengths.sum()) == 0:
            return 0.0
        once = self._on_gpu if self._device.type == "cuda" else self._on_cpu
        found: list[float] = []
        while len(found) < self.repeats and sum(found) < self.enough_s:
            found.append(once(lengths))
        return min(found)

    def _on_cpu(self, lengths: Tensor) -> float:
        start = time.thread_time()
        self._step(lengths)
        return time.thread_time() - start

    def _on_gpu(self, lengths: Tensor) -> float:
        for _ in range(_ATTEMPTS):
            allocations = torch.cuda.memory_stats(self._device)["num_device_alloc"]
            seconds = self._events(lengths)
            if torch.cuda.memory_stats(self._device)["num_device_alloc"] == allocations:
                break
        return seconds

    def _events(self, lengths: Tensor) -> float:
        torch.cuda.synchronize(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._step(lengths)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass
class Measured:
    """Seconds of all ranks of one global batch under one plan.

    Attributes:
        world: The global batch.
        owner: The plan. Shape [N], int64.
        seconds: Shape [world_size], float64.
    """

    world: WorldSamples
    owner: Tensor
    seconds: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def batch(self, rank: int) -> Tensor:
        """Lengths of a rank's samples, in the order of the global batch."""
        return self.world.uih_lengths[self.owner == rank]

    def sparsity(self) -> float:
        """Mean over the ranks of the padding that their batches would need (Eq. 1)."""
        return float(np.mean([sparsity(self.batch(rank)) for rank in range(self.world.world_size)]))

    def as_measurement(self, step: int) -> WorldSamples:
        """The world as a partitioner sees it once its seconds have arrived, for a `CostModel`."""
        size = self.world.world_size
        return WorldSamples(
            size,
            self.world.rank,
            self.world.uih_lengths,
            seconds=self.seconds,
            seconds_step=torch.full((size,), step),
            measured=WorldSamples(size, self.owner, self.world.uih_lengths),
        )


def measure_plans(
    timer: RankTimer,
    world: WorldSamples,
    partitioners: Mapping[str, Partitioner],
    floor: str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Time every rank's batch under every plan, rank after rank, so that a drift of the clock meets all plans alike.

    Args:
        timer: Times a batch.
        world: The global batch.
        partitioners: By name.
        floor: Name to give to identical batches on all ranks: what noise of timing alone leaves. None: not measured.
        advance: Called after each rank.
    """
    plans = {name: Measured(world, partitioner(world)) for name, partitioner in partitioners.items()}
    batches = {name: [plan.batch(rank) for rank in range(world.world_size)] for name, plan in plans.items()}
    if floor is not None:
        plans[floor], batches[floor] = _identical(world)
    found: dict[str, list[float]] = {name: [] for name in plans}
    timer.warm_up(max((batch for each in batches.values() for batch in each), key=lambda batch: int(batch.sum())))
    with _no_collection():
        for rank in range(world.world_size):
            for name in plans:
                found[name].append(timer.seconds(batches[name][rank]))
            advance()
    for name, plan in plans.items():
        plan.seconds = torch.tensor(found[name], dtype=torch.float64)
    return plans


def _identical(world: WorldSamples) -> tuple[Measured, list[Tensor]]:
    """Every rank with the same batch: evenly spaced samples of the global batch sorted by length."""
    size, count = world.world_size, max(1, world.num_samples // world.world_size)
    ordered = world.uih_lengths.sort().values
    middle = torch.linspace(0, len(ordered) - 1, count).long()
    everywhere = WorldSamples(size, torch.arange(size).repeat_interleave(count), ordered[middle].repeat(size))
    return Measured(everywhere, everywhere.rank), [ordered[middle]] * size


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
