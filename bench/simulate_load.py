"""What steps of many ranks cost: real lengths, real ids, the real partitioner, fitted compute time (section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..balancer import Partitioner, WorldSamples, greedy_batch_size
from .compute_fit import ComputeFit, loads_of
from .simulate_step import StepLoad
from .simulate_traffic import Samples, Traffic, expected_traffic, real_traffic, with_collisions

Ints = NDArray[np.int64]
_ID_BYTES = 8


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        samples: Where samples come from.
        fit: Seconds of a rank's batch.
        max_length: Longer histories are cut to their last items.
        batch_size: Samples a rank loads.
        num_steps: Steps, the first of which warms up.
        most_ids: Ids of all steps up to which sets are counted; beyond, rows are expected by their popularity.
        seed: Of the noise of compute time.
        collisions: Share of the rows that collide; None: as the ids have it.
    """

    samples: Samples
    fit: ComputeFit
    max_length: int
    batch_size: int
    num_steps: int
    most_ids: int
    seed: int
    collisions: float | None = None


def as_loaded(world: WorldSamples) -> Tensor:
    """The plan that moves nothing."""
    return world.rank


def by_measured_cost(fit: ComputeFit) -> Partitioner:
    """The default partitioner, with the fitted seconds for a cost: what a `CostModel` that has settled does."""

    def cost(world: WorldSamples) -> Tensor:
        return torch.from_numpy(fit.of_samples(world.uih_lengths.numpy()).astype(np.float32).astype(np.float64))

    return greedy_batch_size(cost=cost)


def step_loads(workload: Workload, world_size: int, partitioner: Partitioner) -> list[StepLoad]:
    """Plan consecutive global batches, and say what each costs.

    The fit's error, which holds the noise of timing, is drawn anew for each rank and step: no plan can foresee it.
    """
    size, random = world_size * workload.batch_size, np.random.default_rng(workload.seed)
    rank = torch.arange(world_size).repeat_interleave(workload.batch_size)
    lengths = [_lengths(workload, step * size, size) for step in range(workload.num_steps)]
    worlds = [WorldSamples(world_size, rank, torch.from_numpy(each)) for each in lengths]
    owners = [partitioner(world).numpy() for world in worlds]
    traffic = _traffic(workload, world_size, lengths, owners)
    found = []
    for world, owner, each in zip(worlds, owners, traffic, strict=True):
        uih = world.uih_lengths.numpy()
        noise = 1 + workload.fit.error * random.standard_normal(world_size).clip(-3, 3)
        moved = np.where(owner != rank.numpy(), _ID_BYTES * uih, 0).astype(np.float64)
        seconds = workload.fit.seconds(loads_of(owner, uih, world_size)) * noise
        sent = np.bincount(rank.numpy(), weights=moved, minlength=world_size).astype(np.float64)
        found.append(StepLoad(seconds, each, sent, size))
    return found


def _lengths(workload: Workload, first: int, count: int) -> Ints:
    return np.minimum(workload.samples.lengths(first, count), workload.max_length)


def _traffic(workload: Workload, world_size: int, lengths: list[Ints], owners: list[Ints]) -> list[Traffic]:
    found = _counted(workload, world_size, lengths, owners)
    return found if workload.collisions is None else [with_collisions(each, workload.collisions) for each in found]


def _counted(workload: Workload, world_size: int, lengths: list[Ints], owners: list[Ints]) -> list[Traffic]:
    """Rows of each step; the first and the last step have themselves for the neighbour that is missing."""
    totals = [float(each.sum()) for each in lengths]
    neighbours = [(max(0, i - 1), min(len(lengths) - 1, i + 1)) for i in range(len(lengths))]
    if sum(totals) <= workload.most_ids:
        ids = [
            _by_rank(workload.samples, step * len(each), each, owners[step], world_size)
            for step, each in enumerate(lengths)
        ]
        return [real_traffic(ids[before], ids[i], ids[after]) for i, (before, after) in enumerate(neighbours)]
    found = []
    for i, (before, after) in enumerate(neighbours):
        items = np.bincount(owners[i], weights=lengths[i], minlength=world_size).astype(np.float64)
        found.append(expected_traffic(items, totals[before], totals[after], workload.samples.popularity))
    return found


def _by_rank(samples: Samples, first: int, lengths: Ints, owner: Ints, world_size: int) -> list[Ints]:
    ids = samples.ids(np.arange(first, first + len(lengths)), lengths)
    empty = [np.zeros(0, dtype=np.int64)]
    return [np.concatenate(empty + [ids[i] for i in np.flatnonzero(owner == rank)]) for rank in range(world_size)]
