"""Spreads sorted samples over ranks of unequal speed, equal counts for all (beyond the paper)."""

from __future__ import annotations

import numpy as np

from .workload import Floats, Ints, Workload, costliest_first

_WARPS = np.exp2(np.linspace(-5, 5, 161))
_QUANTILES = 1024


def spread_by_speed(load: Workload) -> Ints:
    """Give each rank quantiles of the sorted costs, warped towards short samples for slow ranks, long for fast ones.

    Rank r would like the samples at quantiles `((k + 1/2) / count) ** warp[r]` of the costs, costliest first, where the
    warp is such that they add up to what its speed can take. The wishes of all ranks, sorted, meet the samples, sorted.
    That comes within one or two percent of even times, near enough for swaps. (Swaps alone leave one slow rank of 4,096
    with 9 percent: each of the others has room for too little of what it should give away.)

    Args:
        load: What to spread.

    Returns:
        Owner rank of each sample. Shape [N]. Counts differ by at most one; the fastest ranks take the ones left over.
    """
    num_samples, world_size = len(load.costs), len(load.speeds)
    counts = np.full(world_size, num_samples // world_size, dtype=np.int64)
    counts[np.argsort(-load.speeds, kind="stable")[: num_samples % world_size]] += 1
    order = costliest_first(load.costs)
    rank = np.repeat(np.arange(world_size), counts)
    turn = np.arange(num_samples) - np.repeat(np.cumsum(counts) - counts, counts)
    zigzag = np.where(turn % 2 == 0, rank, world_size - 1 - rank)
    middle = (turn + 0.5) / np.maximum(counts[rank], 1)
    wanted = np.maximum(load.ideal_time * load.speeds - load.overhead, 0.0)
    warp = _warps(load.costs[order], wanted / np.maximum(counts, 1))
    # Rounded to float32: the last bits of a power may differ between kinds of CPU, and a plan must not.
    places = (middle ** warp[rank]).astype(np.float32)
    owner = np.empty(num_samples, dtype=np.int64)
    owner[order] = rank[np.lexsort((zigzag, places))]
    return owner


def _warps(sorted_costs: Floats, wished: Floats) -> Floats:
    """The warp at which the mean cost over quantiles is what a rank wishes. Shape [world_size]."""
    if len(sorted_costs) == 0:
        return np.ones(len(wished))
    middle = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    places = (middle[None, :] ** _WARPS[:, None]).astype(np.float32) * len(sorted_costs)
    means = sorted_costs[np.minimum(places.astype(np.int64), len(sorted_costs) - 1)].mean(axis=1)
    return np.exp2(np.interp(wished, means, np.linspace(-5, 5, len(_WARPS))))
