"""The runner of tests on GPUs loses nothing when a case hangs, or takes its process down. (It needs no GPU itself.)"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from case_runner import Part, Result, Runner

RUN = Path(__file__).with_name("cuda_run.py")
FILE = """
import os, subprocess, sys, time
import pytest

def test_one_passes(): pass

def test_two_hangs_with_a_child_of_its_own_group():
    code = "from threading import Thread; import time; Thread(target=time.sleep, args=(300,)).start(); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    open(os.environ["CHILD"], "w").write(str(child.pid))
    child.wait()

def test_three_fails(): assert 1 == 2

def test_four_crashes(): os._exit(7)

@pytest.mark.skip(reason="not here")
def test_five_is_left_out(): pass

def test_six_passes(): pass
"""
SCRIPT = """
import sys, time
from case_report import run_cases

def quick(): print("quick ran")
def wrong(): raise ValueError("as it should")
def slow(): time.sleep(300)

run_cases({"quick": quick, "wrong": wrong, "slow": slow, "last": quick})
"""


def outcomes(part: Part, folder: Path, limit_s: float = 250.0) -> list[Result]:
    folder.mkdir(exist_ok=True)
    found: list[Result] = []
    Runner(folder, time.monotonic() + limit_s, found.append).run(part)
    return found


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(RUN.with_name("support"))}


def test_a_test_that_hangs_or_crashes_costs_its_deadline_and_the_rest_still_runs(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    child = tmp_path / "child"
    command = [sys.executable, "-P", "-m", "pytest", "-p", "case_report", "-q", "-s", str(tmp_path / "test_some.py")]
    part = Part("some", command, case_s=5.0, variables={**environment(), "CHILD": str(child)})
    found = outcomes(part, tmp_path / "logs")
    assert [(r.case.rpartition("test_")[2].partition("_")[0], r.outcome) for r in found] == [
        ("one", "passed"),
        ("two", "hung"),
        ("three", "failed"),
        ("four", "crashed"),
        ("five", "skipped"),
        ("six", "passed"),
    ]
    text = {r.outcome: r.text for r in found}
    assert "assert 1 == 2" in text["failed"]
    assert "exit status 7" in text["crashed"]
    assert "test_two_hangs_with_a_child_of_its_own_group" in text["hung"], "where the test hung"
    assert text["hung"].count("Fatal Python error: Aborted") == 2, "the child told too, all its threads"
    deadline = time.monotonic() + 60
    while (lives := has_memory(int(child.read_text()))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives, "the child was not killed"


def has_memory(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return bool(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return False


def test_a_script_goes_on_after_a_case_that_raised_and_one_that_hung(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    part = Part("script", [sys.executable, str(tmp_path / "script.py")], case_s=5.0, variables=environment())
    found = outcomes(part, tmp_path / "logs")
    assert [(r.case, r.outcome) for r in found] == [
        ("quick", "passed"),
        ("wrong", "failed"),
        ("slow", "hung"),
        ("last", "passed"),
    ]
    assert "ValueError: as it should" in found[1].text
    assert found[2].seconds > 4.5


def test_when_the_time_is_over_the_rest_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('"wrong": wrong, ', ""))
    part = Part("script", [sys.executable, str(tmp_path / "script.py")], case_s=50.0, variables=environment())
    found = outcomes(part, tmp_path / "logs", limit_s=8.0)
    assert [(r.case, r.outcome) for r in found] == [("quick", "passed"), ("slow", "not run"), ("last", "not run")]


@pytest.mark.parametrize(
    ("code", "outcome", "case_s"),
    [
        ("print(1)", "passed", 200.0),
        ("raise SystemExit(3)", "crashed", 200.0),
        ("import time; time.sleep(300)", "hung", 1.0),
    ],
)
def test_a_command_that_tells_nothing_is_one_case(code: str, outcome: str, case_s: float, tmp_path: Path) -> None:
    found = outcomes(Part("whole", [sys.executable, "-c", code], case_s=case_s, tells=False), tmp_path / "logs")
    assert [(r.case, r.outcome) for r in found] == [("whole", outcome)]


@pytest.mark.parametrize(
    ("end", "outcome"), [("import os; os._exit(5)", "crashed"), ("time.sleep(300)", "hung")], ids=["crash", "hang"]
)
def test_an_end_that_goes_wrong_after_all_cases_is_told(end: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('"wrong": wrong, "slow": slow, ', "") + end)
    part = Part(
        "script",
        [sys.executable, str(tmp_path / "script.py")],
        start_s=8.0 if outcome == "hung" else 200.0,
        variables=environment(),
    )
    found = outcomes(part, tmp_path / "logs")
    assert [(r.case, r.outcome) for r in found] == [("quick", "passed"), ("last", "passed"), ("(end)", outcome)]


def test_a_command_that_cannot_start_is_told_once(tmp_path: Path) -> None:
    found = outcomes(Part("none", [sys.executable, str(tmp_path / "missing.py")]), tmp_path / "logs")
    assert [(r.case, r.outcome) for r in found] == [("(start)", "crashed")]
    assert "No such file" in found[0].text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=250, check=False
    )


def test_results_are_files_and_the_status_tells(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test_passes(): pass\n")
    (tmp_path / "test_bad.py").write_text("def test_fails(): assert not 'this'\n")
    folder = tmp_path / "found"
    done = run(str(folder), "--tests", str(tmp_path / "test_good.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(str(folder), "--tests", str(tmp_path / "test_good.py"))
    assert done.returncode == 2, "it does not mix two runs"
    done = run(str(tmp_path / "more"), "--tests", str(tmp_path / "test_good.py"), str(tmp_path / "test_bad.py"))
    assert done.returncode == 1
    assert "1 passed, 1 failed" in done.stdout
    assert "assert not 'this'" in done.stdout
    found = json.loads((tmp_path / "more" / "results.json").read_text())
    assert [each["outcome"] for each in found] == ["passed", "failed"]
    assert "| tests 2 | test_bad.py::test_fails | failed |" in (tmp_path / "more" / "results.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "found"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: torch sees no CUDA GPU, and these tests need one\n"


def test_parts_name_files_that_exist(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--list")
    assert done.returncode == 0
    assert {"contract, peer", "checks, segment", "kernels", "pipeline"} <= set(done.stdout.splitlines())
    assert not list(tmp_path.iterdir())
    for part in runpy.run_path(str(RUN))["parts"]():
        assert all(Path(word).exists() for word in part.command if word.startswith("/")), part


def test_where_there_is_one_gpu_ranks_share_it_but_for_what_cannot_be_seen_then() -> None:
    found = runpy.run_path(str(RUN))["parts"]()
    apart = {f"checks apart, {engine}" for engine in ("peer", "segment", "staged")}
    assert {part.name for part in found if part.gpus == 2} == {"contract, nccl", "checks, nccl", "stress, nccl", *apart}
    assert {part.gpus for part in found} == {1, 2}


def test_tests_of_ranks_that_may_share_a_gpu_run_where_there_is_one(request: pytest.FixtureRequest) -> None:
    needed = runpy.run_path(str(RUN.with_name("conftest.py")))["_gpus_needed"]
    assert needed(request.node) == 0
    request.node.add_marker(pytest.mark.gpus(shared=True))
    assert needed(request.node) == 1
    request.node.add_marker(pytest.mark.gpus)
    assert needed(request.node) == 2
