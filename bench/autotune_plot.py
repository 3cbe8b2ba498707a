"""Draws what bench.autotune found: how uneven times stay when what was measured arrives late (section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import picture

if TYPE_CHECKING:
    from .autotune import Outcome

_LEAST = 1e-3  # of a percent: less is drawn as this
_TICKS = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Write a picture: a panel for each cost, a line a partitioner, over the steps that seconds arrive late.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    costs = list(dict.fromkeys(each.cost for each in outcomes))
    with picture(path, 5 * len(costs) + 3, 4.5, f"{title}: what settles, and what swings") as figure:
        panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
        for axes, cost in zip(panels, costs, strict=True):
            for name in dict.fromkeys(each.partitioner for each in outcomes):
                shown = [each for each in outcomes if (each.partitioner, each.cost) == (name, cost)]
                values = [100 * max(each.largest, _LEAST / 100) for each in shown]
                axes.plot([each.delay for each in shown], values, marker="o", label=name)
            axes.set_yscale("log")
            axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
            axes.minorticks_off()
            axes.set_xticks(sorted({each.delay for each in outcomes}))
            axes.set_xlabel("steps by which measured seconds arrive late")
            axes.set_title(f"a rank's seconds grow with {cost}")
        values = [100 * each.largest for each in outcomes]
        panels[0].set_ylim(max(_LEAST, min(values)) / 1.3, 1.3 * max(values))
        panels[0].set_ylabel("imbalance, %: the largest of the last 100 steps")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
