"""Draws what bench.packing measured: rates as a share of a plain copy's, over the number of ranks (section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .pictures import count_axis, picture

if TYPE_CHECKING:
    from .packing import Outcome

_WAYS = (
    ("pack_share", "packed", "#1f77b4"),
    ("unpack_share", "unpacked", "#ff7f0e"),
    ("cat_share", "torch.cat", "black"),
    ("fbgemm_share", "FBGEMM", "#2ca02c"),
)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a picture: a panel for each batch, a line a way.

    Raises:
        ValueError: The file cannot be written, or its ending names no picture format.
    """
    batches = list(dict.fromkeys((o.mean_length, o.num_samples, o.columns) for o in outcomes))
    title = "Packing samples into messages: rate beside a plain copy of as many bytes"
    with picture(path, 3.4 * len(batches) + 2, 4.2, title) as figure:
        panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
        for axes, (mean_length, num_samples, columns) in zip(panels, batches, strict=True):
            shown = [
                o for o in outcomes if (o.mean_length, o.num_samples, o.columns) == (mean_length, num_samples, columns)
            ]
            for field, label, colour in _WAYS:
                points = [(o.destinations, share) for o in shown if (share := getattr(o, field)) is not None]
                xs, ys = [x for x, _ in points], [100 * y for _, y in points]
                axes.plot(xs, ys, marker="o", label=label, color=colour)
            axes.axhline(100, color="0.6", linestyle="--", label="plain copy")
            count_axis(axes, sorted({o.destinations for o in outcomes}), "ranks that samples go to")
            axes.set_title(f"{num_samples:,} samples of {mean_length:,} items", fontsize="medium")
        shares = [share for o in outcomes for field, _, _ in _WAYS if (share := getattr(o, field)) is not None]
        panels[0].set_ylim(0, 110 * max([1.0, *shares]))
        panels[0].set_ylabel("rate, % of a plain copy's")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
