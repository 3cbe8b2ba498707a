"""Draws the curves of bench.ne_parity, as the lower half of the paper's Figure 11, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .pictures import picture

_STYLES = (("-", "black"), ("--", "#d62728"), ("-.", "#9467bd"), (":", "#1f77b4"))  # as elsewhere, by technique
_EQUAL = 1e-17  # drawn where there is no difference at all


def draw(curves: Mapping[str, Sequence[float]], tolerance: float, path: Path) -> None:
    """Write a picture: curves on top of each other, and their distance from the first, logarithmic.

    Args:
        curves: Normalized entropy after each step, by title; the first is the reference.
        tolerance: Drawn as a line.
        path: File to write.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    (first, reference), *_ = curves.items()
    with picture(path, 9, 7, "The same training with and without balancing and prioritizing") as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for number, (title, values) in enumerate(curves.items()):
            style, colour = _STYLES[number % len(_STYLES)]
            steps = range(1, len(values) + 1)
            top.plot(steps, values, style, label=title, linewidth=2 + 1.5 * (number == 0), color=colour)
            if number:
                apart = [max(abs(a - b), _EQUAL) for a, b in zip(values, reference, strict=True)]
                bottom.semilogy(steps, apart, style, color=colour, label=title)
        bottom.axhline(tolerance, color="0.4", linewidth=1)
        bottom.text(1, tolerance, f"allowed: {tolerance:g}", va="bottom", fontsize="small")
        if bottom.get_ylim()[0] < 10 * _EQUAL:
            bottom.text(1, 1.5 * _EQUAL, "no difference at all", va="bottom", fontsize="small")
        bottom.set_ylim(None, 100 * tolerance)
        bottom.set(xlabel="training step", ylabel=f"distance from\n“{first}”")
        top.set(ylabel="normalized entropy up to the step (lower is better)")
        top.legend()
