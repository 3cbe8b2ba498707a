"""Draws what bench.partition measured: waiting and plan time of each partitioner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import colour_of, count_axis, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .partition import Outcome

_LEAST = 1e-3  # of a percent or a millisecond: less is drawn as this


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Write a picture: over world sizes as lines, for a single one as bars.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    sizes = list(dict.fromkeys(outcome.world_size for outcome in outcomes))
    ranks = ", ".join(f"{size:,}" for size in sizes)
    planned = [outcome for outcome in outcomes if outcome.partitioner != "as loaded"]  # there nothing is planned
    over = f"{title}: {ranks} ranks x {outcomes[0].batch_size} samples"
    with picture(path, 14, 5, over) as figure:
        evenness, times = figure.subplots(1, 2)
        panels = (
            (evenness, outcomes, "straggler_percentage", "mean waiting of the ranks, % of a step"),
            (times, planned, "plan_ms_median", "time to make a plan, ms"),
        )
        for axes, shown, field, label in panels:
            draw_panel = _draw_bars if len(sizes) == 1 else _draw_lines
            draw_panel(axes, _values(shown, field), label)
        evenness.set_title("How uneven are the plans?")
        times.set_title("How long does planning take?")
        if len(sizes) > 1:
            figure.legend(*evenness.get_legend_handles_labels(), loc="outside right center", fontsize="small")


def _values(outcomes: Sequence[Outcome], field: str) -> dict[str, dict[int, float]]:
    """For each partitioner the values over world sizes."""
    values: dict[str, dict[int, float]] = {}
    for outcome in outcomes:
        values.setdefault(outcome.partitioner, {})[outcome.world_size] = getattr(outcome, field)
    return values


def _draw_bars(axes: Axes, values: dict[str, dict[int, float]], label: str) -> None:
    """Draw one bar a partitioner, on a logarithmic axis; what is too small for it is written out."""
    for index, (name, points) in enumerate(values.items()):
        (value,) = points.values()
        colour = "black" if name == "as loaded" else colour_of(name, list(values))
        axes.barh(index, max(value, _LEAST), color=colour)  # at least the left edge: no bar
        written = f"{value:.2g}" if value >= _LEAST else "even"
        axes.text(max(value, _LEAST), index, f" {written}", va="center", fontsize="small")
    axes.set_xscale("log")
    largest = max(value for points in values.values() for value in points.values())
    axes.set_xlim(_LEAST, max(10 * largest, 10 * _LEAST))
    axes.set_xlabel(label)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()


def _draw_lines(axes: Axes, values: dict[str, dict[int, float]], label: str) -> None:
    """Draw one line a partitioner; a plan that is even lies on the lower edge."""
    names = list(dict.fromkeys(["as loaded", *values]))  # so that both panels agree
    for name, points in values.items():
        shown = [max(value, _LEAST) for value in points.values()]
        style = "--" if name.startswith("Karmarkar") else "-"  # for comparison
        axes.plot(list(points), shown, style, marker="o", label=name, color=colour_of(name, names))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    count_axis(axes, sorted({size for points in values.values() for size in points}), "ranks")
    axes.set_ylabel(label)
    if any(value <= _LEAST for points in values.values() for value in points.values()):
        axes.set_ylabel(f"{label} ({_LEAST:g}: that or less)")
