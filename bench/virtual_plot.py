"""Draws what bench.virtual_ranks measured, one panel an axis, as Figures 2 and 8 of the paper do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .virtual_study import Outcome, Point

_AXES = (("max_length", "longest history"), ("batch_size", "samples a rank loads"), ("world_size", "ranks"))
_LEAST = 0.02  # percent: less is drawn as this


def draw(outcomes: Sequence[Outcome], base: Point, path: Path, title: str) -> None:
    """Write a picture: above straggler percentage of all partitioners, below sparsity; one column an axis.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(14, 8), layout="constrained")
        figure.suptitle(f"{title}: virtual ranks around {base} (longest history / batch size / ranks)")
        panels = figure.subplots(2, 3)
        for column, (field, label) in enumerate(_AXES):
            shown = [o for o in outcomes if _on_axis(o, base, field)]
            _draw_lines(panels[0][column], shown, field, "straggler_percentage", 1.0)
            panels[0][column].set_yscale("log")
            panels[0][column].yaxis.set_major_formatter("{x:g}")
            panels[0][column].yaxis.set_minor_formatter("{x:g}")
            _draw_lines(panels[1][column], [o for o in shown if _pads(o)], field, "sparsity", 100.0)
            panels[1][column].set_ylim(0, 100)
            panels[1][column].set_xlabel(label)
        panels[0][0].set_ylabel("straggler percentage")
        panels[1][0].set_ylabel("sparsity, %")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


def _on_axis(outcome: Outcome, base: Point, field: str) -> bool:
    return all(getattr(outcome, name) == getattr(base, name) for name, _ in _AXES if name != field)


def _pads(outcome: Outcome) -> bool:
    """Plans with another sparsity than the data's: the rest would hide behind each other."""
    return outcome.partitioner in ("as loaded", "FBS", "VBS")


def _draw_lines(axes: Axes, outcomes: Sequence[Outcome], field: str, value: str, factor: float) -> None:
    names = ["as loaded", "FBS", "VBS"]
    names += [o.partitioner for o in outcomes if o.partitioner not in names]
    for index, name in enumerate(dict.fromkeys(names)):
        points = sorted((getattr(o, field), factor * getattr(o, value)) for o in outcomes if o.partitioner == name)
        style = "--" if name.startswith("floor") else "-"
        colour = {"as loaded": "black"}.get(name, "0.5" if style == "--" else f"C{index}")
        axes.plot(
            [x for x, _ in points], [max(y, _LEAST) for _, y in points], style, marker="o", label=name, color=colour
        )
    ticks = sorted({getattr(o, field) for o in outcomes})
    if field != "max_length":
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45 if field == "max_length" else 0)
    axes.xaxis.set_minor_locator(NullLocator())
