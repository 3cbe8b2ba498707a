"""The kernel benchmark times only what is right, and says where its figures come from."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from freescale.bench import kernel_cases, kernels
from freescale.bench.kernel_cases import Case, Inputs
from freescale.bench.kernel_report import Outcome
from freescale.bench.kernel_timing import in_turn_ms


def test_a_short_run_writes_figures_a_picture_and_a_dated_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    choice = ["--device", "cpu", "--rows", "int64", "--lengths", "uniform", "--world-size", "2", "4"]
    files = ["--json", str(tmp_path / "k.json"), "--plot", str(tmp_path / "k.png"), "--results", str(tmp_path)]
    try:
        status = kernels.main([*choice, *files, "--operation", "dispatch", "transpose"])
    finally:
        torch.set_num_threads(threads)
    assert status == 0
    found = json.loads((tmp_path / "k.json").read_text())
    assert {"processor", "command", "software"} <= set(found["environment"])
    ours = [outcome for outcome in found["outcomes"] if outcome["way"] == "ours"]
    assert {(outcome["operation"], outcome["world_size"]) for outcome in ours} == {
        (operation, size) for operation in ("dispatch", "transpose") for size in (2, 4)
    }
    assert all(outcome["correct"] and outcome["call_ms"] > 0 for outcome in ours)
    assert (tmp_path / "k.png").stat().st_size > 1000
    (report,) = tmp_path.glob("*-kernels-cpu.md")
    assert "dispatch, int64 rows, cpu" in report.read_text()
    assert "loop, cat / ours" in report.read_text()
    assert "vectorised" in capsys.readouterr().out


def test_a_wrong_output_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        values = kernel_cases.expected(Case("permute", "int32", "giant", 2, 20), inputs).clone()
        values[-1] += 1
        return (values,)

    monkeypatch.setitem(kernel_cases._PLAIN["permute"], "vectorised", wrong)
    outcomes = {o.way: o for o in kernels.measure(Case("permute", "int32", "giant", 2, 20), "cpu", loop=False)}
    assert outcomes["ours"].correct
    assert not outcomes["vectorised"].correct
    assert outcomes["vectorised"].call_ms is None
    assert outcomes["vectorised"].remark == "wrong output, not timed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_that_is_told_to_end_keeps_what_it_measured(tmp_path: Path, number: signal.Signals) -> None:
    files = f"--json {tmp_path}/k.json --plot {tmp_path}/k.png --results {tmp_path}"
    choice = "-m freescale.bench.kernels --device cpu --no-loop --operation dispatch --world-size" + " 2" * 5000
    # Shells start background jobs with SIGINT ignored: the run must hear it all the same.
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = subprocess.Popen([sys.executable, *choice.split(), *files.split()], stdout=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, ignored)
    try:
        deadline = time.monotonic() + 250
        while not (tmp_path / "k.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(number)
        assert run.wait(timeout=250) == 0
    finally:
        run.kill()
    outcomes = json.loads((tmp_path / "k.json").read_text())["outcomes"]
    assert [outcome["way"] for outcome in outcomes].count("ours") >= 1
    assert (tmp_path / "k.png").stat().st_size > 1000
    (report,) = tmp_path.glob("*-kernels-cpu.md")
    assert "Interrupted: not all cases were measured." in report.read_text()


@pytest.mark.usefixtures("one_thread")
def test_a_run_takes_up_what_an_earlier_one_measured_and_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Case] = []
    genuine = kernels.measure

    def failing_at_three(case: Case, device: str, *, loop: bool, fbgemm: bool) -> list[Outcome]:
        measured.append(case)
        if case.world_size == 3:
            raise RuntimeError("out of memory\nand much more")
        return genuine(case, device, loop=loop, fbgemm=fbgemm)

    monkeypatch.setattr(kernels, "measure", failing_at_three)
    path = tmp_path / "k.json"
    choice = ["--device", "cpu", "--rows", "int64", "--lengths", "short", "--operation", "dispatch", "--no-fbgemm"]
    files = ["--json", str(path), "--resume", str(path), "--results", str(tmp_path)]
    assert kernels.main([*choice, *files, "--world-size", "2", "3"]) == 0
    (report,) = tmp_path.glob("*-kernels-cpu-no-fbgemm.md")
    assert "Failed: dispatch, int64 rows, short, 3: out of memory" in report.read_text()
    first = json.loads(path.read_text())["outcomes"]
    assert not any(outcome["way"].startswith("FBGEMM") for outcome in first)
    assert kernels.main([*choice, *files, "--world-size", "2", "4"]) == 0
    assert [case.world_size for case in measured] == [2, 3, 4]
    outcomes = json.loads(path.read_text())["outcomes"]
    assert outcomes[: len(first)] == first
    assert {outcome["world_size"] for outcome in outcomes} == {2, 4}
    assert kernels.main([*choice, *files, "--world-size", "5", "2", "4", "--limit-s", "0"]) == 0
    assert json.loads(path.read_text())["outcomes"] == outcomes
    assert kernels.main([*choice, *files, "--world-size", "4"]) == 0
    kept = json.loads(path.read_text())["outcomes"]
    assert sorted(map(json.dumps, kept)) == sorted(map(json.dumps, outcomes)), "what was not asked for again is kept"


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.json"
    path.write_text('{"outcomes": [{"way": "ours"}]}')
    assert kernels.main(["--device", "cpu", "--resume", str(path)]) == 2
    assert "must be a file that --json wrote" in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("limit", ["--limit-s", "--minutes"])
def test_no_case_starts_after_the_time_given(limit: str, tmp_path: Path) -> None:
    assert kernels.main(["--device", "cpu", limit, "0", "--results", str(tmp_path)]) == 0
    (report,) = tmp_path.glob("*-kernels-cpu.md")
    assert "###" not in report.read_text()
    assert "Interrupted" in report.read_text()


@pytest.mark.parametrize("operation", [*kernel_cases.OPERATIONS, "bucketize"])
def test_every_way_gives_the_same_rows(operation: str) -> None:
    rows = "int64" if operation == "bucketize" else "fp16x128"
    case = Case(operation, rows, "long 40" if operation == "bucketize" else "lognormal", 4, 10)
    inputs = kernel_cases.make_inputs(case, "cpu", seed=3)
    ways = kernel_cases.ways(case)
    assert {"vectorised", "ours"} <= set(ways)
    assert any(name.startswith("loop") for name in ways)
    results = {name: way(inputs)[0] for name, way in ways.items() if not name.startswith("FBGEMM")}
    for name, result in results.items():
        assert torch.equal(result, kernel_cases.expected(case, inputs)), name


@pytest.mark.parametrize("rows", kernel_cases.ROWS)
@pytest.mark.parametrize("size", ["10 kB", "100 kB", "1 MB"])
def test_sizes_are_what_moves_in_all(size: str, rows: str) -> None:
    mean = kernel_cases.mean_length(size, rows)
    if size == "10 kB" and "x128" in rows:
        assert mean == 0  # not one row of each sample
        return
    case = Case("permute", rows, size, kernel_cases.SIZED_WORLD_SIZE, mean)
    moved = kernel_cases.result_bytes(kernel_cases.make_inputs(case, "cpu", seed=0))
    assert 0.6 * kernel_cases.SIZES[size] < moved < 1.6 * kernel_cases.SIZES[size]


def test_ways_take_turns_in_an_order_that_changes_and_rotate_over_their_inputs() -> None:
    seen: list[str] = []
    calls = [partial(seen.append, name) for name in ("a0", "a1", "a2")]
    times = in_turn_ms({"a": (calls, 1.0), "b": ([partial(seen.append, "b")], 1.0)})  # said to be slow: a call a turn
    assert times.keys() == {"a", "b"}
    assert [name for name in seen if name != "b"] == ["a0", "a1", "a2"][: len(seen) // 2]
    assert len(seen) == 6
    assert {name == "b" for name in seen[::2]} == {True, False}  # which is first
