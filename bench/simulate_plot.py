"""Draws what bench.simulate found over the number of ranks; every panel says that it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import colour_of, count_axis, named_bars, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .simulate import Row

_PANELS = (
    ("straggler_percentage", "waiting for slower ranks, % of a step"),
    ("exposed_ms", "exposed communication, ms a step"),
    ("bubble_ms", "bubble, ms a step"),
    ("samples_per_s", "samples a second, each rank"),
)
_LOGARITHMIC = ("exposed_ms", "bubble_ms")  # what is left is a small part of what was


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a picture: a line a technique, a row of panels a cluster.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    clusters = list(dict.fromkeys(row.cluster for row in rows))
    techniques = list(dict.fromkeys(row.technique for row in rows))
    sizes = sorted({row.world_size for row in rows})
    with picture(path, 17, 4.4 * len(clusters) + 1.0, f"Simulated, not measured: {title}") as figure:
        panels = figure.subplots(len(clusters), len(_PANELS), squeeze=False, sharey="row" if len(sizes) == 1 else False)
        for line, cluster in zip(panels, clusters, strict=True):
            for axes, (field, label) in zip(line, _PANELS, strict=True):
                chosen = [row for row in rows if row.cluster == cluster]
                if len(sizes) == 1:
                    named_bars(axes, {row.technique: _value(row, field) for row in chosen}, label)
                else:
                    _draw_lines(axes, chosen, field, label, techniques)
                ranks = f", {sizes[0]:,} ranks" if len(sizes) == 1 else ""
                axes.set_title(f"cluster {cluster} (simulated){ranks}", fontsize="medium")
        if len(sizes) > 1:
            lines = panels[0][0].get_legend_handles_labels()
            figure.legend(*lines, loc="outside lower center", ncols=7, frameon=False)


def _value(row: Row, field: str) -> float:
    value: float = getattr(row.simulated, field)
    return value / row.world_size if field == "samples_per_s" else value


def _draw_lines(axes: Axes, rows: Sequence[Row], field: str, label: str, techniques: list[str]) -> None:
    """Draw a line a technique over the number of ranks."""
    for technique in techniques:
        chosen = [row for row in rows if row.technique == technique]
        style = "--" if technique.endswith("over NCCL") else "-"  # often on top of the one without
        values = [_value(row, field) for row in chosen]
        colour = colour_of(technique, techniques)
        axes.plot([row.world_size for row in chosen], values, style, marker="o", label=technique, color=colour)
    count_axis(axes, sorted({row.world_size for row in rows}), "ranks")
    axes.tick_params(axis="x", rotation=45)
    if field in _LOGARITHMIC and any(_value(row, field) > 0 for row in rows):
        axes.set_yscale("log", subs=[2, 5])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 1e-9))
    axes.set_ylabel(label)
