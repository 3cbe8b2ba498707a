"""Evens out a plan by swapping pairs of samples between heavy and light ranks (beyond the paper)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .workload import Floats, Ints, Workload

Bools = NDArray[np.bool_]


def even_out(owner: Ints, load: Workload, tolerance: float) -> Ints:
    """Swap pairs of samples until no rank is far over the ideal time, or no swap helps.

    In each round the k-th heaviest rank gives a sample to the k-th lightest and takes its smallest one. A heavy rank
    never falls below the ideal time and a light one never rises over the limit, so rounds never undo each other. Small
    samples come back, so few bytes move. Rounds are vectorised over ranks; their number does not grow with them.

    Args:
        owner: Owner rank of each sample. Shape [N]. Not changed.
        load: What to even out.
        tolerance: Share of the step that ranks may wait on average, in [0, 1).

    Returns:
        Owner rank of each sample; every rank has as many samples as before. Shape [N]. `owner` itself if it will do.
    """
    if len(owner) == 0 or len(load.speeds) == 1:
        return owner
    loads: Floats = np.bincount(owner, weights=load.costs, minlength=len(load.speeds)).astype(np.float64)
    average = load.ideal_time
    limit = average / (1 - tolerance)
    most = np.maximum.reduce((loads + load.overhead) / load.speeds)
    if most <= limit:
        return owner
    # Nothing is gained by going below the largest sample, which stays where it is.
    ideal = max(average, float(((load.costs + load.overhead) / load.speeds[owner]).max()))
    limit = max(ideal, limit)
    if most <= limit:
        return owner
    samples, costs = _rows_of_ranks(owner, load)
    for _ in range(64 + 8 * samples.shape[1]):
        times = (loads + load.overhead) / load.speeds
        heavy, light = _pairs(times, ideal, limit)
        if len(heavy) == 0:
            break
        most = np.minimum((times[heavy] - ideal) * load.speeds[heavy], (limit - times[light]) * load.speeds[light])
        given, taken, useful = _largest_that_fits(costs, heavy, light, most)
        if not useful.any():
            heavy, light, given, taken = _best_swap(costs, heavy[:1], light[:1], most[0])
            if len(heavy) == 0:
                break
        else:
            heavy, light, given, taken = heavy[useful], light[useful], given[useful], taken[useful]
        gain = costs[heavy, given] - costs[light, taken]
        loads[heavy] -= gain
        loads[light] += gain
        for matrix in (samples, costs):
            matrix[heavy, given], matrix[light, taken] = matrix[light, taken], matrix[heavy, given]
    result = np.empty_like(owner)
    rank, place = np.nonzero(samples >= 0)
    result[samples[rank, place]] = rank
    return result


def _rows_of_ranks(owner: Ints, load: Workload) -> tuple[Ints, Floats]:
    """One row a rank: its samples (-1 beyond) and their costs (infinite beyond)."""
    counts = np.bincount(owner, minlength=len(load.speeds))
    order = np.argsort(owner, kind="stable")
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    samples = np.full((len(counts), int(counts.max())), -1, dtype=np.int64)
    costs = np.full(samples.shape, np.inf)
    samples[owner[order], place] = order
    costs[owner[order], place] = load.costs[order]
    return samples, costs


def _pairs(times: Floats, ideal: float, limit: float) -> tuple[Ints, Ints]:
    """Ranks over the limit, heaviest first, each beside a rank below the ideal time, lightest first."""
    order = np.argsort(times, kind="stable")
    num_pairs = int(min((times > limit).sum(), (times < ideal).sum()))
    return order[::-1][:num_pairs], order[:num_pairs]


def _largest_that_fits(costs: Floats, heavy: Ints, light: Ints, most: Floats) -> tuple[Ints, Ints, Bools]:
    """For each pair the heavy rank's largest sample that gains at most `most` over the light rank's smallest one.

    Returns:
        Place of the heavy rank's sample, of the light rank's, and whether the swap helps. Each of shape [pairs].
    """
    taken = costs[light].argmin(axis=1)
    allowed = costs[light, taken] + most
    rows = costs[heavy]
    rows = np.where((rows <= allowed[:, None]) & np.isfinite(rows), rows, -1.0)
    given = rows.argmax(axis=1)
    return given, taken, rows[np.arange(len(given)), given] > costs[light, taken]


def _best_swap(costs: Floats, heavy: Ints, light: Ints, most: float) -> tuple[Ints, Ints, Ints, Ints]:
    """Search all pairs of samples of one heavy and one light rank; empty arrays when no swap helps."""
    nothing = np.empty(0, dtype=np.int64)
    ours, theirs = (costs[rank[0]][np.isfinite(costs[rank[0]])] for rank in (heavy, light))
    if len(theirs) == 0:
        return nothing, nothing, nothing, nothing
    order = np.argsort(theirs, kind="stable")
    place = np.minimum(np.searchsorted(theirs[order], ours - most, side="left"), len(theirs) - 1)
    gain = ours - theirs[order][place]
    useful = (gain > 0) & (gain <= most)
    if not useful.any():
        return nothing, nothing, nothing, nothing
    given = int(np.where(useful, gain, -1.0).argmax())
    return heavy, light, np.array([given]), order[place[given : given + 1]]
