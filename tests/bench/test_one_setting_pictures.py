"""Pictures of a single setting: bars with their values, since lines of one point each would hide behind each other."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

from freescale.bench import virtual_plot
from freescale.bench.pictures import Figure, named_bars
from freescale.bench.virtual_study import Outcome, Point

ONE = Outcome(21000, 32, 64, "as loaded", 4, 29.4, 28.0, 31.0, 0.63, 10.0, 14.0)


def size_of(png: Path) -> tuple[int, int]:
    """Width and height that a PNG says it has."""
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


def test_each_bar_has_its_name_and_value_and_the_first_is_on_top() -> None:
    axes = Figure().subplots()
    named_bars(axes, {"as loaded": 29.4, "FBS": 10.27, "mine": 0.0, "many": 12345.0}, "waiting, %")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["as loaded", "FBS", "mine", "many"]
    assert [text.get_text() for text in axes.texts] == [" 29.4", " 10.3", " 0", " 12,345"]
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert len({bar.get_facecolor() for bar in axes.patches}) == 4


def test_virtual_ranks_of_one_setting_are_bars_and_of_several_are_lines(tmp_path: Path) -> None:
    outcomes = [replace(ONE, partitioner=name) for name in ("as loaded", "FBS", "VBS", "greedy")]
    base = Point(21000, 32, 64)
    virtual_plot.draw(outcomes, base, tmp_path / "one.png", "lognormal")
    virtual_plot.draw([*outcomes, replace(ONE, world_size=8)], base, tmp_path / "two.png", "lognormal")
    assert size_of(tmp_path / "one.png") == (1680, 504)
    assert size_of(tmp_path / "two.png") == (1680, 960)
