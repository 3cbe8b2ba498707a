"""A study of virtual ranks: measures points of the paper's figures, and learns compute time from them (section 5.1)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from ..balancer import (
    CostModel,
    Partitioner,
    VariableBatchSize,
    WorldSamples,
    fixed_batch_size,
    greedy_batch_size,
    straggler_percentage,
)
from .compute_fit import ComputeFit, fit_compute, loads_of
from .lengths import LengthSource
from .virtual_rank_timing import Measured, ModelSize, RankTimer, measure_plans

AS_LOADED, FLOOR, COST_MODEL = "as loaded", "floor: identical batches", "greedy, measured cost model"
LEARNING_STEPS = 2  # as loaded and VBS in turn: plans that differ in ΣL, ΣL² and counts tell the terms apart


@dataclass(frozen=True)
class Point:
    """One setting of the figures: longest history, samples a rank loads, ranks."""

    max_length: int
    batch_size: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.max_length:,} / {self.batch_size} / {self.world_size}"


@dataclass(frozen=True)
class Outcome:
    """One partitioner at one point: means over the global batches, with the least and the most."""

    max_length: int
    batch_size: int
    world_size: int
    partitioner: str
    batches: int
    straggler_percentage: float
    straggler_percentage_least: float
    straggler_percentage_most: float
    sparsity: float
    mean_ms: float
    step_ms: float


@dataclass(frozen=True)
class Scale:
    """What a device can do in a few minutes.

    Attributes:
        base: The point that all axes cross.
        lengths: The axis of longest histories.
        batch_sizes: The axis of batch sizes.
        world_sizes: The axis of ranks.
        length_scale: Factor on all lengths.
        model: Size of the reference model.
    """

    base: Point
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    world_sizes: tuple[int, ...]
    length_scale: float
    model: ModelSize


def points(scale: Scale) -> list[Point]:
    """The base, then the other points along each axis, each once."""
    base = scale.base
    found = [base]
    found += [replace(base, max_length=length) for length in scale.lengths]
    found += [replace(base, batch_size=size) for size in scale.batch_sizes]
    found += [replace(base, world_size=size) for size in scale.world_sizes]
    return list(dict.fromkeys(found))


class Study:
    """Measures points, and keeps what all of them teach about compute time.

    Args:
        timer: Times a batch.
        source: Where lengths come from.
        scale: Base point and factor on lengths.
        seed: Of the draw.
    """

    def __init__(self, timer: RankTimer, source: LengthSource, scale: Scale, seed: int) -> None:
        self._timer, self._source, self._scale, self._seed = timer, source, scale, seed
        self._cost = CostModel()
        self._seen: list[Measured] = []
        self._noise: list[float] = []
        self.remarks: list[str] = []

    def learn(self, advance: Callable[[], None]) -> None:
        """Let the cost model see a few global batches of the base's shape, none of which is judged."""
        point = replace(self._scale.base, world_size=min(self._scale.base.world_size, 64))
        for step, world in enumerate(self._worlds(point, LEARNING_STEPS, self._seed + 1)):
            partitioner: Partitioner = VariableBatchSize(1) if step % 2 else (lambda world: world.rank)
            (measured,) = measure_plans(self._timer, world, {"": partitioner}, advance=advance).values()
            self._seen.append(measured)
            self._cost(measured.as_measurement(step))

    def measure(self, point: Point, batches: int, advance: Callable[[], None]) -> list[Outcome]:
        """Time as loaded, FBS, the cost model and the floor at a point, and the other partitioners at the base."""
        partitioners: dict[str, Partitioner] = {AS_LOADED: lambda world: world.rank, "FBS": fixed_batch_size}
        if point == self._scale.base:
            partitioners |= {"VBS": VariableBatchSize(1), "greedy": greedy_batch_size}
        partitioners[COST_MODEL] = greedy_batch_size(cost=self._cost)
        runs = [
            measure_plans(self._timer, world, partitioners, FLOOR, advance)
            for world in self._worlds(point, batches, self._seed)
        ]
        for run in runs:
            self._seen += [measured for name, measured in run.items() if name != FLOOR]
            self._noise.append(
                float(run[FLOOR].seconds.std() / run[FLOOR].seconds.mean()) if point.world_size > 1 else 0
            )
        return [_outcome(point, name, [run[name] for run in runs]) for name in runs[0]]

    def predicted_s(self, point: Point, batches: int) -> float:
        """Seconds that a point will take, from what was seen. 0 before anything was."""
        if not self._seen:
            return 0.0
        fit = self.fit()
        worlds = self._worlds(point, batches, self._seed)
        ranks = np.concatenate(
            [fit.seconds(loads_of(w.rank.numpy(), w.uih_lengths.numpy(), w.world_size)) for w in worlds]
        )
        # three plans, the floor, and warming up
        timer = self._timer
        times = np.minimum(timer.repeats, np.ceil(timer.enough_s / np.maximum(ranks, 1e-9)))
        return 4.2 * float((times * ranks).sum())

    def fit(self) -> ComputeFit:
        """Compute time as a function of lengths, over all that was measured."""
        loads = [loads_of(m.owner.numpy(), m.world.uih_lengths.numpy(), m.world.world_size) for m in self._seen]
        seconds = np.concatenate([m.seconds.numpy() for m in self._seen])
        some = seconds > 0
        noise = statistics.median(self._noise) if self._noise else 0.0
        return fit_compute(np.concatenate(loads)[some], seconds[some], noise)

    def _worlds(self, point: Point, batches: int, seed: int) -> list[WorldSamples]:
        lengths, remark = self._source.draw(point.world_size * point.batch_size, batches, seed)
        if "with replacement" in remark:
            note = f"{point}: {remark}"
            self.remarks += [note] if note not in self.remarks else []
        scaled = (np.minimum(lengths, point.max_length) * self._scale.length_scale).astype(np.int64)
        rank = torch.arange(point.world_size).repeat_interleave(point.batch_size)
        return [WorldSamples(point.world_size, rank, torch.from_numpy(batch.copy())) for batch in scaled]


def _outcome(point: Point, name: str, runs: Sequence[Measured]) -> Outcome:
    stragglers = [straggler_percentage(run.seconds) for run in runs]
    return Outcome(
        **asdict(point),
        partitioner=name,
        batches=len(runs),
        straggler_percentage=statistics.fmean(stragglers),
        straggler_percentage_least=min(stragglers),
        straggler_percentage_most=max(stragglers),
        sparsity=statistics.fmean(run.sparsity() for run in runs),
        mean_ms=1e3 * statistics.fmean(float(run.seconds.mean()) for run in runs),
        step_ms=1e3 * statistics.fmean(float(run.seconds.max()) for run in runs),
    )
