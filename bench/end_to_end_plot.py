"""Draws what bench.end_to_end measured, as the upper half of the paper's Figure 11: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .end_to_end_report import Key, Row
from .end_to_end_settings import CONTENDERS, Cell
from .pictures import COMPUTING_NEXT, GAPS, WAITING_FOR_DATA, WAITING_FOR_RANKS, picture

_PARTS = {
    "computing": COMPUTING_NEXT,
    "waiting for ranks that compute longer": WAITING_FOR_RANKS,
    "waiting for data": WAITING_FOR_DATA,
    "copies, side streams, gaps": GAPS,
}


def draw(found: Mapping[Key, Row], path: Path) -> None:
    """Write a picture: a column of panels a link, a row a workload, one bar a contender, of the step when traced.

    Straggling is known step by step; the rest of what a rank waits for counts as waiting for data.

    Raises:
        ValueError: Nothing was traced, or the file cannot be written.
    """
    traced = {key: row for key, row in found.items() if row.traced}
    if not traced:
        raise ValueError("nothing was traced, so there is nothing to draw")
    links = list(dict.fromkeys(link for link, _, _ in traced))
    cells = sorted({cell for _, cell, _ in traced}, key=lambda cell: (cell.even, cell.cut, cell.batch_size))
    names = [name for name in CONTENDERS if any(name == key[2] for key in traced)]
    height = (0.28 * len(names) + 0.9) * len(cells) + 0.9
    with picture(path, 5.2 * len(links) + 2.2, height, "Where the time of a training step goes") as figure:
        panels = figure.subplots(len(cells), len(links), squeeze=False, sharex="row", sharey=True)
        for line, cell in zip(panels, cells, strict=True):
            for axes, link in zip(line, links, strict=True):
                _draw_cell(axes, traced, link, cell, names)
                axes.set_title(f"{link}: {cell.title}", fontsize="medium")
        for axes in panels[-1]:
            axes.set_xlabel("bars: milliseconds a step under the profiler\nfigures: milliseconds a step without it")
        handles, labels = max(
            (axes.get_legend_handles_labels() for axes in panels.flat), key=lambda found: len(found[0])
        )
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _draw_cell(axes: Any, traced: Mapping[Key, Row], link: str, cell: Cell, names: Sequence[str]) -> None:
    there = [(at, traced[link, cell, name]) for at, name in enumerate(names) if (link, cell, name) in traced]
    left = [0.0] * len(there)
    for part, colour in _PARTS.items():
        widths = [parts(row)[part] for _, row in there]
        axes.barh([at for at, _ in there], widths, 0.75, left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for (at, row), end in zip(there, left, strict=True):
        axes.text(end, at, f" {row.step:.1f}", va="center", fontsize="small")
    for at, name in enumerate(names):
        if (link, cell, name) not in traced:
            axes.text(0, at, " not measured", va="center", fontsize="small", color="0.4")
    axes.set_yticks(range(len(names)), [CONTENDERS[name] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max([axes.get_xlim()[1], *(1.13 * end for end in left)]))
    axes.grid(visible=False, axis="y")


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of a step's parts; together they are the step under the profiler."""
    straggling = min(row.straggling, row.waiting)
    values = (row.compute, straggling, row.waiting - straggling, row.bubble - row.waiting)
    return dict(zip(_PARTS, values, strict=True))
