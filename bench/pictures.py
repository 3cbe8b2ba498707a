"""What all pictures of this folder share: one look, one colour for each technique, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise ValueError("pictures (--plot, --results) need matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Figure", "Line2D"]

_LOOK: Any = {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.titlelocation": "left"}
_BALANCED, _PRIORITIZED, _EVERYTHING = "#d62728", "#9467bd", "#1f77b4"
COLOURS = {
    "TorchRec": "black",
    "TorchRec, SDD": "#ff7f0e",
    "TorchRec, SDD, ids deduplicated": "#2ca02c",
    "TorchRec, PEC": "#8c564b",
    "balanced only": _BALANCED,
    "prioritized only": _PRIORITIZED,
    "our tables, synchronous": "#e377c2",
    "FreeScale over NCCL": "#17becf",
    "FreeScale": _EVERYTHING,
    "as loaded": "black",
    "FBS": "#ff7f0e",
    "fixed_batch_size": "#ff7f0e",
    "VBS": "#2ca02c",
    "VariableBatchSize(1)": "#2ca02c",
    "greedy": _BALANCED,
    "greedy_batch_size": _BALANCED,
    "greedy, measured cost model": _EVERYTHING,
    "home_batch_size": _PRIORITIZED,
    "floor: identical batches": "0.55",
}
"""Of trainers, and of partitioners. What is in no picture with others may take any colour."""

COMPUTING, COMPUTING_NEXT = "#2f6fb0", "#7fb0de"  # two shades tell steps apart
WAITING_FOR_RANKS, WAITING_FOR_DATA, GAPS = "#e4572e", "#f2b134", "#b8b8b8"
IDS, ROWS, GRADIENTS = "#8a8a8a", "#2a9d8f", "#8d5a97"
_SPARE = ("#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f", "#1f77b4")


@contextmanager
def picture(path: Path, width: float, height: float, title: str = "") -> Iterator[Figure]:
    """Give a figure to draw on, of the look that all have, and write it afterwards.

    Args:
        path: File to write; its ending names the format.
        width: In inches.
        height: In inches.
        title: Over all panels.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle(title)
        yield figure
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error


def colour_of(name: str, others: list[str]) -> str:
    """The colour of a technique, the same in all pictures; of one that has none, a spare one by its place.

    Example:
        >>> colour_of("FBS", ["FBS"]), colour_of("mine", ["FBS", "mine"])
        ('#ff7f0e', '#8c564b')
    """
    unnamed = [each for each in others if each not in COLOURS]
    return COLOURS[name] if name in COLOURS else _SPARE[unnamed.index(name) % len(_SPARE)]


def count_axis(axes: Axes, values: list[int], label: str) -> None:
    """Make the x axis one of counts that double, with a tick at each of the values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label)


def named_bars(axes: Axes, values: Mapping[str, float], label: str) -> None:
    """Draw one bar a technique, with its value: for one setting lines would be dots that hide each other."""
    names = list(values)
    for place, (name, value) in enumerate(values.items()):
        axes.barh(place, value, color=colour_of(name, names))
        axes.text(value, place, f" {value:,.3g}" if value < 1000 else f" {value:,.0f}", va="center", fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max([*values.values(), 1e-9]))
    axes.set_xlabel(label)
