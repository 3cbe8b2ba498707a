"""What a sample costs and how fast a rank is (paper, section 4.1: UIH length stands for compute time)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeIs

from ..plan import Cost, WorldSamples
from ..protocol.quiet import numbers_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FEW = 1024  # are sorted faster by comparison


def uih_length(world: WorldSamples) -> Tensor:
    """The default cost: the UIH length itself. Shape [num_samples], float64."""
    return torch.from_numpy(world.uih_lengths.numpy().astype(np.float64))


uih_length.__dict__.update(reads_candidate_lengths=False, reads_measured=False)


@runtime_checkable
class RankCost(Protocol):
    """A cost that knows ranks too: rank r needs `(overhead + costs of its samples) / speeds[r]`."""

    def __call__(self, world: WorldSamples) -> Tensor:
        """Cost of each sample. Shape [num_samples], float64, not negative."""

    def speeds(self, world: WorldSamples) -> Tensor:
        """Speed of each rank. Shape [world_size], float64, positive."""

    def overhead(self, world: WorldSamples) -> float:
        """Cost of a step that does not depend on its samples, not negative."""


@dataclass(frozen=True, eq=False)
class Workload:
    """What a partitioner evens out: rank r takes `(overhead + costs of its samples) / speeds[r]`.

    Attributes:
        costs: Cost of each sample. Shape [num_samples].
        speeds: Speed of each rank. Shape [world_size].
        overhead: Cost of a step on any rank, before its first sample.
    """

    costs: Floats
    speeds: Floats
    overhead: float = 0.0

    @property
    def even_speeds(self) -> bool:
        """Whether all ranks are equally fast; the overhead does not matter then."""
        return bool((self.speeds == self.speeds[0]).all())

    @property
    def ideal_time(self) -> float:
        """Time that every rank would take if samples could be split."""
        return float((np.add.reduce(self.costs) + self.overhead * len(self.speeds)) / np.add.reduce(self.speeds))

    def times(self, owner: Ints) -> Floats:
        """Time of each rank under a plan. Shape [world_size]."""
        loads = np.bincount(owner, weights=self.costs, minlength=len(self.speeds))
        return np.asarray((loads + self.overhead) / self.speeds, dtype=np.float64)


def workload(cost: Cost, world: WorldSamples) -> Workload:
    """Ask a cost about the samples, and about the ranks if it knows them.

    Raises:
        ValueError: The cost has another shape than [num_samples], or a value that is negative or not finite.
    """
    if cost is uih_length and world.cost is None:  # without a tensor: to free one lets go of the interpreter
        costs: Floats = numbers_of(world.uih_lengths).astype(np.float64)
    else:
        costs = _costs(cost(world) if world.cost is None else world.cost, world)
    if len(costs) and not (np.minimum.reduce(costs) >= 0 and np.maximum.reduce(costs) < np.inf):
        sample = int(np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))[0])
        raise ValueError(f"cost must be finite and not negative, got {costs[sample]} for sample {sample}")
    if _knows_ranks(cost):
        return Workload(costs, cost.speeds(world).double().numpy(), float(cost.overhead(world)))
    return Workload(costs, _even_speeds(world.world_size))


@functools.lru_cache(maxsize=8)
def _even_speeds(world_size: int) -> Floats:
    speeds = np.ones(world_size)
    speeds.flags.writeable = False
    return speeds


def _costs(given: Tensor, world: WorldSamples) -> Floats:
    if given.shape != (world.num_samples,):
        raise ValueError(f"cost must give shape [{world.num_samples}], one value a sample, got {list(given.shape)}")
    return given.numpy() if given.dtype == torch.float64 else given.double().numpy()


def _knows_ranks(cost: Cost) -> TypeIs[RankCost]:
    """As isinstance, which takes 70 calls to find out."""
    return hasattr(cost, "speeds") and hasattr(cost, "overhead")


def costliest_first(costs: Floats) -> Ints:
    """Order of samples by descending cost, ties by index. Shape [N].

    Costs that float32 holds exactly (lengths below 2**24, rounded costs) are sorted by radix, 16 bits at a time,
    several times faster than by comparison: the bits of non-negative floats rise with their values.
    """
    if len(costs) < _FEW:
        return (-costs).argsort(kind="stable")
    single = costs.astype(np.float32)
    if not (single == costs).all():
        return (-costs).argsort(kind="stable")
    bits = ~(single + np.float32(0)).view(np.uint32)  # + 0: minus zero is zero
    order = np.argsort(bits.astype(np.uint16), kind="stable")
    return order[np.argsort((bits[order] >> 16).astype(np.uint16), kind="stable")]
