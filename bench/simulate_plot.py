"""Draws what bench.simulate found over the number of ranks; every panel says that it is simulated."""

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
    from .simulate import Row

_PANELS = (
    ("straggler_percentage", "straggler percentage"),
    ("exposed_ms", "exposed communication, ms a step"),
    ("bubble_ms", "bubble, ms a step"),
    ("samples_per_s", "samples a second and rank"),
)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a picture: a line a technique, a row of panels a cluster.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    clusters = list(dict.fromkeys(row.cluster for row in rows))
    techniques = list(dict.fromkeys(row.technique for row in rows))
    sizes = sorted({row.world_size for row in rows})
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(17, 4.6 * len(clusters) + 0.6), layout="constrained")
        figure.suptitle(f"Simulated, not measured: {title}")
        panels = figure.subplots(len(clusters), len(_PANELS), squeeze=False)
        for line, cluster in zip(panels, clusters, strict=True):
            for axes, (field, label) in zip(line, _PANELS, strict=True):
                for index, technique in enumerate(techniques):
                    chosen = [r for r in rows if r.cluster == cluster and r.technique == technique]
                    share = [r.world_size if field == "samples_per_s" else 1 for r in chosen]
                    values = [getattr(r.simulated, field) / s for r, s in zip(chosen, share, strict=True)]
                    colour = "black" if index == 0 else f"C{index}"
                    axes.plot([r.world_size for r in chosen], values, marker="o", label=technique, color=colour)
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
                axes.minorticks_off()
                axes.set_ylim(0, None)
                axes.set_xlabel("ranks")
                axes.set_title(f"{label} ({cluster}, simulated)", fontsize="medium")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        try:
            figure.savefig(path, dpi=110)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error
