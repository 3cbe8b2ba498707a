"""What a contender of bench.embedding took in a workload: medians over launches, traffic by group (section 5.2)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

GROUPS = {
    "ids": ("ids", "masks"),
    "rows": ("rows", "early rows", "late rows"),
    "gradients": ("gradients", "urgent gradients", "deferred gradients"),
    "dense": ("dense",),
}
"""Kinds of traffic, as the paper's Figure 9 puts them together; the dense part's gradients are no embedding traffic."""


@dataclass(frozen=True)
class Measured:
    """One contender in one cell over one link.

    Attributes:
        step_ms: Median over launches of the slowest rank's median step.
        host_ms: The same of the host's time for a step.
        spread_ms: Smallest and largest of the launches' medians.
        parts: Milliseconds of `StepTimes`, by name: mean over ranks, median over launches; empty without a trace.
        exposed: Exposed milliseconds by group of `GROUPS`, and "other".
        moving: The part of it in which data moves, rather than waits for another rank; empty where that is not known.
        total: Milliseconds of traffic by the same.
        memory_bytes: What tables and optimizers take, and what a step takes on top of that; the largest rank.
    """

    step_ms: float
    host_ms: float
    spread_ms: tuple[float, float]
    parts: dict[str, float]
    exposed: dict[str, float]
    moving: dict[str, float]
    total: dict[str, float]
    memory_bytes: tuple[int, int]

    @property
    def exposed_ms(self) -> float:
        """Exposed embedding traffic."""
        return _of_embeddings(self.exposed)

    @property
    def moving_ms(self) -> float | None:
        """The part of it in which data moves; None where that is not known."""
        return _of_embeddings(self.moving) if self.moving else None


def by_launch(records: Sequence[dict[str, Any]], field: str) -> list[float]:
    """For each launch the slowest rank's median over all its steps."""
    steps: dict[int, dict[int, list[float]]] = {}
    for each in records:
        steps.setdefault(each["launch"], {}).setdefault(each["rank"], []).extend(each[field])
    return [max(map(statistics.median, ranks.values())) for ranks in steps.values()]


def middle(traced: Sequence[dict[str, Any]], read: Callable[[dict[str, Any]], float]) -> float:
    """Median over launches of the ranks' mean of what is read from the times of a trace."""
    launches: dict[int, list[float]] = {}
    for each in traced:
        launches.setdefault(each["launch"], []).append(read(each["times"]))
    return statistics.median(map(statistics.fmean, launches.values()))


def traffic(traced: Sequence[dict[str, Any]], field: str) -> dict[str, float]:
    """A field of `Traffic` by group of `GROUPS`, and "other"; nothing without a trace."""
    if not traced:
        return {}
    known = {kind for kinds in GROUPS.values() for kind in kinds}

    def total(times: dict[str, Any], kinds: Iterable[str]) -> float:
        return float(sum(times["traffic"][kind][field] for kind in kinds if kind in times["traffic"]))

    found = {group: middle(traced, partial(total, kinds=kinds)) for group, kinds in GROUPS.items()}
    found["other"] = middle(traced, lambda times: total(times, set(times["traffic"]) - known))
    return found


def knows_moving(traced: Sequence[dict[str, Any]]) -> bool:
    """Whether all traces were read beside those of other ranks; results of earlier versions were not."""
    return all(each["times"].get("exposed_moving_ms") is not None for each in traced)


def _of_embeddings(of_group: Mapping[str, float]) -> float:
    return sum(value for group, value in of_group.items() if group not in ("dense", "other"))
