"""Draws what bench.transport measured, as the paper's Figure 10: slowdown of compute, one panel a kind of traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install matplotlib") from error


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a picture: a group of bars for each workload, a bar for each way.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    kinds = [kind for kind in ("256 MB a step", "endless") if any(row["traffic"] == kind for row in rows)]
    places = list(dict.fromkeys((row["sequence"], row["hidden"]) for row in rows))
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "alone"]
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(max(7, 0.9 * len(places)), 3.6 * len(kinds)), layout="constrained")
        panels = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
        for axes, kind in zip(panels, kinds, strict=True):
            for number, way in enumerate(ways):
                at = {
                    (row["sequence"], row["hidden"]): row for row in rows if (row["traffic"], row["way"]) == (kind, way)
                }
                width = 0.8 / len(ways)
                shown = [(index, at[place]["slowdown"] * 100) for index, place in enumerate(places) if place in at]
                axes.bar([index + number * width for index, _ in shown], [y for _, y in shown], width, label=way)
            axes.set_title(f"compute beside traffic: {kind}")
            axes.set_ylabel("slower by %")
            axes.set_xticks(
                [index + 0.4 for index in range(len(places))], [f"{s}\n{h}" for s, h in places], fontsize="small"
            )
        panels[-1].set_xlabel("sequence length, hidden width")
        panels[0].legend(fontsize="small", ncols=4)
        try:
            figure.savefig(path, dpi=110)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error
