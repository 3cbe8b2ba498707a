"""Launches that break off: what they left over is still measured, without what broke them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freescale.bench.embedding_launches import Launcher, left_over, run_all
from freescale.bench.embedding_settings import Cell, Pace, Settings, Sizes

SIZES = Sizes(batch_size=4, num_rows=4000, dim=8, width=16, num_layers=1, median=20.0)
PACE = Pace(warm_up=1, timed=2, rounds=1, traced=0, traced_ours=0, memory_steps=0)
CELLS = [Cell(20, 0.1), Cell(10, 0.1), Cell(5, 0.1)]


def settings_of(cells: list[Cell], contenders: list[str], *, check: bool = False) -> Settings:
    until = time.time() + 500.0
    return Settings("cpu", 2, "sockets", contenders, cells, SIZES, PACE, check, until)


def record(kind: str, cell: Cell, contender: str = "") -> dict[str, Any]:
    return {"kind": kind, "rank": 0, "cell": vars(cell), "contender": contender}


def begun(cell: Cell, *measured: str) -> list[dict[str, Any]]:
    """What rank 0 writes of a workload in which these contenders were timed."""
    return [record("begun", cell), record("workload", cell), *(record("measurement", cell, name) for name in measured)]


A, B, C = "base", "sdd", "prioritized"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([*begun(CELLS[0], A, B, C), *begun(CELLS[1], A)], [([1], [C]), ([2], [A, C, B])]),
        ([*begun(CELLS[0])], [([0], [B, C]), ([1, 2], [B, C, A])]),
        ([*begun(CELLS[0], A, B, C), *begun(CELLS[1], A, B)], [([2], [A, B, C])]),
        ([*begun(CELLS[0], A, B, C)], [([1, 2], [A, B, C])]),
        ([*begun(CELLS[0], A, B, C), record("begun", CELLS[1])], [([2], [A, B, C])]),
        ([*begun(CELLS[2], A, B, C)], []),
        ([record("built", CELLS[0], A)], [([0, 1, 2], [A, C])]),
        ([], []),
    ],
)
def test_what_broke_a_launch_is_left_out_and_the_rest_is_not(
    found: list[dict[str, Any]], expected: list[tuple[list[int], list[str]]]
) -> None:
    left: list[Any] = left_over(settings_of(CELLS, [A, B, C]), found)
    assert [(each.cells, each.contenders) for each in left] == [
        ([CELLS[number] for number in numbers], contenders) for numbers, contenders in expected
    ]


def test_after_a_check_that_broke_all_is_measured_without_it() -> None:
    settings = settings_of(CELLS, [A, B], check=True)
    assert left_over(settings, []) == [replace(settings, check=False)]


@pytest.mark.multirank
def test_a_workload_that_breaks_the_ranks_costs_no_other(tmp_path: Path) -> None:
    cells = [CELLS[0], Cell(20, 2.0), CELLS[1]]  # the second cannot be made
    launcher = Launcher("cpu", tmp_path)
    try:
        launcher.await_ready()
        (tmp_path / "first").mkdir()
        found, faults = run_all(launcher, settings_of(cells, ["synchronous", "prioritized"]), tmp_path / "first")
        assert launcher._process.poll() is None
        os.killpg(launcher._process.pid, signal.SIGKILL)  # as after a launch that hangs: the next starts it anew
        launcher._process.wait()
        (tmp_path / "second").mkdir()
        again, none = run_all(launcher, settings_of(CELLS[2:], ["synchronous"]), tmp_path / "second")
    finally:
        launcher.close()
    timed = [(each["cell"]["cut"], each["contender"]) for each in found if each["kind"] == "measurement"]
    names = ("synchronous", "prioritized")
    assert sorted(timed) == sorted((cut, name) for cut in (20, 10) for name in names for _ in range(2))
    (fault,) = faults
    assert "ratio must be from 0 to 1, got 2.0" in fault
    assert none == []
    assert [each["cell"]["cut"] for each in again if each["kind"] == "measurement"] == [5, 5]
