"""Draws two steps of a trace of bench.simulate, rank under rank: where the bubble is, and that it goes (Figure 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pictures import COMPUTING, GAPS, ROWS, WAITING_FOR_DATA, WAITING_FOR_RANKS, Line2D, picture
from .simulate_schedule import BACKGROUND, COMPUTE, HOST, TRANSFER, WAIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    COMPUTE: (COMPUTING, "computing"),
    WAIT: (WAITING_FOR_RANKS, "bubble: waits for slower ranks"),
    TRANSFER: (WAITING_FOR_DATA, "bubble: waits for data"),
    HOST: (GAPS, "bubble: host, gaps between kernels"),
    BACKGROUND: (ROWS, "on the way, hidden behind computing"),
}
_FIRST, _STEPS = 1, 2  # the first step has no step before it, so nothing was made ready
_Spans = list[tuple[float, float, str]]


def draw_steps(found: Mapping[str, Any], shown: Sequence[str], path: Path) -> None:
    """Write a picture of two steps of some processes of a trace, one under the other on one scale.

    Args:
        found: What `trace` of simulate_trace made.
        shown: Names of its processes, without what says that they are simulated.
        path: File to write.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    numbers = {e["args"]["name"].removesuffix(" (simulated)"): e["pid"] for e in _of(found, "process_name")}
    drawn = {name: _rows_of(found, numbers[name]) for name in shown}
    longest = max(length for _, length in drawn.values())
    height = 1.6 + sum(0.6 + 0.28 * len(rows) for rows, _ in drawn.values())
    with picture(path, 13, height, "Two training steps, simulated: where ranks wait, and what is left of it") as figure:
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, (rows, length)) in zip(panels, drawn.items(), strict=True):
            _draw(axes, rows)
            axes.axvline(length, color="black", linewidth=1)
            axes.set_title(f"{name}: two steps in {length:.0f} ms", fontsize="medium")
        panels[-1].set_xlim(0, 1.01 * longest)
        panels[-1].set_xlabel("milliseconds")
        lines = [Line2D([], [], color=colour, linewidth=8) for colour, _ in _COLOURS.values()]
        names = [name for _, name in _COLOURS.values()]
        figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)


def _of(found: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["name"] == name]


def _rows_of(found: Mapping[str, Any], pid: int) -> tuple[dict[str, _Spans], float]:
    """What each rank does in two steps, in milliseconds from their beginning, and how long they last."""
    steps = [e for e in found["traceEvents"] if e["pid"] == pid and e.get("cat") == "step"]
    first, last = steps[min(_FIRST, len(steps) - 1)], steps[min(_FIRST + _STEPS, len(steps)) - 1]
    begin, end = first["ts"], last["ts"] + last["dur"]
    threads = {e["tid"]: e["args"]["name"] for e in _of(found, "thread_name") if e["pid"] == pid}
    rows: dict[str, _Spans] = {name: [] for name in threads.values() if name.startswith("rank ")}
    for event in found["traceEvents"]:
        if event["pid"] != pid or event.get("cat") not in _COLOURS:
            continue
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if stop > start:
            rows[threads[event["tid"]]].append(((start - begin) / 1e3, (stop - start) / 1e3, event["cat"]))
    used = {name: spans for name, spans in rows.items() if spans or "network" not in name}
    return used, (end - begin) / 1e3


def _draw(axes: Axes, rows: Mapping[str, _Spans]) -> None:
    for place, spans in enumerate(rows.values()):
        for start, duration, kind in spans:
            low, high = (-0.45, 0.35) if kind == BACKGROUND else (-0.4, 0.8)  # thin, and near its rank
            axes.broken_barh([(start, duration)], (place + low, high), color=_COLOURS[kind][0], linewidth=0)
    axes.set_yticks(range(len(rows)), [name.replace(", network behind it", "’s network") for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
