"""Sums up the two runs of the demo and prints them side by side (paper, sections 2.2 and 5.1)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..balancer import straggler_percentage
from .tables import Table

WARM_UP_STEPS = 3
_EARLY_STEPS, _CLOSE, _ROUGH = 20, 1e-4, 2e-2  # of the comparison of losses
TITLES = {"as_loaded": "as loaded", "balanced": "balanced"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_ROWS = (
    ("tokens per rank and step", "{tokens_mean:,.0f}"),
    ("  least … most loaded rank", "{tokens_least:,.0f} … {tokens_most:,.0f}"),
    ("compute per rank and step", "{compute_ms:.1f} ms"),
    ("a step (its slowest rank)", "{step_ms:.1f} ms"),
    ("straggler percentage", "{straggler_percent:.1f} %"),
    ("samples/s of all ranks, at equal compute", "{samples_per_s:,.0f}"),
    ("trainer waited for loader, each rank", "{waited_s:.3f} s ({waited_percent:.2f} %)"),
    ("bytes shuffled per step, all ranks", "{shuffled_mb_per_step:.2f} MB ({shuffled_percent:.0f} %)"),
    ("loss, last five steps", "{final_loss:.4f}"),
)


def warm_up(num_steps: int) -> int:
    """Steps left out of the figures: `WARM_UP_STEPS`, but at least one step counts."""
    return min(WARM_UP_STEPS, num_steps - 1)


def compute_seconds(run: dict[str, Any]) -> Tensor:
    """Compute seconds of a run after warm-up. Shape [steps, world_size], float64."""
    return _measured(run, "compute")


def summarise(run: dict[str, Any]) -> dict[str, float]:
    """Boil a run down to figures, without the warm-up.

    Args:
        run: What `demo_rank.MEASURES` names, each a list of steps of lists of ranks.

    Returns:
        Figures by name; units are in the names. Seconds of a step are those of its slowest rank.
    """
    compute = compute_seconds(run)
    step_seconds = compute.amax(1).sum().item()
    tokens = _measured(run, "tokens")
    waited, wall = _measured(run, "waited").sum().item(), _measured(run, "wall").sum().item()
    sent, total = _measured(run, "bytes_sent"), _measured(run, "bytes_total")
    return {
        "tokens_mean": tokens.mean().item(),
        "tokens_least": tokens.amin(1).mean().item(),
        "tokens_most": tokens.amax(1).mean().item(),
        "compute_ms": 1e3 * compute.mean().item(),
        "step_ms": 1e3 * step_seconds / len(compute),
        "straggler_percent": straggler_percentage(compute),
        "samples_per_s": _measured(run, "samples").sum().item() / step_seconds,
        "waited_s": waited / compute.shape[1],
        "waited_percent": 100 * waited / wall,
        "wall_s": wall / compute.shape[1],
        "shuffled_mb_per_step": sent.sum().item() / len(compute) / 1e6,
        "shuffled_percent": 100 * sent.sum().item() / max(1.0, total[:, 0].sum().item()),
        "final_loss": sum(losses(run)[-5:]) / len(losses(run)[-5:]),
    }


def summarise_both(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Boil both runs down, with samples/s as if both had computed equally long.

    Both compute on the same samples with the same weights, so what differs in compute is noise of the measurement; a
    step of either is taken to be the mean compute of both and the run's own waiting on top.
    """
    figures = {name: summarise(run) for name, run in runs.items()}
    compute_s = sum(values["compute_ms"] for values in figures.values()) / len(figures) / 1e3
    for name, values in figures.items():
        samples = _measured(runs[name], "samples").sum(1).mean().item()
        values["samples_per_s"] = samples * (1 - values["straggler_percent"] / 100) / compute_s
    return figures


def losses(run: dict[str, Any]) -> list[float]:
    """Loss of every global batch, warm-up included."""
    return [ranks[0] for ranks in run["loss"]]


def largest_difference(runs: dict[str, Any]) -> float:
    """Tell how far the loss curves are apart where they are furthest; NaN if a loss is."""
    pairs = zip(losses(runs["as_loaded"]), losses(runs["balanced"]), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def difference(runs: dict[str, Any]) -> str | None:
    """Say where the two runs did not train on the same thing; None if they did.

    Samples and tokens of every global batch must be equal. Losses differ by rounding, since sums go in another order,
    and training makes such differences grow: from 1e-8 to 3e-3 in 60 steps was seen at a higher learning rate. So
    losses must agree closely in the first steps, where a wrong scale would show, and roughly afterwards.
    """
    for name in ("samples", "tokens"):
        loaded, balanced = (torch.tensor(runs[run][name]).sum(1) for run in ("as_loaded", "balanced"))
        if not torch.equal(loaded, balanced):
            step = int((loaded != balanced).nonzero()[0])
            return f"step {step} had {balanced[step]:.0f} {name} instead of {loaded[step]:.0f}"
    pairs = zip(losses(runs["as_loaded"]), losses(runs["balanced"]), strict=True)
    for step, (before, after) in enumerate(pairs):
        if not abs(before - after) <= (_CLOSE if step < _EARLY_STEPS else _ROUGH) * max(1.0, abs(before)):
            return f"the loss of step {step} was {after:.5f} instead of {before:.5f}"
    return None


def result(runs: dict[str, Any]) -> Table:
    """Put the figures of both runs side by side."""
    figures = summarise_both(runs)
    num_steps, world_size = compute_seconds(runs["balanced"]).shape
    table = Table(f"{world_size} ranks, {num_steps} steps after warm-up", ["", *(TITLES[name] for name in figures)])
    for label, form in _ROWS:
        table.add(label, *(form.format(**values) for values in figures.values()))
    return table


def curves(runs: dict[str, Any]) -> str:
    """Draw the loss curves as lines of text, with what lies between them."""
    both = [loss for run in runs.values() for loss in losses(run)]
    lines = []
    for name, run in runs.items():
        curve = losses(run)
        drawn = sparkline(curve, min(both), max(both))
        lines.append(f"loss {TITLES[name]:<9}  {curve[0]:.3f} {drawn} {curve[-1]:.3f}")
    apart = f"largest difference between the curves: {largest_difference(runs):.1e}"
    return "\n".join([*lines, apart])


def verdict(runs: dict[str, Any]) -> str:
    """Say in one sentence what was gained."""
    figures = summarise_both(runs)
    before, after = figures["as_loaded"], figures["balanced"]
    faster = after["samples_per_s"] / before["samples_per_s"]
    return (
        f"Balanced, ranks wait {after['straggler_percent']:.1f} % of a step instead of "
        f"{before['straggler_percent']:.1f} %, and train {faster:.2f} times as many samples a second."
    )


def method(runs: dict[str, Any]) -> str:
    """Say what was measured and what was computed from it."""
    num_steps, world_size = compute_seconds(runs["balanced"]).shape
    num_cores = len(os.sched_getaffinity(0))
    return (
        f"Measured, over the {num_steps} steps after warm-up: CPU seconds of each rank's training thread in forward, "
        f"backward and optimizer, since ranks may share cores ({num_cores} cores here, {world_size} ranks); seconds in "
        "next(loader) by the wall clock, as the ranks ran here: the sum over all steps, a mean over the ranks, and as "
        "a share of all wall time. The least and the most loaded rank are those of each step, in the mean over the "
        "steps. Computed: a step lasts as long as its slowest rank, as if each rank had a core of its own; the others "
        "wait for the difference. Samples/s: both runs compute the same, so the difference in compute is noise; they "
        "follow from the mean compute of both and each run's own waiting. Gradients are averaged outside these times."
    )


def sparkline(values: Sequence[float], low: float, high: float, width: int = 48) -> str:
    """Draw a curve in one line of text, `width` characters or one a value.

    Example:
        >>> sparkline([3.0, 2.0, 1.0], 1.0, 3.0)
        '█▅▁'
    """
    bins = min(width, len(values))
    edges = [round(i * len(values) / bins) for i in range(bins + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, max(0, round(7.4 * (m - low) / span)))] for m in means if math.isfinite(m))


def _measured(run: dict[str, Any], name: str) -> Tensor:
    values = torch.tensor(run[name], dtype=torch.float64)
    return values[warm_up(len(values)) :]
