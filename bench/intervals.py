"""Spans of time: joined, cut, taken away from each other, added up; for what a trace says of a step (section 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch or overlap; empty ones vanish.

    Example:
        >>> union([(5, 6), (0, 2), (1, 3), (4, 4)])
        [(0, 3), (5, 6)]
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What is left of some intervals without others; both sorted and disjoint, as `union` gives them.

    Example:
        >>> subtract([(0, 10), (20, 30)], [(2, 3), (5, 25)])
        [(0, 2), (3, 5), (25, 30)]
    """
    left, first = [], 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def clip(intervals: Iterable[Interval], low: float, high: float) -> list[Interval]:
    """Cut intervals to a window.

    Example:
        >>> clip([(0, 2), (3, 9)], 1, 5)
        [(1, 2), (3, 5)]
    """
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def ends(intervals: Iterable[Interval], lengths: Sequence[float]) -> list[Interval]:
    """The end of each interval, as long as said.

    Args:
        intervals: In any order.
        lengths: Of the last one first; those before what is said of stay whole, as do shorter ones.

    Returns:
        Of the last one first.

    Example:
        >>> ends([(0, 9), (10, 14), (20, 29)], [2, 5])
        [(27, 29), (10, 14), (0, 9)]
    """
    pairs = zip_longest(reversed(list(intervals)), lengths)
    return [
        (span[0] if said is None else max(span[0], span[1] - said), span[1]) for span, said in pairs if span is not None
    ]


def length(intervals: Iterable[Interval]) -> float:
    """Add up disjoint intervals."""
    return sum(end - start for start, end in intervals)
