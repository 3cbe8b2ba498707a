"""Writes simulated steps as a trace that Perfetto and chrome://tracing open: bubbles to look at (paper, Figure 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .simulate_schedule import BACKGROUND, Schedule

_MOST_RANKS = 16


def trace(schedules: Mapping[str, Schedule], title: str) -> dict[str, Any]:
    """Put schedules one under the other, a process for each, with two rows a rank.

    Args:
        schedules: By name of the technique, all of the same number of ranks.
        title: Said in the trace's metadata.

    Returns:
        A Chrome trace. Every process name says that it is simulated. Of many ranks 16 are shown: those that wait least
        and most among them.
    """
    events: list[dict[str, Any]] = []
    for process, (name, schedule) in enumerate(schedules.items(), 1):
        events.append(_meta("process_name", process, 0, f"{name} (simulated)"))
        order = {"args": {"sort_index": process}}
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, **order})
        for row, rank in enumerate(shown_ranks(schedule)):
            for offset, kind in enumerate(("", ", network behind it")):
                events.append(_meta("thread_name", process, 2 * row + offset + 1, f"rank {rank}{kind}"))
            events += _events(schedule, process, row, rank)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"simulated": "yes", "what": title}}


def shown_ranks(schedule: Schedule) -> list[int]:
    """All ranks if they are few, else some at equal distances in the order of how much they wait."""
    world_size = len(schedule.now)
    if world_size <= _MOST_RANKS:
        return list(range(world_size))
    order = np.argsort(schedule.spent("wait"), kind="stable")
    return sorted(int(order[i]) for i in np.linspace(0, world_size - 1, _MOST_RANKS).round().astype(int))


def _events(schedule: Schedule, process: int, row: int, rank: int) -> list[dict[str, Any]]:
    found = []
    for each in schedule.intervals:
        start, end = float(each.start[rank]), float(each.end[rank])
        if end > start:
            thread = 2 * row + (2 if each.kind == BACKGROUND else 1)
            times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
            found.append({"ph": "X", "name": each.name, "cat": each.kind, "pid": process, "tid": thread, **times})
    return found


def _meta(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def write_trace(path: Path, schedules: Mapping[str, Schedule], title: str) -> None:
    """Write a trace to a file.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(trace(schedules, title)) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
