"""Puts simulated steps beside measured ones, before anything is extrapolated from them (paper, section 5.2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .embedding_report import Report
from .embedding_settings import Cell, Sizes
from .simulate_check_steps import compare_steps
from .simulate_comparison import LINKS, Comparison, bubble_ms
from .simulate_network import CLUSTERS, Cluster
from .simulate_step import TECHNIQUES, Model, StepLoad, Technique, simulate
from .simulate_traffic import Traffic

_CONTENDERS = {
    "base": "TorchRec",
    "sdd": "TorchRec, SDD",
    "sdd_dedup": "TorchRec, SDD, ids deduplicated",
    "prioritized": "prioritized only",
}
NO_SIZES = Sizes(batch_size=0, num_rows=0, dim=0, width=0, num_layers=0, median=0)  # what a report reads needs none
_STEPS = 6


def compare(path: Path) -> list[Comparison]:
    """Simulate what bench.embedding or bench.end_to_end has measured, with the computing that they found.

    Raises:
        ValueError: Not readable, or nothing in it was traced: bubbles are read from traces.
    """
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())["found"]
        if any("batch_size" in each.get("cell", {}) for each in found):
            compared = compare_steps(found)
        else:
            report = Report(NO_SIZES, found, [], [])
            cells = [(link, cell) for link in report.links() for cell in report.cells(link)]
            compared = [each for link, cell in cells for each in _cell(report, link, cell)]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        kinds = "bench.embedding or bench.end_to_end"
        raise ValueError(f"{path} is not what {kinds} writes: {type(error).__name__}: {error}") from error
    if not compared:
        raise ValueError(f"{path} has no traced step of {', '.join(_CONTENDERS)} to compare with")
    return compared


def _cell(report: Report, link: str, cell: Cell) -> list[Comparison]:
    load = next(iter(report.of_kind("workload", link=link, cell=vars(cell))), None)
    if load is None:
        return []
    world_size = len(load["tables"][0]["remote_requests"])
    cluster = replace(CLUSTERS[LINKS[link]], **({} if link == "sockets" else {"gpus_per_host": world_size}))
    compared = []
    for contender in report.contenders(link, cell):
        measured = report.measured(link, cell, contender)
        if contender in _CONTENDERS and measured.parts:
            technique = next(t for t in TECHNIQUES if t.name == _CONTENDERS[contender])
            compute_ms = measured.parts["compute_ms"]
            simulated = simulated_bubble_ms(technique, compute_ms, load, cluster)
            bubble = bubble_ms(measured.step_ms, compute_ms, measured.parts["bubble_ms"])
            compared.append(Comparison(link, cell.title, technique.name, world_size, compute_ms, bubble, simulated))
    return compared


def simulated_bubble_ms(technique: Technique, compute_ms: float, load: dict[str, Any], cluster: Cluster) -> float:
    """Bubble of a step whose computing is known.

    Args:
        technique: What the trainer does.
        compute_ms: Measured computing, with whatever slows it: nothing is added for contention.
        load: A record "workload" of bench.embedding: collisions of each table, and bytes of urgent traffic.
        cluster: What it ran on.
    """
    tables = load["tables"]
    world_size = len(tables[0]["remote_requests"])
    remote = sum(sum(each["remote_requests"]) for each in tables)
    dim = round(load["urgent_bytes"] * world_size / (8 * remote)) if remote else 128
    traffic = _traffic(tables, world_size)
    step = StepLoad(np.full(world_size, compute_ms / 1e3), traffic, np.zeros(world_size), 1)
    found, _ = simulate(technique, [step] * _STEPS, cluster, Model(row_bytes=4 * dim, contention=0.0))
    return found.bubble_ms


def _traffic(tables: Sequence[dict[str, Any]], world_size: int) -> Traffic:
    """Rows of all tables together, alike on all ranks, as bench.embedding makes them."""
    occurrences = sum(each["num_occurrences"] for each in tables) / world_size
    asked = sum(each["num_requests"] for each in tables) / world_size
    urgent = sum(each["requests"] * each["num_requests"] for each in tables) / world_size
    of = {"occurrences": occurrences, "asked": asked, "served": asked, "late": urgent, "late_served": urgent}
    of |= {"urgent": urgent, "urgent_served": urgent}
    return Traffic(**{name: np.full(world_size, float(value)) for name, value in of.items()}, real=True)
