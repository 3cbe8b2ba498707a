"""Draws what bench.embedding measured, as the paper's Figure 9: exposed traffic over lengths and collision ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .embedding_report import TITLES
from .pictures import COLOURS, GRADIENTS, IDS, ROWS, picture

if TYPE_CHECKING:
    from .embedding_report import Report
    from .embedding_settings import Cell

_PARTS = {"ids": IDS, "rows": ROWS, "gradients": GRADIENTS}
_COLOURS = {
    "base": COLOURS["TorchRec"],
    "sdd": COLOURS["TorchRec, SDD"],
    "sdd_dedup": COLOURS["TorchRec, SDD, ids deduplicated"],
    "pec": COLOURS["TorchRec, PEC"],
    "synchronous": COLOURS["our tables, synchronous"],
    "prioritized": COLOURS["prioritized only"],
}
_SHORT = {name: title.replace(" ", "\n", 1).replace(" +", "\n+") for name, title in TITLES.items()}


def draw(report: Report, path: Path) -> None:
    """Write a picture: for each link bars over lengths, by kind of traffic; below, lines over collision ratios.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    links = report.links()
    varied = {link: cells for link in links if len(cells := report.series(link, "ratio")) > 1}
    columns = max(1, len(varied))
    layout: list[Any] = [[link] * columns for link in links]
    layout += [[f"ratios {link}" for link in varied]] if varied else []
    title = "Embedding traffic that is in the way of computing (exposed)"
    with picture(path, 14.5, 3.3 * len(layout) + 0.6, title) as figure:
        panels = figure.subplot_mosaic(layout)
        for link in links:
            cells = report.series(link, "cut")
            _draw_cuts(panels[link], report, link, cells)
            panels[link].set_title(f"over {link}, {100 * cells[0].ratio:g} % of distinct rows collide", pad=20)
        for link, cells in varied.items():
            _draw_ratios(panels[f"ratios {link}"], report, link, cells)
            panels[f"ratios {link}"].set_title(f"over {link}, histories cut at {cells[0].cut:,}")
        shown: dict[str, Any] = {}
        for axes in panels.values():
            shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=min(5, len(shown)))


def _draw_cuts(axes: Any, report: Report, link: str, cells: Sequence[Cell]) -> None:
    names = [name for name in TITLES if any(name in report.contenders(link, cell) for cell in cells)]
    width = 0.88 / max(len(names), 1)
    ticks, labels = [], []
    for place, cell in enumerate(cells):
        for number, name in enumerate(names):
            at, bottom = place + (number - (len(names) - 1) / 2) * width, 0.0
            ticks.append(at)
            labels.append(_SHORT[name])
            found = report.measured(link, cell, name) if name in report.contenders(link, cell) else None
            if found is None or not found.parts:
                axes.text(at, 0, "not\nmeasured", ha="center", va="bottom", fontsize=7, color="0.4")
                continue
            for part, colour in _PARTS.items():
                height = found.exposed.get(part, 0.0)
                axes.bar(at, height, 0.85 * width, bottom, color=colour, label=part)
                bottom += height
            axes.text(at, bottom, f"{bottom:.2g}" if bottom < 10 else f"{bottom:.0f}", ha="center", va="bottom")
        where = axes.get_xaxis_transform()
        axes.text(place, 1.02, f"cut at {cell.cut:,}", transform=where, ha="center", va="bottom", fontweight="bold")
    for place in range(1, len(cells)):
        axes.axvline(place - 0.5, color="0.7", linewidth=1)
    axes.set_xticks(ticks, labels, fontsize=8)
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("exposed, ms a step")
    axes.margins(y=0.15)


def _draw_ratios(axes: Any, report: Report, link: str, cells: Sequence[Cell]) -> None:
    for name, title in TITLES.items():
        shown = [cell for cell in cells if name in report.contenders(link, cell)]
        found = [(100 * cell.ratio, report.measured(link, cell, name)) for cell in shown]
        points = [(ratio, each.exposed_ms) for ratio, each in found if each.parts]
        if points:
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=title, color=_COLOURS[name])
    axes.set_xlabel("distinct rows that collide, %")
    axes.set_ylabel("exposed, ms a step")
    axes.set_ylim(bottom=0)
