"""Draws what bench.partition measured: waiting and plan time of each partitioner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install matplotlib") from error

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
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(13, 5), layout="constrained")
        figure.suptitle(f"{title}: {ranks} ranks x {outcomes[0].batch_size} samples")
        evenness, times = figure.subplots(1, 2)
        panels = (
            (evenness, outcomes, "straggler_percentage", "mean waiting of the ranks, % of a step"),
            (times, planned, "plan_ms_median", "plan, ms"),
        )
        for axes, shown, field, label in panels:
            draw_panel = _draw_bars if len(sizes) == 1 else _draw_lines
            draw_panel(axes, _values(shown, field), label)
        if len(sizes) > 1:
            figure.legend(*evenness.get_legend_handles_labels(), loc="outside right center", fontsize="small")
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


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
        colour = "0.6" if name == "as loaded" else "C0"
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
    coloured = [name for name in values if name != "as loaded"]  # so that both panels agree
    for name, points in values.items():
        colour = "black" if name == "as loaded" else f"C{coloured.index(name)}"
        shown = [max(value, _LEAST) for value in points.values()]
        axes.plot(list(points), shown, marker="o", label=name, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for points in values.values() for size in points})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)
