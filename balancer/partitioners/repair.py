"""Moves samples off ranks that exceed a budget (for `capped`; beyond the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from .workload import Floats, Ints


@dataclass(frozen=True, eq=False)
class Budget:
    """A limit a rank.

    Attributes:
        what: Name of the unit, for messages.
        most: Most of it that a rank may hold.
        sizes: How much of it each sample holds. Shape [N], int64.
    """

    what: str
    most: int
    sizes: Ints


def repair(owner: Ints, budgets: Sequence[Budget], world_size: int) -> Ints:
    """Give a plan within all budgets, and the same plan if it is within them.

    Loops over the samples that have to move, and over nothing else, unless all have to be placed anew.

    Args:
        owner: Owner rank of each sample. Shape [N].
        budgets: At least one.
        world_size: Number of ranks.

    Returns:
        Owner rank of each sample. Shape [N].

    Raises:
        ValueError: A sample or the sum of samples exceeds a budget, or no plan was found.
    """
    _refuse_infeasible(budgets, world_size)
    shares = np.stack([budget.sizes / budget.most for budget in budgets], axis=1)
    sizes = np.stack([budget.sizes for budget in budgets], axis=1)
    most = np.array([budget.most for budget in budgets], dtype=np.int64)
    loads = np.zeros((world_size, len(budgets)), dtype=np.int64)
    np.add.at(loads, owner, sizes)
    over = np.flatnonzero((loads > most).any(axis=1))
    if len(over) == 0:
        return owner.copy()
    result = owner.copy()
    evicted: list[int] = []
    for rank in over.tolist():
        evicted += _evict(np.flatnonzero(owner == rank), sizes, shares, loads[rank], most)
    for movable in (np.array(evicted), np.arange(len(owner))):
        if _place(result, movable, sizes, shares, loads, most):
            return result
        loads = np.zeros_like(loads)
    needed = ", ".join(
        f"{int(b.sizes.sum())} {b.what} of at most {b.most} x {world_size} = {b.most * world_size}" for b in budgets
    )
    raise ValueError(f"found no plan within the budget: {needed}, largest sample {int(sizes[:, 0].max())}")


def _refuse_infeasible(budgets: Sequence[Budget], world_size: int) -> None:
    for budget in budgets:
        if len(budget.sizes) == 0:
            continue
        largest = int(budget.sizes.argmax())
        if budget.sizes[largest] > budget.most:
            raise ValueError(
                f"sample {largest} has {int(budget.sizes[largest])} {budget.what}; "
                f"max_{budget.what}={budget.most} allows no rank to hold it"
            )
        total = int(budget.sizes.sum())
        if total > budget.most * world_size:
            raise ValueError(
                f"the global batch has {total} {budget.what}; max_{budget.what}={budget.most} "
                f"allows {budget.most * world_size} on {world_size} ranks"
            )


def _evict(samples: Ints, sizes: Ints, shares: Floats, load: Ints, most: Ints) -> list[int]:
    """Samples that leave a rank: the smallest one that cures the excess, or else the largest, and so on.

    Takes them off `load`, which is the rank's row of the loads.
    """
    evicted: list[int] = []
    order = samples[np.lexsort((samples, shares[samples].max(axis=1)))]
    while (load > most).any():
        cures = (sizes[order] >= load - most).all(axis=1)
        chosen = int(cures.argmax()) if cures.any() else len(order) - 1
        load -= sizes[order[chosen]]
        evicted.append(int(order[chosen]))
        order = np.delete(order, chosen)
    return evicted


def _place(result: Ints, movable: Ints, sizes: Ints, shares: Floats, loads: Ints, most: Ints) -> bool:
    """Place samples, largest first, each on the rank with the most room; whether all fitted."""
    room = [(share, rank) for rank, share in enumerate((loads / most).max(axis=1).tolist())]
    heapify(room)
    for sample in movable[np.lexsort((movable, -shares[movable].max(axis=1)))].tolist():
        rank = room[0][1]
        loads[rank] += sizes[sample]
        if (loads[rank] > most).any():
            return False
        result[sample] = rank
        heapreplace(room, (float((loads[rank] / most).max()), rank))
    return True
