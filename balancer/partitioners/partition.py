"""Partitioners that give every rank the same number of samples: zig-zag, greedy, stay home (paper, section 4.1).

Each is a frozen dataclass. Called with a world it plans; called with options it gives a copy that has them:
`greedy_batch_size(world)`, `greedy_batch_size(cost=CostModel())`. When the number of samples is not a multiple of the
world size, counts differ by at most one. Plans are computed by numpy in float64, on one thread and with stable sorts
(ties go by sample index), so that every rank computes the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self, overload

import numpy as np
import torch
from torch import Tensor

from ..plan import Cost, PassesOn, WorldSamples
from .spread import spread_by_speed
from .swaps import even_out
from .workload import Floats, Ints, Workload, costliest_first, uih_length, workload


@dataclass(frozen=True)
class FixedBatchSize(PassesOn):
    """Deal samples, costliest first, to ranks in a zig-zag: 0, 1, …, n-1, n-1, …, 1, 0, 0, 1, and so on.

    Needs only the order of costs, so it ignores the speeds that a `CostModel` knows.

    Source: FreeScale, section 4.1 (FBS). Deviation: the paper's list `[i, 2n-i, 2n+i, 4n-i, …]` repeats some samples
    and drops others (n=4 never assigns 4 or 12); zero-based it must read `[i, 2n-1-i, 2n+i, 4n-1-i, …]`.

    Args:
        cost: Cost of each sample; the UIH length by default.

    Returns:
        When called with a `WorldSamples`: owner rank of every sample. Shape [num_samples], int64.

    Raises:
        ValueError: The cost has a wrong shape, or a value that is negative or not finite.

    Example:
        >>> lengths = torch.tensor([8, 7, 6, 5, 4, 3])
        >>> world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 0, 1, 1, 1]), uih_lengths=lengths)
        >>> fixed_batch_size(world)
        tensor([0, 1, 1, 0, 0, 1])
    """

    cost: Cost = uih_length

    @property
    def held(self) -> object:
        """The cost."""
        return self.cost

    @property
    def weight(self) -> Cost:
        """What is evened out: the cost."""
        return self.cost

    @overload
    def __call__(self, world: WorldSamples) -> Tensor: ...
    @overload
    def __call__(self, *, cost: Cost) -> Self: ...
    def __call__(self, world: WorldSamples | None = None, *, cost: Cost | None = None) -> Tensor | Self:
        """Plan for `world`; without one, give a copy that has the options."""
        configured = self if cost is None else replace(self, cost=cost)
        return configured if world is None else torch.from_numpy(configured.plan(world))

    def plan(self, world: WorldSamples) -> Ints:
        """Compute the plan as a numpy array."""
        load = workload(self.cost, world)
        row, column = np.divmod(np.arange(world.num_samples), world.world_size)
        owner = np.empty(world.num_samples, dtype=np.int64)
        owner[costliest_first(load.costs)] = np.where(row % 2 == 0, column, world.world_size - 1 - column)
        return owner


@dataclass(frozen=True)
class GreedyBatchSize(FixedBatchSize):
    """Deal rows of samples of similar cost, each row's costliest sample to the rank with the least load. The default.

    Samples are sorted by cost and cut into rows of `world_size`; rows are dealt by descending spread (largest minus
    smallest cost), so that the last rows even out what the first left; swaps help where the first row has a sample so
    long that all other rows cannot. From 16 ranks on, rows of like spread are merged while 32 are left to deal. N log
    N, with a loop over rows, below 16 ranks over samples. With a cost that knows ranks of unequal speed, each rank
    draws its share of quantiles of the sorted costs instead, warped to what its speed can take, and swaps even out the
    rest: equal counts, but shorter samples on slower ranks.

    Source: ours, in place of FreeScale's FBS (section 4.1); quality of Karmarkar-Karp at a hundredth of its time.

    Args:
        cost: Cost of each sample; the UIH length by default.

    Returns:
        When called with a `WorldSamples`: owner rank of every sample. Shape [num_samples], int64.

    Raises:
        ValueError: The cost has a wrong shape, or a value that is negative or not finite.

    Example:
        >>> lengths = torch.tensor([9, 1, 5, 4])
        >>> world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 1, 1]), uih_lengths=lengths)
        >>> greedy_batch_size(world)
        tensor([0, 0, 1, 1])
    """

    def plan(self, world: WorldSamples) -> Ints:
        """Compute the plan as a numpy array."""
        load = workload(self.cost, world)
        if world.world_size == 1:
            return np.zeros(world.num_samples, dtype=np.int64)
        owner = _deal_rows(load) if load.even_speeds else spread_by_speed(load)
        return even_out(owner, load, tolerance=_CLOSE)


@dataclass(frozen=True)
class HomeBatchSize(FixedBatchSize):
    """Leave samples where they were loaded, and swap pairs between heavy and light ranks until within the tolerance.

    Moves a few percent of the bytes where the others move almost all. Where loaded counts differ by more than one, the
    surplus, evenly over its rank's costs, goes first to the ranks that have too few.

    Source: ours; FreeScale (section 4.1) moves everything.

    Args:
        tolerance: Share of the step that ranks may wait on average, in [0, 1).
        cost: Cost of each sample; the UIH length by default.

    Returns:
        When called with a `WorldSamples`: owner rank of every sample. Shape [num_samples], int64. The tolerance is
        missed only where no swap helps, for example beside one giant sample.

    Raises:
        ValueError: `tolerance` is outside [0, 1), or the cost has a wrong shape, or a value that is negative or not
            finite.

    Example:
        >>> lengths = torch.tensor([9, 3, 3, 1])
        >>> world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 1, 1]), uih_lengths=lengths)
        >>> home_batch_size(tolerance=0.25)(world)
        tensor([0, 1, 1, 0])
    """

    tolerance: float = 0.005

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), got {self.tolerance}")

    @overload
    def __call__(self, world: WorldSamples) -> Tensor: ...
    @overload
    def __call__(self, *, cost: Cost = ..., tolerance: float = ...) -> Self: ...
    def __call__(
        self, world: WorldSamples | None = None, *, cost: Cost | None = None, tolerance: float | None = None
    ) -> Tensor | Self:
        """Plan for `world`; without one, give a copy that has the options."""
        configured = self if tolerance is None else replace(self, tolerance=tolerance)
        configured = configured if cost is None else replace(configured, cost=cost)
        return configured if world is None else torch.from_numpy(configured.plan(world))

    def plan(self, world: WorldSamples) -> Ints:
        """Compute the plan as a numpy array."""
        load = workload(self.cost, world)
        return even_out(_equal_counts_at_home(world, load), load, self.tolerance)


_CLOSE = 1e-4  # what greedy_batch_size leaves alone: 0.01 % straggler
_FEW_RANKS = 16
_LOAD = itemgetter(0)
_FEWEST_DEALT = 32  # rows, one by one

fixed_batch_size = FixedBatchSize()
"""The paper's zig-zag over samples sorted by cost. Call it with `cost=` for another one."""
greedy_batch_size = GreedyBatchSize()
"""The default: equal counts, and rows of sorted samples dealt to the lightest ranks. Call it with `cost=`."""
home_batch_size = HomeBatchSize()
"""Samples stay where they were loaded, but for swaps until ranks wait less than `tolerance=`. Call it with options."""


def _deal_rows(load: Workload) -> Ints:
    """Deal rows of sorted samples by descending spread, costliest sample to least load. Shape [N]."""
    world_size, num_samples = len(load.speeds), len(load.costs)
    order = costliest_first(load.costs)
    rows = np.zeros((-(-num_samples // world_size), world_size))
    rows.ravel()[:num_samples] = load.costs[order]
    widest_first = (rows[:, -1] - rows[:, 0]).argsort(kind="stable")
    deal = _deal_to_few if world_size < _FEW_RANKS else _deal_merged
    row = np.dtype((np.void, 8 * world_size))  # one item: to index rows of several lets another thread in each time
    ordered = rows.view(row)[:, 0][widest_first].view(np.float64).reshape(rows.shape)
    dealt = np.empty(rows.shape, dtype=np.int64)
    dealt.view(row)[:, 0][widest_first] = deal(ordered).view(row)[:, 0]
    owner = np.empty(num_samples, dtype=np.int64)
    owner[order] = dealt.ravel()[:num_samples]
    return owner


def _deal_to_few(rows: Floats) -> Ints:
    """Give each row's costliest sample to the rank with the least load, row after row: [rows, ranks] to the ranks.

    Sorts a list in Python: calls of NumPy take as long for few ranks, and each sort of theirs lets another thread in.
    """
    if rows.shape[1] == 2:
        return _deal_to_two(rows)
    loads = [(0.0, rank) for rank in range(rows.shape[1])]
    dealt: list[list[int]] = []
    for row in rows.tolist():
        dealt.append([rank for _, rank in loads])
        loads = [(load + cost, rank) for (load, rank), cost in zip(loads, row, strict=True)]
        loads.sort(key=_LOAD)
    return np.array(dealt, dtype=np.int64).reshape(rows.shape)


def _deal_to_two(rows: Floats) -> Ints:
    """As `_deal_to_few`, for two ranks: all there is to follow is how much more the first one has."""
    more, first_is_lighter, firsts = 0.0, True, []
    for difference in (rows[:, 0] - rows[:, 1]).tolist():
        firsts.append(0 if first_is_lighter else 1)
        more += difference if first_is_lighter else -difference
        if more:
            first_is_lighter = more < 0
    dealt = np.empty(rows.shape, dtype=np.int64)
    dealt[:, 0] = firsts
    np.subtract(1, dealt[:, 0], out=dealt[:, 1])
    return dealt


def _deal_merged(rows: Floats) -> Ints:
    """As `_deal_to_few`, but rows beyond a number are merged first, each with its neighbour turned around.

    What rows of like spread leave of each other is small, so few rows are left to deal one by one, and all are more
    even in the end: the differencing of Karmarkar and Karp, for all pairs at once.
    """
    num_rows, world_size = rows.shape
    if num_rows < 2 * _FEWEST_DEALT:
        return _deal_one_by_one(rows)
    pairs = num_rows // 2
    even, odd = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    sums = rows[even] + rows[odd, ::-1]
    places = (-sums).argsort(axis=1, kind="stable") + np.arange(pairs).reshape(-1, 1) * world_size
    merged = np.concatenate([sums.ravel()[places], rows[2 * pairs :]])
    widest_first = (merged[:, -1] - merged[:, 0]).argsort(kind="stable")
    dealt = np.empty(merged.shape, dtype=np.int64)
    dealt[widest_first] = _deal_merged(merged[widest_first])
    back = np.empty(pairs * world_size, dtype=np.int64)
    back[places] = dealt[:pairs]
    ranks = np.empty(rows.shape, dtype=np.int64)
    ranks[even] = back.reshape(pairs, world_size)
    ranks[odd] = ranks[even][:, ::-1]
    ranks[2 * pairs :] = dealt[pairs:]
    return ranks


def _deal_one_by_one(rows: Floats) -> Ints:
    """As `_deal_to_few`, for many ranks."""
    dealt = np.empty(rows.shape, dtype=np.int64)
    ranks, loads = np.arange(rows.shape[1]), np.zeros(rows.shape[1])
    for row, costs in zip(dealt, rows, strict=True):
        row[:] = ranks
        loads += costs
        ascending = loads.argsort(kind="stable")
        ranks, loads = ranks[ascending], loads[ascending]
    return dealt


def _equal_counts_at_home(world: WorldSamples, load: Workload) -> Ints:
    """Everyone stays home, but for what ranks have over their share: that fills the ranks that have too few."""
    owner = world.rank.numpy().astype(np.int64)
    counts = np.bincount(owner, minlength=world.world_size)
    share = _shares(world.num_samples, counts)
    surplus = np.maximum(counts - share, 0)
    if not surplus.any():
        return owner
    order = np.lexsort((-load.costs, owner))
    have, over = counts[owner[order]], surplus[owner[order]]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    given = order[(place + 1) * over // have > place * over // have]
    loads: Floats = load.overhead + np.bincount(owner, weights=load.costs, minlength=world.world_size).astype(
        np.float64
    )
    np.subtract.at(loads, owner[given], load.costs[given])
    _fill(owner, given[costliest_first(load.costs[given])], share - counts + surplus, loads, load)
    return owner


def _shares(num_samples: int, preferred: Floats | Ints) -> Ints:
    """Samples of each rank; those ranks that come first by descending `preferred` get the ones left over."""
    share = np.full(len(preferred), num_samples // len(preferred), dtype=np.int64)
    share[np.argsort(-preferred, kind="stable")[: num_samples % len(preferred)]] += 1
    return share


def _fill(owner: Ints, given: Ints, vacancies: Ints, loads: Floats, load: Workload) -> None:
    """Hand samples, costliest first, to ranks with vacancies, least time first; one row of ranks at a time."""
    start = 0
    while start < len(given):
        ranks = np.argsort(loads / load.speeds, kind="stable")
        ranks = ranks[vacancies[ranks] > 0]
        samples = given[start : start + len(ranks)]
        ranks = ranks[: len(samples)]
        owner[samples] = ranks
        loads[ranks] += load.costs[samples]
        vacancies[ranks] -= 1
        start += len(samples)
