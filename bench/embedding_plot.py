"""Draws what bench.embedding measured, as the paper's Figure 9: exposed traffic over lengths and collision ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("--plot and --results need matplotlib: pip install matplotlib") from error

from .embedding_report import TITLES

if TYPE_CHECKING:
    from .embedding_report import Report
    from .embedding_settings import Cell

_PARTS = {"ids": "#9a9a9a", "rows": "#2f6fb0", "gradients": "#c8553d"}


def draw(report: Report, path: Path) -> None:
    """Write a picture: one row of panels a link, over lengths as bars by kind, over collision ratios as lines.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    links = report.links()
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure = Figure(figsize=(13, 3.8 * len(links)), layout="constrained")
        panels = figure.subplots(len(links), 2, squeeze=False, width_ratios=(3, 2))
        for (bars, lines), link in zip(panels, links, strict=True):
            cells = [cell for cell in report.cells(link) if cell.recurring == "spread"]
            first = cells[0]
            same = [cell for cell in cells if cell.num_tables == first.num_tables]
            _draw_cuts(bars, report, link, sorted((c for c in same if c.ratio == first.ratio), key=lambda c: c.cut))
            _draw_ratios(lines, report, link, sorted((c for c in same if c.cut == first.cut), key=lambda c: c.ratio))
            bars.set_title(f"{link}, {100 * first.ratio:g} % of distinct rows collide", loc="left")
            lines.set_title(f"{link}, histories cut at {first.cut:,}", loc="left")
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


def _draw_cuts(axes: Any, report: Report, link: str, cells: Sequence[Cell]) -> None:
    names = [name for name in TITLES if any(name in report.contenders(link, cell) for cell in cells)]
    width = 0.85 / max(len(names), 1)
    ticks, labels = [], []
    for place, cell in enumerate(cells):
        for number, name in enumerate(names):
            if name not in report.contenders(link, cell):
                continue
            found, bottom = report.measured(link, cell, name), 0.0
            at = place + (number - (len(names) - 1) / 2) * width
            for part, colour in _PARTS.items():
                height = found.exposed.get(part, 0.0)
                axes.bar(at, height, 0.9 * width, bottom, color=colour, label=part)
                bottom += height
            axes.text(at, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=7)
            ticks.append(at)
            labels.append(f"{TITLES[name]}")
        axes.text(place, 1.0, f"cut {cell.cut:,}", transform=axes.get_xaxis_transform(), ha="center", va="top")
    axes.set_xticks(ticks, labels, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("exposed embedding traffic, ms a step")
    axes.margins(y=0.15)
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(shown.values(), shown.keys(), fontsize="small")


def _draw_ratios(axes: Any, report: Report, link: str, cells: Sequence[Cell]) -> None:
    for name, title in TITLES.items():
        shown = [cell for cell in cells if name in report.contenders(link, cell)]
        values = [report.measured(link, cell, name).exposed_ms for cell in shown]
        if values:
            axes.plot([100 * cell.ratio for cell in shown], values, marker="o", label=title)
    axes.set_xlabel("distinct rows that collide, %")
    axes.set_ylabel("exposed, ms a step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
