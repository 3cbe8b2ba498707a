"""Puts simulated steps beside those that bench.end_to_end has measured, straggling included (paper, section 5.4)."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from .end_to_end_settings import Cell
from .simulate_comparison import LINKS, Comparison, bubble_ms
from .simulate_network import CLUSTERS
from .simulate_step import TECHNIQUES, Model, StepLoad, Technique, simulate
from .simulate_traffic import Traffic, expected_traffic, power_law_bins, with_collisions

_CONTENDERS = {
    "base": TECHNIQUES[0],
    "sdd": TECHNIQUES[1],
    "sdd_dedup": TECHNIQUES[2],
    "balanced": Technique("TorchRec, SDD, balanced", ids_ahead=True, balanced=True),
    "prioritized": next(t for t in TECHNIQUES if t.name == "prioritized only"),
    "freescale": next(t for t in TECHNIQUES if t.name == "FreeScale over NCCL"),
}
_PLACES, _EXPONENT = 2_500_000, 1.05  # of the ids of bench.end_to_end: a quarter of its rows at a time
_RATIO, _DIM = 0.05, 128
_REPEATS = 3


def compare_steps(found: list[dict[str, Any]]) -> list[Comparison]:
    """Simulate traced steps with the computing of each rank in each step as measured; of several launches the last.

    Args:
        found: Records of bench.end_to_end.
    """
    traces: dict[tuple[str, Cell, str], dict[int, dict[str, Any]]] = {}
    items: dict[tuple[str, Cell], dict[int, float]] = {}
    timed: dict[tuple[str, Cell, str], dict[int, float]] = {}
    for each in found:
        if each["kind"] == "trace" and "times" in each:
            key = (each["link"], Cell(**each["cell"]), each["contender"])
            traces.setdefault(key, {})[each["rank"]] = each["times"]
        if each["kind"] == "measurement":
            key = (each["link"], Cell(**each["cell"]), each["contender"])
            timed.setdefault(key, {})[each["rank"]] = fmean(each["step_ms"])
        if each["kind"] == "workload":
            items.setdefault((each["link"], Cell(**each["cell"])), {})[each["rank"]] = fmean(each["ids_of_steps"])
    world_size = 1 + max((each["rank"] for each in found if "rank" in each), default=0)
    return [
        _compare(key, times, items[key[:2]], max(timed[key].values()))
        for key, times in traces.items()
        if len(times) == world_size == len(items.get(key[:2], {})) and key[2] in _CONTENDERS and not key[1].even
        if key in timed
    ]


def _compare(
    key: tuple[str, Cell, str], times: dict[int, dict[str, Any]], items: dict[int, float], timed_ms: float
) -> Comparison:
    link, cell, contender = key
    world_size, technique = len(times), _CONTENDERS[contender]
    computing = np.array([times[rank]["compute_by_step"] for rank in range(world_size)]).T / 1e3  # [steps, ranks]
    traffic = _traffic(np.array([items[rank] for rank in range(world_size)]), technique.balanced)
    steps = [StepLoad(each, traffic, np.zeros(world_size), 1) for each in computing] * _REPEATS
    cluster = replace(CLUSTERS[LINKS[link]], **({} if link == "sockets" else {"gpus_per_host": world_size}))
    simulated, _ = simulate(technique, steps, cluster, Model(row_bytes=4 * _DIM, contention=0.0))
    compute_ms, traced_ms = (fmean(each[name] for each in times.values()) for name in ("compute_ms", "bubble_ms"))
    measured_ms = bubble_ms(timed_ms, compute_ms, traced_ms)
    return Comparison(link, cell.title, technique.name, world_size, compute_ms, measured_ms, simulated.bubble_ms)


def _traffic(items: np.ndarray[Any, np.dtype[np.float64]], balanced: bool) -> Traffic:
    """Rows as bench.end_to_end draws them; balanced ranks have about as many ids each."""
    even = np.full_like(items, items.mean()) if balanced else items
    total = float(items.sum())
    return with_collisions(expected_traffic(even, total, total, power_law_bins(_PLACES, _EXPONENT)), _RATIO)
