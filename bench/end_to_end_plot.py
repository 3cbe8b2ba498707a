"""Draws what bench.end_to_end measured, as the upper half of the paper's Figure 11: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("--results needs matplotlib: pip install matplotlib") from error

from .end_to_end_report import Key, Row
from .end_to_end_settings import CONTENDERS, Cell

_PARTS = {
    "computing": "#c9d3dc",
    "waiting for ranks that compute longer": "#c8553d",
    "waiting for data": "#2f6fb0",
    "copies, side streams, gaps": "#9a9a9a",
}


def draw(found: Mapping[Key, Row], path: Path) -> None:
    """Write a picture: for each link and workload one bar a contender, of the step under the profiler.

    Straggling is known step by step; the rest of what a rank waits for counts as waiting for data.

    Raises:
        ValueError: Nothing was traced, or the file cannot be written.
    """
    traced = {key: row for key, row in found.items() if row.traced}
    if not traced:
        raise ValueError("nothing was traced, so there is nothing to draw")
    panels = list(dict.fromkeys((link, cell) for link, cell, _ in traced))
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "font.size": 8}):
        figure = Figure(figsize=(4.6 * columns + 1.5, 2.6 * lines + 0.6), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for place, (link, cell) in zip(axes, panels, strict=False):
            _draw_cell(place, traced, link, cell)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


def _draw_cell(axes: Any, traced: Mapping[Key, Row], link: str, cell: Cell) -> None:
    names = [name for name in CONTENDERS if (link, cell, name) in traced]
    left = [0.0] * len(names)
    for part, colour in _PARTS.items():
        widths = [parts(traced[link, cell, name])[part] for name in names]
        axes.barh(range(len(names)), widths, 0.7, left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for at, (name, end) in enumerate(zip(names, left, strict=True)):
        axes.text(end, at, f" {traced[link, cell, name].step:.1f}", va="center")
    axes.set_yticks(range(len(names)), [CONTENDERS[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left))
    axes.set_title(f"{link}: {cell.title}", loc="left")
    axes.set_xlabel("milliseconds a step")


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of a step's parts; together they are the step under the profiler."""
    straggling = min(row.straggling, row.waiting)
    values = (row.compute, straggling, row.waiting - straggling, row.bubble - row.waiting)
    return dict(zip(_PARTS, values, strict=True))
