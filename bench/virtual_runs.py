"""Puts several runs of bench.virtual_ranks together: more points, and more global batches at each (Figures 2, 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arguments import input_files
from .virtual_study import Outcome, Point

_NEEDED = ("kind", "environment", "device", "model", "length_scale", "lengths", "fit", "outcomes")
_ALIKE = ("kind", "device", "model", "length_scale", "lengths")


def read_runs(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Outcome]]:
    """Read what `--json` of several runs wrote.

    Args:
        paths: Of the files. The first one's first point is the base.

    Returns:
        What they have in common, with the commands of all, and the fit of the run that timed most ranks; and the means
        over all their global batches.

    Raises:
        ValueError: A file is no such run, or was measured on another device, model or source of lengths.
    """
    runs = input_files(paths, _NEEDED)
    for path, run in zip(paths, runs, strict=True):
        for name in _ALIKE:
            if run[name] != runs[0][name] or run["kind"] != "virtual_ranks":
                raise ValueError(
                    f"--read must name runs of bench.virtual_ranks alike: {name} is {run[name]!r} in {path}, "
                    f"{runs[0][name]!r} in {paths[0]}"
                )
    most = max(runs, key=lambda run: sum(each["world_size"] * each["batches"] for each in run["outcomes"]))
    commands = "; ".join(run["environment"]["command"] for run in runs)
    about = runs[-1] | {"environment": runs[-1]["environment"] | {"command": commands}, "fit": most["fit"]}
    return about, pooled([Outcome(**each) for run in runs for each in run["outcomes"]])


def pooled(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Put outcomes of the same point and partitioner together, in the order of the points' first appearance."""
    by_point: dict[Point, dict[str, list[Outcome]]] = {}
    for each in outcomes:
        point = Point(each.max_length, each.batch_size, each.world_size)
        by_point.setdefault(point, {}).setdefault(each.partitioner, []).append(each)
    return [_together(same) for found in by_point.values() for same in found.values()]


def _together(same: Sequence[Outcome]) -> Outcome:
    batches = sum(each.batches for each in same)

    def mean(field: str) -> float:
        return float(sum(each.batches * getattr(each, field) for each in same)) / batches

    return Outcome(
        same[0].max_length,
        same[0].batch_size,
        same[0].world_size,
        same[0].partitioner,
        batches,
        straggler_percentage=mean("straggler_percentage"),
        straggler_percentage_least=min(each.straggler_percentage_least for each in same),
        straggler_percentage_most=max(each.straggler_percentage_most for each in same),
        sparsity=mean("sparsity"),
        mean_ms=mean("mean_ms"),
        step_ms=mean("step_ms"),
    )
