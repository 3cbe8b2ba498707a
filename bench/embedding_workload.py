"""Batches whose lengths and colliding rows are known in advance (paper, section 5.2).

They are synthetic, so that nothing else shows. Every rank and step has the same lengths in another order, so nobody
waits for a longer batch. Every step looks up as many rows as every other, equally often: only which rows those are
differs, by as much as the collision ratio says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .collision_ratio import Collisions, collisions

NUM_CLASSES = 4
"""Rows that do not recur come from one of so many classes, step by step; a ring of batches has a multiple of it."""


@dataclass(frozen=True)
class Workload:
    """One kind of batches.

    Attributes:
        cut: Longest history, in ids.
        ratio: Share of the distinct rows of a global batch that are also in the next one, from 0 to 1.
        world_size: Number of ranks.
        batch_size: Samples a rank.
        num_rows: Rows of each table.
        num_tables: Tables, each looked up once for every id of the history.
        median: Median length before the cut, in ids; lengths are log-normal with `sigma`.
        sigma: See `median`.
        exponent: Of the power law of rows' popularity.
        recurring: Which rows recur: "spread" evenly over all popularities, so that rows, requests and occurrences
            collide about equally often, or the most "popular" ones, as in real data.
        seed: Of everything random.
    """

    cut: int
    ratio: float
    world_size: int
    batch_size: int = 128
    num_rows: int = 10_000_000
    num_tables: int = 1
    median: float = 3500.0
    sigma: float = 1.0
    exponent: float = 1.05
    recurring: str = "spread"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1, got {self.ratio}")
        if self.recurring not in ("spread", "popular"):
            raise ValueError(f"recurring must be 'spread' or 'popular', got {self.recurring!r}")
        if self.num_rows < NUM_CLASSES:
            raise ValueError(f"num_rows must be at least {NUM_CLASSES}, got {self.num_rows}")

    @property
    def rows_per_rank(self) -> int:
        """Rows of a table that a rank owns."""
        return -(-self.num_rows // self.world_size)

    @cached_property
    def sorted_lengths(self) -> Tensor:
        """Lengths of a rank's histories, ascending: quantiles of the distribution. Shape [batch_size], int64."""
        quantiles = (torch.arange(self.batch_size, dtype=torch.float64) + 0.5) / self.batch_size
        drawn = self.median * torch.exp(self.sigma * torch.special.ndtri(quantiles))
        return drawn.clamp(1, self.cut).long()

    def lengths(self, step: int, rank: int) -> Tensor:
        """Lengths of a rank's histories. Shape [batch_size], int64."""
        order = torch.randperm(self.batch_size, generator=self._generator(1, step, rank))
        return self.sorted_lengths[order]

    def global_ids(self, step: int, table: int = 0) -> Tensor:
        """Ids that all ranks look up in a table. Shape [world_size, ids of a rank], int64."""
        places, recurs = self._places[table]
        order = torch.randperm(len(places), generator=self._generator(2, step, table))
        shuffled = places[order]
        own = shuffled * NUM_CLASSES + torch.where(recurs[order], 0, step % NUM_CLASSES)
        # A step coprime to the number of rows spreads what is popular over all ranks.
        return (own * _coprime(self.num_rows) % self.num_rows).view(self.world_size, -1)

    def collisions(self, step: int = 0, table: int = 0) -> Collisions:
        """Count what recurs from a step to the next."""
        batch, upcoming = self.global_ids(step, table), self.global_ids(step + 1, table)
        return collisions(list(batch), list(upcoming), self.rows_per_rank)

    @cached_property
    def _places(self) -> list[tuple[Tensor, Tensor]]:
        """For each table the places in the order of popularity of a global batch's ids, and which of them recur."""
        num_ids = self.world_size * int(self.sorted_lengths.sum())
        found = []
        for table in range(self.num_tables):
            uniform = torch.rand(num_ids, generator=self._generator(3, table), dtype=torch.float64)
            places = power_law(uniform, self.num_rows // NUM_CLASSES, self.exponent)
            distinct, which = places.unique(return_inverse=True)
            found.append((places, chosen(len(distinct), self.ratio, self.recurring)[which]))
        return found

    def _generator(self, *numbers: int) -> torch.Generator:
        seed = self.seed
        for number in numbers:
            seed = (seed * 1_000_003 + number + 1) % 2**63
        return torch.Generator().manual_seed(seed)


def power_law(uniform: Tensor, num_places: int, exponent: float) -> Tensor:
    """Turn uniform numbers into places 0, 1, … with probabilities that fall as (place + 1) ** -exponent, about.

    Args:
        uniform: Numbers from 0 to 1. float64.
        num_places: Places there are.
        exponent: At least 0.

    Returns:
        int64, shape of `uniform`.
    """
    end = num_places + 1.0
    if math.isclose(exponent, 1.0):
        drawn = torch.exp(uniform * math.log(end))
    else:
        drawn = (1 + uniform * (end ** (1 - exponent) - 1)) ** (1 / (1 - exponent))
    return (drawn.long() - 1).clamp_(0, num_places - 1)


def chosen(count: int, ratio: float, how: str) -> Tensor:
    """Choose a share of things in order, spread evenly or the first ones. bool, shape [count].

    Example:
        >>> chosen(6, 0.5, "spread").tolist(), chosen(4, 0.5, "popular").tolist()
        ([False, True, False, True, False, True], [True, True, False, False])
    """
    number = round(count * ratio)
    index = torch.arange(count)
    if how == "popular":
        return index < number
    return (index + 1) * number // max(count, 1) > index * number // max(count, 1)


def bytes_a_step(found: Sequence[Collisions], dim: int) -> float:
    """Bytes of urgent traffic that a rank sends in a step, on average over ranks: gradients out, rows back.

    Args:
        found: Of each table.
        dim: Width of the tables' float32 rows.
    """
    requests = sum(sum(each.remote_requests) for each in found)
    return 2 * 4 * dim * requests / len(found[0].remote_requests)


def _coprime(num_rows: int) -> int:
    step = int(num_rows * 0.6180339887) | 1
    while math.gcd(step, num_rows) != 1:
        step += 2
    return step
