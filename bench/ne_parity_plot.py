"""Draws the curves of bench.ne_parity, as the lower half of the paper's Figure 11, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("--plot and --results need matplotlib: pip install matplotlib") from error

_STYLES = ("-", "--", "-.", ":")


def draw(curves: Mapping[str, Sequence[float]], tolerance: float, path: Path) -> None:
    """Write a picture: curves on top of each other, and their distance from the first, logarithmic.

    Args:
        curves: Normalized entropy after each step, by title; the first is the reference.
        tolerance: Drawn as a line.
        path: File to write.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    reference = next(iter(curves.values()))
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure = Figure(figsize=(8, 6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for number, (title, values) in enumerate(curves.items()):
            steps = range(1, len(values) + 1)
            top.plot(steps, values, _STYLES[number % len(_STYLES)], label=title, linewidth=2)
            if number:
                apart = [max(abs(a - b), 1e-17) for a, b in zip(values, reference, strict=True)]
                bottom.semilogy(steps, apart, _STYLES[number % len(_STYLES)], color=f"C{number}")
        bottom.axhline(tolerance, color="0.4", linewidth=1)
        bottom.set(xlabel="step", ylabel="difference from the first (none: below)")
        top.set(ylabel="normalized entropy up to the step")
        top.legend()
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot write {path}: {error}") from error
