"""Draws what bench.inspect found: lengths, waiting now and balanced, speed-up, collisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .pictures import count_axis, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .histories import Histories
    from .inspection import Finding


def draw(histories: Histories, findings: Sequence[Finding], max_length: int | None, path: Path) -> None:
    """Write a picture of four panels.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    with picture(path, 13, 8.5, f"{histories.title}: {len(histories.lengths):,} rows") as figure:
        lengths, waiting, speedup, colliding = figure.subplots(2, 2).flatten()
        _draw_lengths(lengths, histories, max_length)
        lengths.set_title("How long are the histories?")
        _draw_lines(waiting, findings, lambda f: f.waiting, "now", "-")
        _draw_lines(waiting, findings, lambda f: f.waiting_balanced, "balanced", "--")
        waiting.set_title("How long do ranks wait?")
        waiting.set_ylabel("waiting for the slowest rank, % of a step")
        _draw_lines(speedup, findings, lambda f: f.speedup, "time ~ items", "-")
        _draw_lines(speedup, findings, lambda f: f.speedup_squared, "time ~ length²", "--")
        speedup.set_title("How much faster is the computing part, balanced?")
        speedup.set_ylabel("speed-up (1: none)")
        colliding.set_title("How many rows recur in the next step?")
        if _draw_lines(colliding, findings, lambda f: f.collisions, "", "-"):
            colliding.set_ylim(0, 104)
            colliding.legend(frameon=False, fontsize="small", loc="lower right")
        else:
            colliding.text(0.5, 0.5, "not known: see the text", ha="center", transform=colliding.transAxes)
        colliding.set_ylabel("collisions, % of the rows a rank looks up")
        for axes in (waiting, speedup):
            axes.legend(frameon=False, fontsize="small")


def _draw_lengths(axes: Axes, histories: Histories, max_length: int | None) -> None:
    """Draw how many rows have which length; empty ones are counted at 1/2, where a logarithmic axis can show them."""
    lengths = histories.lengths if max_length is None else np.minimum(histories.lengths, max_length)
    most = max(2.0, float(lengths.max()))
    axes.hist(np.maximum(lengths, 0.5), bins=np.geomspace(0.5, most * 1.001, 50).tolist(), color="0.5")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("items in a history" + (" (0.5: empty)" if (lengths == 0).any() else ""))
    axes.set_ylabel("rows")


def _draw_lines(
    axes: Axes, findings: Sequence[Finding], value: Callable[[Finding], float | None], label: str, style: str
) -> bool:
    """Draw a value over ranks, one line a batch size. Returns whether there was anything to draw."""
    drawn = False
    for index, batch_size in enumerate(dict.fromkeys(f.batch_size for f in findings)):
        points = [(f.world_size, value(f)) for f in findings if f.batch_size == batch_size]
        known = sorted((x, y) for x, y in points if y is not None)
        drawn = drawn or bool(known)
        name = f"{batch_size} samples a rank{', ' if label else ''}{label}"
        axes.plot([x for x, _ in known], [y for _, y in known], style, marker="o", color=f"C{index}", label=name)
    count_axis(axes, sorted({f.world_size for f in findings}), "ranks")
    return drawn
