"""Writes simulated steps as a trace that Perfetto and chrome://tracing open: bubbles to look at (paper, Figure 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .simulate_schedule import BACKGROUND, COMPUTE, HOST, TRANSFER, WAIT, Schedule

_MOST_RANKS = 16
_SHOWN = {
    COMPUTE: "{}",
    WAIT: "bubble: waits for slower ranks, then {}",
    TRANSFER: "bubble: {} on the way",
    HOST: "bubble: {}",
    BACKGROUND: "{} on the way, hidden",
}
"""How events are called, so that one sees what is a bubble."""


def trace(schedules: Mapping[str, Schedule], title: str) -> dict[str, Any]:
    """Put schedules one under the other, a process for each, with a row of steps and two rows a rank.

    Args:
        schedules: By name of the technique, all of the same number of ranks.
        title: Said in the trace's metadata.

    Returns:
        A Chrome trace. Every process name says that it is simulated. Of many ranks 16 are shown: those that wait least
        and most among them.
    """
    events: list[dict[str, Any]] = []
    for process, (name, schedule) in enumerate(schedules.items(), 1):
        events += _row(process, 0, "process", f"{name} (simulated)", process)
        events += _row(process, 0, "thread", "steps", 0)
        for number, (start, end) in enumerate(pairwise([0.0, *schedule.step_ends])):
            events.append(_event(f"step {number}", "step", process, 0, start, end))
        for row, rank in enumerate(shown_ranks(schedule)):
            for offset, kind in enumerate(("", ", network behind it")):
                thread = 2 * row + offset + 1
                events += _row(process, thread, "thread", f"rank {rank}{kind}", thread)
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
            name = _SHOWN[each.kind].format(each.name.removeprefix("wait: "))
            found.append(_event(name, each.kind, process, thread, start, end))
    return found


def _event(name: str, kind: str, process: int, thread: int, start: float, end: float) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, **times}


def _row(process: int, thread: int, what: str, name: str, place: int) -> list[dict[str, Any]]:
    """Name a process or a thread, and say where it stands among the others."""
    same = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**same, "name": f"{what}_name", "args": {"name": name}},
        {**same, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def write_trace(path: Path, schedules: Mapping[str, Schedule], title: str) -> None:
    """Write a trace to a file.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(trace(schedules, title)) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
