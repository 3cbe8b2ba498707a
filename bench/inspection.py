"""What FreeScale would bring, by lengths and ids alone: waiting, padding, collisions (paper, sections 2.2, 2.3)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..balancer import WorldSamples, greedy_batch_size, straggler_percentage
from ..balancer.metrics import rank_loads
from .collision_ratio import among
from .histories import Histories, batches_of_rows

Ints = NDArray[np.int64]

_PAIRS = 2  # of consecutive batches, compared for collisions
_MANY = 4_000_000  # ids of a batch; from there one pair is enough, and takes long enough


@dataclass(frozen=True)
class Finding:
    """What was found for one number of ranks and one batch size.

    Attributes:
        world_size: Ranks.
        batch_size: Samples a rank loads.
        batches: Global batches looked at.
        repeated: Whether rows had to be drawn again and again, since there are fewer than a global batch needs.
        sparsity: Share of padding (Eq. 1), mean over ranks and batches.
        waiting: Percentage of a step that ranks wait as loaded, if time grows with the items.
        waiting_balanced: The same, balanced.
        speedup: Steps balanced, as a multiple of the speed as loaded, if time grows with the items.
        speedup_squared: The same, if time grows with the square of each length.
        rows_per_rank: Distinct ids that a rank looks up in a step; None where ids are not known.
        collisions: Percentage of them that some rank looks up in the next step too; None where not known.
    """

    world_size: int
    batch_size: int
    batches: int
    repeated: bool
    sparsity: float
    waiting: float
    waiting_balanced: float
    speedup: float
    speedup_squared: float
    rows_per_rank: float | None = None
    collisions: float | None = None


def inspect_histories(
    histories: Histories,
    world_size: int,
    batch_size: int,
    max_length: int | None = None,
    most_batches: int = 8,
    seed: int | None = None,
) -> Finding:
    """Look at global batches of a given size.

    Args:
        histories: Lengths and ids.
        world_size: Number of ranks. Row i of a global batch is loaded by rank i % world_size.
        batch_size: Samples a rank loads.
        max_length: Longer histories are cut to their last items.
        most_batches: Global batches to look at, at most.
        seed: Of shuffling; None takes rows in order.
    """
    size = world_size * batch_size
    rows = list(batches_of_rows(len(histories.lengths), size, most_batches, seed))
    repeated = not rows
    if repeated:
        rows = [np.random.default_rng(seed or 0).integers(0, len(histories.lengths), size) for _ in range(most_batches)]
    cut = histories.lengths if max_length is None else np.minimum(histories.lengths, max_length)
    rank = torch.arange(size) % world_size
    worlds = [WorldSamples(world_size, rank, torch.from_numpy(cut[chosen])) for chosen in rows]
    linear, squared = _gain(worlds, 1), _gain(worlds, 2)
    rows_per_rank, colliding = _collisions(histories, rows, world_size, max_length) if not repeated else (None, None)
    return Finding(
        world_size=world_size,
        batch_size=batch_size,
        batches=len(rows),
        repeated=repeated,
        sparsity=statistics.fmean(_sparsity(world, batch_size) for world in worlds),
        waiting=linear.waiting,
        waiting_balanced=linear.waiting_balanced,
        speedup=linear.speedup,
        speedup_squared=squared.speedup,
        rows_per_rank=rows_per_rank,
        collisions=colliding,
    )


@dataclass(frozen=True)
class _Gain:
    waiting: float
    waiting_balanced: float
    speedup: float


def _gain(worlds: list[WorldSamples], power: int) -> _Gain:
    """Compare loads as loaded with those of the default partitioner, a sample's load being a power of its length."""

    def cost(world: WorldSamples) -> Tensor:
        return world.uih_lengths.double() ** power

    partitioner = greedy_batch_size(cost=cost)
    loaded = torch.stack([rank_loads(world.rank, cost(world), world.world_size) for world in worlds])
    balanced = torch.stack([rank_loads(partitioner(world), cost(world), world.world_size) for world in worlds])
    after = float(balanced.amax(1).sum())
    speedup = float(loaded.amax(1).sum()) / after if after else 1.0
    return _Gain(straggler_percentage(loaded), straggler_percentage(balanced), speedup)


def _sparsity(world: WorldSamples, batch_size: int) -> float:
    """Eq. 1 of each rank's batch, the mean over ranks."""
    lengths = world.uih_lengths.view(batch_size, world.world_size).double()
    padded = lengths.amax(0) * batch_size
    return float((1 - lengths.sum(0) / padded.clamp(min=1)).where(padded > 0, torch.zeros_like(padded)).mean())


def _collisions(
    histories: Histories, rows: list[Ints], world_size: int, max_length: int | None
) -> tuple[float | None, float | None]:
    """Distinct ids a rank asks for, and the percentage that some rank asks for in the next batch too."""
    known = [chosen for chosen in rows if len(chosen) and int(chosen.max()) < histories.num_rows_with_ids]
    known = known[: _PAIRS + 1 if sum(int(histories.lengths[chosen].sum()) for chosen in known[:1]) < _MANY else 2]
    if len(known) < 2:
        return None, None
    asked = [[ids.unique() for ids in _by_rank(histories, chosen, world_size, max_length)] for chosen in known]
    shares = [_recurring(batch, upcoming) for batch, upcoming in pairwise(asked)]
    return statistics.fmean(len(rows) for batch in asked for rows in batch), 100 * statistics.fmean(shares)


def _recurring(batch: list[Tensor], upcoming: list[Tensor]) -> float:
    """Share of the rows that ranks ask for, each its different ones, that are asked for in the next batch too."""
    later = torch.cat(upcoming).unique()
    recurring = sum(int(among(rows, later).sum()) for rows in batch)
    return recurring / max(1, sum(map(len, batch)))


def _by_rank(histories: Histories, rows: Ints, world_size: int, max_length: int | None) -> Iterable[Tensor]:
    for rank in range(world_size):
        yield torch.from_numpy(histories.ids_of(rows[rank::world_size], max_length))
