"""Wrappers that hold a partitioner to a rule: a budget a rank, groups of ranks, samples that stay together.

They nest: `keep_together(capped(grouped(greedy_batch_size, 8), max_tokens=200_000), "session_id")`, `keep_together`
outermost, since the others would split what it keeps together. (Beyond the paper; section 4.1 takes any partitioner.)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..plan import Cost, Partitioner, PassesOn, WorldSamples, validate_plan
from .repair import Budget, repair
from .workload import Ints, uih_length, workload


@dataclass(frozen=True)
class _Wrapper(PassesOn):
    partitioner: Partitioner

    @abstractmethod
    def __call__(self, world: WorldSamples) -> Tensor:
        """Plan. Returns the owner rank of every sample, shape [num_samples], int64."""

    @property
    def held(self) -> object:
        """The wrapped partitioner."""
        return self.partitioner

    @property
    def weight(self) -> Cost:
        """The cost that the wrapped partitioner goes by; the UIH length for one that does not say."""
        cost: Cost = getattr(self.partitioner, "weight", uih_length)
        return cost


@dataclass(frozen=True)
class Capped(_Wrapper):
    """See `capped`."""

    max_tokens: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        _refuse_keep_together(self.partitioner, "capped")
        if self.max_tokens is None and self.max_bytes is None:
            raise ValueError("capped needs max_tokens, max_bytes or both")
        for name, budget in (("max_tokens", self.max_tokens), ("max_bytes", self.max_bytes)):
            if budget is not None and budget < 1:
                raise ValueError(f"{name} must be at least 1, got {budget}")

    def __call__(self, world: WorldSamples) -> Tensor:
        """Plan. Returns the owner rank of every sample, shape [num_samples], int64."""
        owner = validate_plan(self.partitioner(world), world).numpy()
        budgets = []
        if self.max_tokens is not None:
            budgets.append(Budget("tokens", self.max_tokens, world.uih_lengths.numpy()))
        if self.max_bytes is not None:
            budgets.append(Budget("bytes", self.max_bytes, world.payload_bytes.numpy()))
        return torch.from_numpy(repair(owner, budgets, world.world_size))


def capped(partitioner: Partitioner, *, max_tokens: int | None = None, max_bytes: int | None = None) -> Capped:
    """Let no rank exceed a budget: a guard against running out of memory.

    A plan within the budget is left alone. Otherwise each rank over it gives up samples, which go to the ranks with the
    most room; sample counts may then differ. If that fails, all samples are placed anew, largest first.

    Args:
        partitioner: Plans first.
        max_tokens: Most UIH items of a rank.
        max_bytes: Most payload bytes of a rank.

    Returns:
        A partitioner. It raises ValueError, with the numbers, when a sample alone or all samples together exceed the
        budget, or when no plan within it was found (finding one is NP-hard).

    Raises:
        ValueError: No budget, a budget below 1, or `partitioner` is a `keep_together`, which has to be outermost.

    Example:
        >>> from freescale.balancer import home_batch_size
        >>> world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 1]), uih_lengths=torch.tensor([4, 3, 1]))
        >>> capped(lambda world: world.rank, max_tokens=5)(world)
        tensor([0, 1, 1])
    """
    return Capped(partitioner, max_tokens, max_bytes)


@dataclass(frozen=True)
class Grouped(_Wrapper):
    """See `grouped`."""

    group_size: int

    def __post_init__(self) -> None:
        _refuse_keep_together(self.partitioner, "grouped")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")

    def __call__(self, world: WorldSamples) -> Tensor:
        """Plan. Returns the owner rank of every sample, shape [num_samples], int64."""
        owner = torch.empty(world.num_samples, dtype=torch.int64)
        group = world.rank // self.group_size
        order = group.argsort(stable=True)
        num_groups = -(-world.world_size // self.group_size)
        sizes = torch.bincount(group, minlength=num_groups).tolist()
        for index, samples in enumerate(order.split(sizes)):
            start = index * self.group_size
            inside = world.restricted_to(samples, range(start, min(start + self.group_size, world.world_size)))
            owner[samples] = validate_plan(self.partitioner(inside), inside) + start
        return owner


def grouped(partitioner: Partitioner, group_size: int) -> Grouped:
    """Balance inside groups of consecutive ranks, such as the ranks of a host; samples never leave their group.

    For thousands of ranks, or where the network between groups is slow. Every rank plans all groups, one after the
    other, since all ranks check that they agree.

    Args:
        partitioner: Plans each group; sees a world of that group's ranks, numbered from 0.
        group_size: Ranks of a group; the last group has what is left when it does not divide the world size.

    Returns:
        A partitioner.

    Raises:
        ValueError: `group_size` is below 1, or `partitioner` is a `keep_together`, which has to be outermost.

    Example:
        >>> from freescale.balancer import greedy_batch_size
        >>> world = WorldSamples(world_size=3, rank=torch.tensor([0, 0, 1, 1, 2, 2]), uih_lengths=torch.arange(6))
        >>> grouped(greedy_batch_size, 2)(world)
        tensor([0, 1, 1, 0, 2, 2])
    """
    return Grouped(partitioner, group_size)


@dataclass(frozen=True)
class KeepTogether(_Wrapper):
    """See `keep_together`."""

    column: str

    def __post_init__(self) -> None:
        _refuse_keep_together(self.partitioner, "keep_together")

    @property
    def gather(self) -> tuple[str, ...]:
        """Dense columns that `WorldSamples.gathered` has to hold: the key, and what the wrapped partitioner needs."""
        return tuple(dict.fromkeys((self.column, *super().gather)))

    def __call__(self, world: WorldSamples) -> Tensor:
        """Plan. Returns the owner rank of every sample, shape [num_samples], int64."""
        unit = self._units(world)
        merged = _merge(world, unit, self.weight)
        return validate_plan(self.partitioner(merged), merged)[torch.from_numpy(unit)]

    def _units(self, world: WorldSamples) -> Ints:
        """Unit of each sample; units are numbered by first appearance."""
        if self.column not in world.gathered:
            have = sorted(world.gathered)
            raise ValueError(f'keep_together needs column "{self.column}": pass gather=("{self.column}",); got {have}')
        keys = world.gathered[self.column]
        if keys.shape != (world.num_samples,) or keys.is_floating_point():
            raise ValueError(
                f'column "{self.column}" must hold one integer a sample, got {keys.dtype} of shape {list(keys.shape)}'
            )
        _, first, unit = np.unique(keys.numpy(), return_index=True, return_inverse=True)
        number = np.empty(len(first), dtype=np.int64)
        number[np.argsort(first, kind="stable")] = np.arange(len(first))
        return number[unit.reshape(-1)]


def keep_together(partitioner: Partitioner, column: str) -> KeepTogether:
    """Keep samples of one key on one rank, such as those of a session whose items serve as each other's negatives.

    Samples of a key are merged into one unit that costs the sum of their costs; the partitioner deals units (its equal
    counts are then counts of units).

    Args:
        partitioner: Deals units. A unit is at home where most of its bytes are.
        column: Dense integer column with the key of each sample. The loader gathers it; planning by hand needs it in
            `WorldSamples.gathered`.

    Returns:
        A partitioner. It raises ValueError when the column is missing or does not hold one integer a sample.

    Raises:
        ValueError: `partitioner` is a `keep_together` itself.

    Example:
        >>> from freescale.balancer import greedy_batch_size
        >>> session = torch.tensor([7, 8, 7, 9])
        >>> lengths = torch.tensor([3, 4, 3, 1])
        >>> world = WorldSamples(2, torch.tensor([0, 0, 1, 1]), lengths, gathered={"session": session})
        >>> keep_together(greedy_batch_size, "session")(world)
        tensor([0, 1, 0, 1])
    """
    return KeepTogether(partitioner, column)


def _refuse_keep_together(partitioner: object, wrapper: str) -> None:
    if isinstance(partitioner, KeepTogether):
        raise ValueError(f"{wrapper} would split what keep_together keeps together: put keep_together outermost")


def _merge(world: WorldSamples, unit: Ints, cost: Cost) -> WorldSamples:
    """The world whose samples are units."""
    num_units = int(unit.max()) + 1 if len(unit) else 0
    index = torch.from_numpy(unit)

    def total(values: Tensor) -> Tensor:
        return torch.zeros(num_units, dtype=values.dtype).index_add_(0, index, values)

    by_unit = index.argsort(stable=True)
    first = by_unit[torch.bincount(index, minlength=num_units).cumsum(0) - torch.bincount(index, minlength=num_units)]
    costs = workload(cost, world).costs
    return WorldSamples(
        world_size=world.world_size,
        rank=_home_of_units(world, unit, num_units),
        uih_lengths=total(world.uih_lengths),
        num_candidates=total(world.num_candidates),
        candidate_lengths=world.candidate_lengths_of(by_unit),
        payload_bytes=total(world.payload_bytes),
        seconds=world.seconds,
        seconds_step=world.seconds_step,
        measured=world.measured,
        gathered={name: column[first] for name, column in world.gathered.items()},
        first_rank=world.first_rank,
        cost=torch.from_numpy(np.bincount(unit, weights=costs, minlength=num_units).astype(np.float64)),
    )


def _home_of_units(world: WorldSamples, unit: Ints, num_units: int) -> Tensor:
    """Rank with most bytes of each unit; the lowest of several. Shape [num_units]."""
    pairs, pair = np.unique(unit * world.world_size + world.rank.numpy(), return_inverse=True)
    size = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(size, pair.reshape(-1), world.payload_bytes.numpy())
    pair_unit, pair_rank = np.divmod(pairs, world.world_size)
    order = np.lexsort((pair_rank, -size, pair_unit))
    home = np.zeros(num_units, dtype=np.int64)
    home[pair_unit[order][::-1]] = pair_rank[order][::-1]
    return torch.from_numpy(home)
