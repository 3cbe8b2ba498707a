"""The command bench.simulate, and how its steps are put beside measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freescale.bench import simulate
from freescale.bench.compute_fit import ComputeFit
from freescale.bench.simulate_check import compare, simulated_bubble_ms
from freescale.bench.simulate_comparison import Comparison, said
from freescale.bench.simulate_network import CLUSTERS
from freescale.bench.simulate_step import TECHNIQUES

from measured_steps import embedding_records, step_records

pytestmark = pytest.mark.usefixtures("one_thread")
BY_NAME = {technique.name: technique for technique in TECHNIQUES}


def test_simulated_steps_are_put_beside_measured_ones(tmp_path: Path) -> None:
    path = tmp_path / "embedding.json"
    found = embedding_records("shared memory", {"base": 15.0, "sdd": 9.0, "prioritized": 1.0})
    path.write_text(json.dumps({"found": found}))
    compared = {each.technique: each for each in compare(path)}
    assert list(compared) == ["TorchRec", "TorchRec, SDD", "prioritized only"]
    sdd = compared["TorchRec, SDD"]
    assert (sdd.measured_ms, sdd.compute_ms, sdd.world_size) == (9.0, 100.0, 2)
    rows_ms = 1e3 * 400_000 * 512 / 2 / 23e9
    assert sdd.simulated_ms == pytest.approx(2 * rows_ms + CLUSTERS["shared_memory"].gap_ms, rel=0.1)
    assert sdd.step_error == pytest.approx((sdd.simulated_ms - 9.0) / 109.0)
    assert compared["TorchRec"].simulated_ms > sdd.simulated_ms + 3.0 > compared["prioritized only"].simulated_ms
    load = next(each for each in found if each["kind"] == "workload")
    slow = simulated_bubble_ms(BY_NAME["TorchRec, SDD"], 100.0, load, CLUSTERS["sockets"])
    assert slow > 10 * sdd.simulated_ms / 2


def test_steps_of_uneven_ranks_are_simulated_with_their_own_computing(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(json.dumps({"found": step_records({"sdd": 17.0, "freescale": 17.0})}))
    sdd, ours = compare(tmp_path / "steps.json")
    assert (sdd.technique, ours.technique) == ("TorchRec, SDD", "FreeScale over NCCL")
    assert (sdd.measured_ms, sdd.compute_ms) == (17.0, 105.0)
    waiting = (5.0 + 15.0) / 2  # 110 instead of 105 on average, then 120 instead of 105
    assert ours.simulated_ms == pytest.approx(waiting + CLUSTERS["nvlink_pair"].gap_ms, abs=2.0)
    assert sdd.simulated_ms > ours.simulated_ms


def test_of_several_launches_steps_are_compared_with_their_own_bubble(tmp_path: Path) -> None:
    early, late = (step_records({"sdd": bubble_ms}) for bubble_ms in (30.0, 17.0))
    (tmp_path / "steps.json").write_text(json.dumps({"found": [*early, *late]}))
    (sdd,) = compare(tmp_path / "steps.json")
    assert sdd.measured_ms == 17.0


def test_steps_so_short_that_hosts_may_be_late_are_told_apart() -> None:
    good, bad = (Comparison("nvlink", "w", "t", 2, *values) for values in ((99.0, 1.0, 1.5), (25.0, 25.0, 0.0)))
    line = said([good, bad])
    assert "Checked against 1 measured steps: a simulated step is off by 0.5 % in the median and 0.5 % at most" in line
    assert "Against 1 steps with less than 40 ms of computing, as timed without" in line
    assert "off by 50.0 % in the median" in line
    assert "beside the model" not in said([good])


def test_files_that_are_no_measurements_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text, message in (
        ("{}", "is not what bench.embedding or bench.end_to_end writes"),
        ('{"found": []}', "has no traced step"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            compare(path)


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def compute(tmp_path: Path) -> Path:
    path = tmp_path / "virtual.json"
    fit = ComputeFit(2e-3, 1e-7, 1e-11, 0.0, error=0.003, noise=0.002).to_dict()
    path.write_text(json.dumps({"kind": "virtual_ranks", "device": "some GPU", "fit": fit}))
    return path


def test_the_command_marks_everything_as_simulated(
    compute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "embedding.json"
    measured.write_text(json.dumps({"found": embedding_records("nvlink", {"sdd": 3.0})}))
    out = {name: tmp_path / f"out.{name}" for name in ("json", "png", "trace")}
    arguments = ["--compute", str(compute), "--world-size", "2", "64", "--batch-size", "8", "--data"]
    arguments += ["zipf:rows=10000,median=300", "--steps", "2", "--cluster", "paper", "ethernet_100", "--check"]
    arguments += [str(measured), "--json", str(out["json"]), "--plot", str(out["png"]), "--trace", str(out["trace"])]
    assert simulate.main([*arguments, "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Simulated beside measured" in said
    assert "Simulated, not measured." in said
    assert "some GPU" in said
    found = json.loads(out["json"].read_text())
    assert found["simulated"] is True
    assert len(found["rows"]) == 2 * 2 * len(TECHNIQUES)
    assert len(found["compared"]) == 1
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(out["trace"].read_text())["otherData"]["simulated"] == "yes"
    (result,) = tmp_path.glob("*-simulate.md")
    assert "# Many ranks, simulated" in result.read_text()


def test_mistakes_are_errors_without_a_traceback(
    compute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    given_options = ["--compute", str(compute), "--world-size", "2"]
    for arguments, message in (
        (["--compute", str(tmp_path / "no.json")], "cannot read compute time"),
        (["--compute", str(other)], "was not written by bench.virtual_ranks"),
        ([*given_options, "--cluster", "moon"], "cluster must be one of"),
        ([*given_options, "--data", "zipf:speed=1"], "zipf has parameters"),
        ([*given_options, "--collisions", "2"], "--collisions must be from 0 to 1"),
        ([*given_options, "--contention", "-1"], "--contention must be in"),
        ([*given_options, "--check", str(other)], "is not what bench.embedding or bench.end_to_end writes"),
    ):
        assert simulate.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
