"""Draws what bench.collisions counted, as the paper's Figure 3: collision ratio over lengths, batch sizes and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pictures import Line2D, count_axis, picture

if TYPE_CHECKING:
    from .collisions import Outcome

_LABELS = {"cut": "longest history, ids", "batch size": "samples a rank", "ranks": "ranks"}
_STYLES: dict[str, tuple[Any, str]] = {
    "rows": ("-", "of distinct rows"),
    "requests": ("--", "of requests: a row that one rank asks for"),
    "occurrences": (":", "of ids, repeats included"),
}


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a picture: one panel for each setting that varies, one colour a source.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    varied = list(dict.fromkeys(outcome.varied for outcome in outcomes))
    sources = list(dict.fromkeys(outcome.source for outcome in outcomes))
    title = "Collisions: how much of a global batch the next one asks for again"
    with picture(path, max(9, 4.6 * len(varied)), 4.7 + 0.25 * len(sources), title) as figure:
        panels = figure.subplots(1, len(varied), sharey=True, squeeze=False)[0]
        for axes, setting in zip(panels, varied, strict=True):
            for number, source in enumerate(sources):
                shown = [o for o in outcomes if o.varied == setting and o.source == source]
                for field, (style, _) in _STYLES.items():
                    values = [100 * o.mean(field) for o in shown]
                    axes.plot([o.value for o in shown], values, style, marker="o", color=f"C{number}")
            count_axis(axes, sorted({o.value for o in outcomes if o.varied == setting}), _LABELS[setting])
            axes.set_ylim(0, 104)
        panels[0].set_ylabel("also in the next batch, %")
        colours = [Line2D([], [], color=f"C{number}", lw=4, label=source) for number, source in enumerate(sources)]
        styles = [Line2D([], [], linestyle=style, color="black", label=label) for style, label in _STYLES.values()]
        figure.legend(handles=colours, loc="outside lower left", fontsize="small")
        figure.legend(handles=styles, loc="outside lower right", fontsize="small")
