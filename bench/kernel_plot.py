"""Draws what bench.kernels measured, as the paper's Figure 7: time over world size, one panel an operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import count_axis, picture

if TYPE_CHECKING:
    from .kernel_report import Outcome

_WAYS = {
    "loop, cat": ("PyTorch loop, one torch.cat", "#8c564b"),
    "loop, copies": ("PyTorch loop, copy by copy", "black"),
    "vectorised": ("vectorised PyTorch", "#ff7f0e"),
    "FBGEMM": ("FBGEMM", "#2ca02c"),
    "ours": ("ours", "#1f77b4"),
    "copy": ("plain copy of as many bytes", "0.6"),
}


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a picture of the first kind of rows and lengths that covers several world sizes.

    Raises:
        ValueError: Nothing to draw, or the file cannot be written, or its ending names no picture format.
    """
    rows, lengths = outcomes[0].rows, outcomes[0].lengths
    if scaled := [o.lengths for o in outcomes if not o.lengths.startswith("long")]:
        lengths = scaled[0]
    kinds = {o.rows for o in outcomes}
    rows = "int64" if "int64" in kinds else rows
    shown = [o for o in outcomes if (o.rows, o.lengths) == (rows, lengths) and o.correct]
    operations = list(dict.fromkeys(o.operation for o in shown))
    if not operations:
        raise ValueError(f"nothing to draw for {rows} rows and {lengths} lengths")
    title = f"Jagged operations: {rows} rows, {lengths} lengths, 16 samples a rank"
    with picture(path, 3.4 * len(operations) + 2.6, 4.2, title) as figure:
        panels = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
        for axes, operation in zip(panels, operations, strict=True):
            for name, (label, colour) in _WAYS.items():
                line = _line(shown, operation, name)
                style = "--" if name == "copy" else "-"
                axes.plot(list(line), list(line.values()), style, marker="o", label=label, color=colour)
            axes.set_title(operation)
            axes.set_yscale("log")
            count_axis(axes, sorted({o.world_size for o in shown}), "ranks")
            axes.tick_params(axis="x", rotation=45)
        panels[0].set_ylabel("time of one operation, ms")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")


def _line(outcomes: Sequence[Outcome], operation: str, name: str) -> dict[int, float]:
    line: dict[int, float] = {}
    for outcome in outcomes:
        if outcome.operation == operation and outcome.way.startswith(name) and outcome.ms is not None:
            line[outcome.world_size] = min(outcome.ms, line.get(outcome.world_size, outcome.ms))
    return dict(sorted(line.items()))
