"""Draws what bench.collisions counted, as the paper's Figure 3: collision ratio over lengths, batch sizes and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    from .collisions import Outcome

_LABELS = {"cut": "longest history, ids", "batch size": "samples a rank", "ranks": "ranks"}
_STYLES: dict[str, tuple[Any, str]] = {
    "rows": ("-", "distinct rows"),
    "requests": ("--", "requests"),
    "occurrences": (":", "ids"),
}


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a picture: one panel for each setting that varies, one colour a source.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    varied = list(dict.fromkeys(outcome.varied for outcome in outcomes))
    sources = list(dict.fromkeys(outcome.source for outcome in outcomes))
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(4.4 * len(varied), 4.6), layout="constrained")
        panels = figure.subplots(1, len(varied), sharey=True, squeeze=False)[0]
        for axes, setting in zip(panels, varied, strict=True):
            for number, source in enumerate(sources):
                shown = [o for o in outcomes if o.varied == setting and o.source == source]
                for field, (style, _) in _STYLES.items():
                    values = [100 * o.mean(field) for o in shown]
                    axes.plot([o.value for o in shown], values, style, marker="o", color=f"C{number}")
            axes.set_xlabel(_LABELS[setting])
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({o.value for o in outcomes if o.varied == setting}))
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
            axes.set_ylim(0, 100)
        panels[0].set_ylabel("also in the next batch, %")
        colours = [Line2D([], [], color=f"C{number}", lw=4, label=source) for number, source in enumerate(sources)]
        styles = [Line2D([], [], linestyle=style, color="black", label=label) for style, label in _STYLES.values()]
        figure.legend(handles=colours + styles, loc="outside lower left", ncols=2, fontsize="small")
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error
