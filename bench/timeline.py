"""Draws what ranks do in a few steps before and after balancing, and the loss of both runs (paper, Figures 1 and 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..balancer import straggler_percentage
from .pictures import COMPUTING, COMPUTING_NEXT, WAITING_FOR_RANKS, picture

_INK = "#222222"


def draw_timelines(
    path: Path,
    seconds_before: Tensor,
    seconds_after: Tensor,
    losses: dict[str, list[float]],
    num_shown: int = 6,
    skipped: int = 0,
) -> None:
    """Write a picture: one row a rank, compute blue, waiting red, as loaded over balanced; losses below.

    A step starts when the slowest rank has finished the one before. The steps shown are those consecutive ones whose
    waiting and saving are closest to those of the whole run.

    Args:
        path: PNG file to write.
        seconds_before: Compute seconds as loaded. Shape [steps, world_size].
        seconds_after: The same, balanced.
        losses: For each run the loss of every step, those skipped too.
        num_shown: Steps to show.
        skipped: Steps before the first of `seconds_before`, for the numbers on the axes.
    """
    first = typical_window(seconds_before, seconds_after, num_shown)
    shown = slice(first, first + num_shown)
    with picture(path, 11, 9) as figure:
        before, after, loss = figure.subplots(3, 1, height_ratios=(3, 3, 2.2))
        for axes in (before, after, loss):
            axes.grid(visible=False)
        right, ends = (1e3 * each[shown].amax(1).sum().item() for each in (seconds_before, seconds_after))
        panels = ((before, "As the DataLoader gives the batches", seconds_before), (after, "Balanced", seconds_after))
        for axes, title, seconds in panels:
            _draw_ranks(axes, 1e3 * seconds[shown], skipped + first)
            axes.set_xlim(0, 1.12 * max(right, ends))  # one scale: a shorter step looks shorter
            axes.set_title(
                f"{title}: ranks wait {straggler_percentage(seconds):.1f} % of the time "
                f"({straggler_percentage(seconds[shown]):.1f} % in the steps shown)",
                fontweight="bold",
            )
        _mark_saving(after, ends, right)
        _draw_losses(loss, losses)
        _add_legend(figure)


def typical_window(before: Tensor, after: Tensor, num_shown: int) -> int:
    """First of the consecutive steps whose waiting, in both runs, and saving are closest to those of the whole run.

    Args:
        before: Compute seconds as loaded. Shape [steps, world_size].
        after: The same, balanced.
        num_shown: Steps in a window; with fewer steps than that, the window starts at 0.

    Example:
        >>> import torch
        >>> before = torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
        >>> typical_window(before, torch.full((4, 2), 1.25), 2)
        1
    """

    def figures(first: int, last: int) -> list[float]:
        shown, balanced = before[first:last], after[first:last]
        saved = 100 * (1 - (balanced.amax(1).sum() / shown.amax(1).sum()).item())
        return [straggler_percentage(shown), straggler_percentage(balanced), saved]

    overall = figures(0, len(before))
    windows = range(max(1, len(before) - num_shown + 1))
    return min(
        windows,
        key=lambda i: sum(abs(a - b) for a, b in zip(figures(i, i + num_shown), overall, strict=True)),
    )


def _draw_ranks(axes: Any, milliseconds: Tensor, first_step: int) -> None:
    """Draw bars for every rank and step. Milliseconds of shape [steps, world_size]."""
    num_steps, world_size = milliseconds.shape
    durations = milliseconds.amax(1)
    starts = durations.cumsum(0) - durations
    for rank in range(world_size):
        busy = milliseconds[:, rank]
        bars = list(zip(starts.tolist(), busy.tolist(), strict=True))
        idle = list(zip((starts + busy).tolist(), (durations - busy).tolist(), strict=True))
        colours = [COMPUTING if i % 2 == 0 else COMPUTING_NEXT for i in range(num_steps)]
        axes.broken_barh(bars, (rank - 0.36, 0.72), facecolors=colours)
        axes.broken_barh(idle, (rank - 0.36, 0.72), facecolors=WAITING_FOR_RANKS)
    for index, (start, duration) in enumerate(zip(starts.tolist(), durations.tolist(), strict=True)):
        axes.axvline(start + duration, color=_INK, linewidth=0.8)
        axes.text(start + duration / 2, -0.5, f"step {first_step + index}", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
    axes.set_ylim(world_size - 0.45, -0.95)
    axes.set_xlabel("milliseconds, each rank on a core of its own (measured in CPU time)")
    axes.spines[["top", "right"]].set_visible(False)


def _mark_saving(axes: Any, ends: float, ended: float) -> None:
    """Show how much sooner the steps shown are done; the words stand beside the arrow where that is short."""
    if ended <= ends:
        return
    axes.axvline(ended, color=_INK, linewidth=0.8, linestyle=":")
    middle = axes.get_ylim()[0] / 2 - 0.25
    axes.annotate("", (ends, middle), (ended, middle), arrowprops={"arrowstyle": "<->", "color": _INK})
    narrow = ended - ends < 0.15 * axes.get_xlim()[1]
    axes.text(
        1.01 * ended if narrow else (ends + ended) / 2,
        middle if narrow else middle - 0.1,
        f"{100 * (1 - ends / ended):.0f} % sooner\nin these steps",
        ha="left" if narrow else "center",
        va="center" if narrow else "bottom",
        fontsize=9,
    )


def _draw_losses(axes: Any, losses: dict[str, list[float]]) -> None:
    """Draw the curves over each other: the second is dashed, so that both show where they coincide."""
    styles = (("-", 3.5, COMPUTING_NEXT), ("--", 1.3, _INK))
    for (label, values), (style, width, colour) in zip(losses.items(), styles, strict=True):
        axes.plot(values, style, linewidth=width, color=colour, label=label)
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    axes.set_title(f"Loss of the global batch in both runs (largest difference {apart:.1e})", loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _add_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=COMPUTING, label="computing (shades tell steps apart)"),
        Patch(color=WAITING_FOR_RANKS, label="waiting for the slowest rank: the bubble"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
