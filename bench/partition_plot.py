"""Draws what bench.partition measured: imbalance and plan time of each partitioner."""

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
    from .partition import Outcome


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Write a picture: over world sizes as lines, for a single one as bars.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    names = list(dict.fromkeys(outcome.partitioner for outcome in outcomes))
    sizes = list(dict.fromkeys(outcome.world_size for outcome in outcomes))
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(12, 5), layout="constrained")
        figure.suptitle(title)
        panels = zip(
            figure.subplots(1, 2), ("imbalance", "plan_ms_median"), ("max / mean - 1", "plan, ms"), strict=True
        )
        for axes, field, label in panels:
            for index, name in enumerate(names):
                if field == "plan_ms_median" and name == "as loaded":
                    continue  # nothing is planned
                points = {o.world_size: getattr(o, field) for o in outcomes if o.partitioner == name}
                values = [max(value, 1e-9) for value in points.values()]
                if len(sizes) == 1:
                    axes.barh(index, values[0], color=f"C{index}")
                else:
                    axes.plot(list(points), values, marker="o", label=name, color=f"C{index}")
            _label(axes, label, names, single=len(sizes) == 1)
        if len(sizes) > 1:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


def _label(axes: object, label: str, names: list[str], *, single: bool) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    if single:
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
    else:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
