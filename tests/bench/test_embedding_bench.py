"""The command bench.embedding: a dry run of all of it without a GPU, its figures, and mistakes it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freescale.bench import embedding
from freescale.bench.embedding_report import Report, faults, line_through, notes, tables
from freescale.bench.embedding_settings import Cell, Sizes

SIZES = Sizes(8, 4000, 16, 64, 1, 30.0)


@pytest.mark.multirank
def test_a_dry_run_checks_and_times_all_contenders_and_writes_what_it_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, results = tmp_path / "found.json", tmp_path / "results"
    pace = ["--cuts", "20", "--ratios", "10", "--rounds", "1", "--timed", "3", "--warm-up", "4", "--memory-steps", "20"]
    files = ["--json", str(found), "--results", str(results)]
    status = embedding.main(["--device", "cpu", *pace, *files])
    said = capfd.readouterr()
    assert status == 0, said.out + said.err
    kept = json.loads(found.read_text())
    checked = {each["contender"]: each for r in kept["found"] if r["kind"] == "check" for each in r["results"]}
    assert set(checked) == {"base", "sdd", "prioritized"}
    assert all(checked["prioritized"][name] == 0 for name in ("first_weights", "last_weights", "last_loss"))
    assert 0 < checked["base"]["first_weights"] < 1e-6
    timed = [r["contender"] for r in kept["found"] if r["kind"] == "measurement" and r["rank"] == 1]
    assert timed == ["base", "sdd", "synchronous", "prioritized"]
    (workload,) = [r for r in kept["found"] if r["kind"] == "workload"]
    assert workload["tables"][0]["rows"] == pytest.approx(0.1, abs=0.01)
    page = next(results.glob("*-embedding-cpu.md")).read_text()
    assert "ours, prioritized" in page
    assert "PEC: skipped" in page
    assert "memory over 20 steps" in page
    both = tmp_path / "both.json"
    assert embedding.main(["--device", "cpu", "--read", str(found), str(found), "--json", str(both)]) == 0
    launches = [each["launch"] for each in json.loads(both.read_text())["found"] if each["kind"] == "check"]
    assert launches == [0, 0, 1, 1]


def record(kind: str, rank: int, launch: int = 0, link: str = "nvlink", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "link": link, "rank": rank, "launch": launch, **more}


def measured(
    contender: str, steps: list[list[float]], ratio: float = 0.05, exposed: float = 0.0, moving: float | None = None
) -> list[dict[str, Any]]:
    """Records of one contender, one list of steps a launch, rank 1 a millisecond slower; with a trace each."""
    same: dict[str, Any] = {"contender": contender, "cell": vars(Cell(8000, ratio))}
    found: list[dict[str, Any]] = []
    for launch, times in enumerate(steps):
        for rank in range(2):
            slower = [each + rank for each in times]
            found.append(record("measurement", rank, launch, step_ms=slower, host_ms=times, peak_bytes=10, **same))
            parts = dict.fromkeys(
                ("step_ms", "compute_ms", "bubble_ms", "exposed_ms", "side_ms", "copy_ms", "idle_ms"), 1.0
            )
            traffic = {
                "late rows": {"total_ms": 2 * exposed, "exposed_ms": exposed, "exposed_moving_ms": moving},
                "dense": {"total_ms": 9, "exposed_ms": 9, "exposed_moving_ms": 9},
            }
            wait = {"call": "cudaStreamSynchronize", "thread": "trainer", "where": "aten::item", "calls": 2, "ms": 0.5}
            trace = {
                **parts,
                "exposed_moving_ms": moving,
                "num_steps": 20,
                "traffic": traffic,
                "host_waits": [wait] if contender == "sdd" else [],
            }
            found.append(record("trace", rank, launch, times=trace, **same))
    return found


def test_what_waits_for_other_ranks_is_told_from_what_moves_where_that_is_known() -> None:
    ours = [each for i in range(4) for each in measured("prioritized", [[1]], i / 10, exposed=7.0 - i, moving=0.1 + i)]
    theirs = measured("sdd", [[1]], 0.0, exposed=2.0, moving=1.5) + measured("base", [[1]], 0.0, exposed=2.0)
    table = dict.fromkeys(("num_occurrences", "num_rows", "rows", "requests", "occurrences"), 1)
    cells = [vars(Cell(8000, i / 10)) for i in range(4)]
    workloads = [record("workload", 0, cell=c, urgent_bytes=i * 1e6, tables=[table]) for i, c in enumerate(cells)]
    report = Report(SIZES, ours + theirs + workloads, [], [])
    said = notes(report)
    compared = (
        "exposed embedding traffic 7.00 ms against SDD's 2.00 (of it moving 0.100 against 1.500, 1/15.0; the rest"
    )
    assert any(compared in line for line in said)
    fits = [line for line in said if "R²" in line]
    assert "exposes 7.00 ms + -1.000 ms" in fits[0]
    assert "exposes 0.10 ms + 1.000 ms" in fits[1]
    assert fits[1].endswith("R² 1.000 over 4 ratios, of what moves")
    rows = {row[0]: row[6:9] for row in next(t for t in tables(report) if "milliseconds" in t.title).rows}
    expected = {"TorchRec base": ("2.00", "-", "-"), "TorchRec SDD": ("2.00", "1.50", "0.50")}
    assert rows == {**expected, "ours, prioritized": ("7.00", "0.10", "6.90")}


def test_figures_are_medians_over_launches_of_the_slowest_rank() -> None:
    report = Report(SIZES, measured("sdd", [[1, 2, 30], [4, 5, 6], [7, 8, 9]], exposed=3.0), [], [])
    (cell,) = report.cells("nvlink")
    found = report.measured("nvlink", cell, "sdd")
    assert found.step_ms == 6
    assert list(found.spread_ms) == [3, 9]
    assert found.exposed_ms == 3
    assert found.exposed["dense"] == 9
    assert tables(report)[0].rows[0][0] == "TorchRec SDD"


def test_notes_compare_ours_with_the_best_and_name_waits() -> None:
    found = measured("sdd", [[10.0]], exposed=4.5) + measured("prioritized", [[9.0]], exposed=0.5)
    said = notes(Report(SIZES, found, [], []))
    assert any("ours takes 0.909 times the step of the best, TorchRec SDD" in line for line in said)
    assert any("exposed embedding traffic 0.50 ms against SDD's 4.50" in line for line in said)
    assert any("prioritized: synchronising runtime calls of the trainer in 20 steps: none" in line for line in said)
    assert any("SDD" in line and "2 a step, 0.50 ms: 2 cudaStreamSynchronize" in line for line in said)


def test_a_line_is_fitted_through_exposed_time_over_urgent_bytes() -> None:
    assert line_through([(0, 1), (1, 3), (2, 5), (3, 7)]) == (2.0, 1.0, 1.0)
    assert line_through([(0, 0), (1, 1), (2, 0)])[2] == pytest.approx(0)
    found: list[dict[str, Any]] = []
    for ratio in (0.0, 0.5, 1.0):
        found += measured("prioritized", [[9.0]], ratio, exposed=0.25 + 2 * ratio)
        found.append(record("workload", 0, cell=vars(Cell(8000, ratio)), urgent_bytes=1e6 * ratio, tables=[]))
    report = Report(SIZES, found, [], [])
    (line,) = [line for line in notes(report) if "R²" in line]
    assert "0.25 ms + 2.000 ms for each MB of urgent traffic, R² 1.000 over 3 ratios" in line


def test_cuts_and_ratios_of_several_runs_make_the_longest_rows() -> None:
    cells = [Cell(2000, 0.05), Cell(8000, 0.05), Cell(8000, 1.0), Cell(8000, 0.0), Cell(21000, 0.05)]
    cells += [Cell(9000, 0.05, num_tables=2), Cell(8000, 0.5, recurring="popular")]
    found = [record("measurement", 0, cell=vars(cell)) for cell in cells]
    report = Report(SIZES, found, [], [])
    assert [cell.cut for cell in report.series("nvlink", "cut")] == [2000, 8000, 21000]
    assert [cell.ratio for cell in report.series("nvlink", "ratio")] == [0.0, 0.05, 1.0]
    assert report.series("sockets", "ratio") == []


def test_weights_that_differ_are_a_fault() -> None:
    fields = ("first_weights", "last_weights", "first_loss", "last_loss")
    alike = {"contender": "sdd", **dict.fromkeys(fields, 1e-7)}
    assert faults(Report(SIZES, [record("check", 0, results=[alike])], [], [])) == []
    for other in ({**alike, "contender": "prioritized"}, {**alike, "first_weights": 1e-5}):
        (line,) = faults(Report(SIZES, [record("check", 0, results=[other])], [], []))
        assert "does not train as ours, synchronous, does" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "120"], "--ratios must be from 0 to 100"),
        (["--traced", "3"], "--traced must be at least 4"),
        (["--contenders", "sdd_dedup"], "sdd_dedup runs on GPUs only"),
        (["--pec-packages", "/nowhere"], "must be a folder with torchrec in it"),
        (["--read", "/nowhere.json"], "--read must name files that --json wrote, /nowhere.json is none"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert embedding.main(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_is_drawn_of_what_was_traced(tmp_path: Path) -> None:
    from freescale.bench.embedding_plot import draw

    found = [*measured("sdd", [[10.0]], exposed=4.5), *measured("prioritized", [[9.0]], exposed=0.5)]
    path = tmp_path / "found.png"
    draw(Report(SIZES, found, [], []), path)
    assert path.stat().st_size > 10_000
    with pytest.raises(ValueError, match="cannot write"):
        draw(Report(SIZES, found, [], []), tmp_path / "absent" / "found.png")
