"""Draws what bench.kernels measured, as the paper's Figure 7: time over world size, one panel an operation."""

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
    from .kernel_report import Outcome


_NAMES = ("loop, cat", "loop, copies", "vectorised", "FBGEMM", "ours", "copy")


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
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(4.2 * len(operations), 4.2), layout="constrained")
        figure.suptitle(f"{rows} rows, {lengths} lengths, 16 samples a rank")
        panels = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
        for axes, operation in zip(panels, operations, strict=True):
            lines = {
                name: _line(shown, operation, name)
                for name in ("loop, cat", "loop, copies", "vectorised", "FBGEMM", "ours", "copy")
            }
            for name, line in lines.items():
                if line:
                    color = f"C{_NAMES.index(name)}"  # one for each way, also where a panel lacks some
                    axes.loglog(list(line), list(line.values()), marker="o", label=name, color=color, base=2)
            axes.set_title(operation)
            axes.set_xlabel("world size")
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:.0f}")
        panels[0].set_ylabel("ms")
        panels[-1].legend(fontsize="small")
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


def _line(outcomes: Sequence[Outcome], operation: str, name: str) -> dict[int, float]:
    line: dict[int, float] = {}
    for outcome in outcomes:
        if outcome.operation == operation and outcome.way.startswith(name) and outcome.ms is not None:
            line[outcome.world_size] = min(outcome.ms, line.get(outcome.world_size, outcome.ms))
    return line
