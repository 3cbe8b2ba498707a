"""Draws what bench.simulate found over the number of ranks; every panel says that it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import colour_of, count_axis, picture

if TYPE_CHECKING:
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
        panels = figure.subplots(len(clusters), len(_PANELS), squeeze=False)
        for line, cluster in zip(panels, clusters, strict=True):
            for axes, (field, label) in zip(line, _PANELS, strict=True):
                for technique in techniques:
                    chosen = [r for r in rows if r.cluster == cluster and r.technique == technique]
                    share = [r.world_size if field == "samples_per_s" else 1 for r in chosen]
                    values = [getattr(r.simulated, field) / s for r, s in zip(chosen, share, strict=True)]
                    style = "--" if technique.endswith("over NCCL") else "-"  # often on top of the one without
                    colour = colour_of(technique, techniques)
                    axes.plot([r.world_size for r in chosen], values, style, marker="o", label=technique, color=colour)
                count_axis(axes, sizes, "ranks")
                axes.tick_params(axis="x", rotation=45)
                if field in _LOGARITHMIC and any(getattr(r.simulated, field) > 0 for r in rows):
                    axes.set_yscale("log")
                    axes.yaxis.set_major_formatter("{x:g}")
                else:
                    axes.set_ylim(0, None)
                axes.set_title(f"cluster {cluster} (simulated)", fontsize="medium")
                axes.set_ylabel(label)
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
