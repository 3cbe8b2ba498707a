"""Karmarkar-Karp in plain Python: the reference that partitioners are compared with, not one to train with."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# A partial solution: (spread with a minus, tie-breaker, its sets from heaviest to lightest as (sum, samples)).
# Sets that are empty are left out at the end.
_Partial = tuple[float, int, list[tuple[float, list[int]]]]


def karmarkar_karp(costs: Sequence[float], world_size: int) -> list[int]:
    """Largest differencing method for `world_size` sets of any counts: the textbook's.

    Starts from one partial solution a sample, and keeps merging the two of the largest spread, the heaviest set of one
    with the lightest of the other.

    Args:
        costs: Cost of each sample. Length N.
        world_size: Number of sets.

    Returns:
        Set of each sample. Length N.

    Example:
        >>> karmarkar_karp([8, 7, 6, 5, 4], 2)
        [1, 0, 1, 0, 0]
    """
    return _merge_all([(-cost, i, [(cost, [i])]) for i, cost in enumerate(costs)], len(costs), world_size)


def karmarkar_karp_equal(costs: Sequence[float], world_size: int) -> list[int]:
    """Karmarkar-Karp for sets of equal counts, the variant that other balancers train with.

    Starts from rows of `world_size` samples of similar cost, one sample a set. When the number of samples is not a
    multiple of the world size, counts differ by at most one. Args and result as for `karmarkar_karp`.

    Example:
        >>> karmarkar_karp_equal([8, 7, 6, 5], 2)
        [0, 1, 1, 0]
    """
    order = sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))
    partials: list[_Partial] = []
    for start in range(0, len(order), world_size):
        sets = [(costs[sample], [sample]) for sample in order[start : start + world_size]]
        partials.append((_minus_spread(sets, world_size), start, sets))
    return _merge_all(partials, len(costs), world_size)


def _merge_all(heap: list[_Partial], num_samples: int, world_size: int) -> list[int]:
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge(first, second, world_size)
        heapq.heappush(heap, (_minus_spread(merged, world_size), number, merged))
    owner = [0] * num_samples
    for rank, (_, samples) in enumerate(heap[0][2] if heap else []):
        for sample in samples:
            owner[sample] = rank
    return owner


def _merge(
    first: list[tuple[float, list[int]]], second: list[tuple[float, list[int]]], world_size: int
) -> list[tuple[float, list[int]]]:
    """Join the i-th heaviest set of one with the i-th lightest of the other, empty ones included."""
    alone = world_size - len(second)
    merged = first[:alone]
    for (ours, our_samples), (theirs, their_samples) in zip(first[alone:], reversed(second), strict=False):
        our_samples.extend(their_samples)
        merged.append((ours + theirs, our_samples))
    merged += second[: world_size - max(len(first), alone)]
    merged.sort(key=_sum, reverse=True)
    return merged


def _sum(part: tuple[float, list[int]]) -> float:
    return part[0]


def _minus_spread(sets: list[tuple[float, list[int]]], world_size: int) -> float:
    return (sets[-1][0] if len(sets) == world_size else 0.0) - sets[0][0]
