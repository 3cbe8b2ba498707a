"""Draws what bench.virtual_ranks measured, one panel an axis, as Figures 2 and 8 of the paper do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import colour_of, count_axis, named_bars, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .virtual_study import Outcome, Point

_AXES = (("max_length", "longest history, items"), ("batch_size", "samples a rank loads"), ("world_size", "ranks"))
_LEAST = 0.02  # percent: less is drawn as this
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_FIRST = ("as loaded", "FBS", "VBS", "greedy", "greedy, measured cost model")


def draw(outcomes: Sequence[Outcome], base: Point, path: Path, title: str) -> None:
    """Write a picture: above straggler percentage of all partitioners, below sparsity; one column an axis.

    Where a single setting was measured, both are bars.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    if len({(o.max_length, o.batch_size, o.world_size) for o in outcomes}) == 1:
        _draw_one_setting(outcomes, path, title)
        return
    around = f"{title}\nvirtual ranks around {base} (longest history / samples a rank / ranks)"
    with picture(path, 14, 8, around) as figure:
        panels = figure.subplots(2, 3, sharey="row")
        for column, (field, label) in enumerate(_AXES):
            shown = [o for o in outcomes if _on_axis(o, base, field)]
            _draw_lines(panels[0][column], shown, field, "straggler_percentage", 1.0)
            _draw_lines(panels[1][column], [o for o in shown if _pads(o)], field, "sparsity", 100.0)
            panels[1][column].set_xlabel(label)
        panels[0][0].set_yscale("log")
        panels[0][0].set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        panels[0][0].minorticks_off()
        values = [max(o.straggler_percentage, _LEAST) for o in outcomes]
        panels[0][0].set_ylim(min(values) / 1.5, max(values) * 1.5)
        panels[1][0].set_ylim(0, 100)
        panels[0][0].set_ylabel("waiting for the slowest rank, % of a step")
        panels[1][0].set_ylabel("sparsity: padding in a batch, %")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def _draw_one_setting(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    at = outcomes[0]
    setting = f"{at.world_size} ranks x {at.batch_size} samples, histories of up to {at.max_length:,} items"
    with picture(path, 14, 4.2, f"{title}\n{setting}") as figure:
        waiting, padding = figure.subplots(1, 2, width_ratios=[3, 2])
        shown = {o.partitioner: o.straggler_percentage for o in outcomes}
        named_bars(waiting, shown, "waiting for the slowest rank, % of a step")
        named_bars(padding, {o.partitioner: 100 * o.sparsity for o in outcomes if _pads(o)}, "padding in a batch, %")
        waiting.set_title("How long do ranks wait?")
        padding.set_title("How much would be padding?")
        padding.set_xlim(0, 100)


def _on_axis(outcome: Outcome, base: Point, field: str) -> bool:
    return all(getattr(outcome, name) == getattr(base, name) for name, _ in _AXES if name != field)


def _pads(outcome: Outcome) -> bool:
    """Plans with another sparsity than the data's: the rest would hide behind each other."""
    return outcome.partitioner in ("as loaded", "FBS", "VBS")


def _draw_lines(axes: Axes, outcomes: Sequence[Outcome], field: str, value: str, factor: float) -> None:
    names = list(dict.fromkeys([*_FIRST, *(o.partitioner for o in outcomes)]))
    for name in names:
        points = sorted((getattr(o, field), factor * getattr(o, value)) for o in outcomes if o.partitioner == name)
        style = "--" if name.startswith("floor") or (name == "FBS" and value == "sparsity") else "-"
        ys = [max(y, _LEAST) for _, y in points]
        axes.plot([x for x, _ in points], ys, style, marker="o", label=name, color=colour_of(name, names))
    count_axis(axes, sorted({getattr(o, field) for o in outcomes}), "")
    axes.tick_params(axis="x", rotation=30 if field == "max_length" else 0)
    axes.margins(x=0.12)
