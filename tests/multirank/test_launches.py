"""Ranks that are forks are what started ones are, and end as their launcher says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_processes import launch, support_path

pytestmark = pytest.mark.multirank
ABOUT = """
import os, signal, sys, tempfile, threading
import known_rows  # of tests/support

print(sys.argv[1:], __name__, __file__, os.getcwd(), os.environ["RANK"], os.environ["OMP_NUM_THREADS"], flush=True)
print(tempfile.gettempdir() == os.environ["TMPDIR"], repr(sys.stdin.read()), known_rows.__file__, flush=True)
print(os.getpid() == os.getsid(0), signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
print(threading.active_count(), len(os.listdir("/proc/self/task")), flush=True)
import atexit
atexit.register(print, "at the end")
raise SystemExit(3)
"""
ENDS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("as planted")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if sys.argv[2] == "leave" else 1000)
print("left", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_a_fork_finds_what_a_started_script_finds(script: Path) -> None:
    script.write_text(ABOUT)
    said = [
        launch("plain", 1, script, ["a", "b c"], environment={"PYTHONPATH": support_path()}, fresh=fresh)
        for fresh in (False, True)
    ]
    assert [done.returncode for done in said] == [3, 3], said[0].explain()
    assert said[0].outputs == said[1].outputs
    assert said[0].outputs[0].startswith(f"['a', 'b c'] __main__ {script} "), said[0].explain()
    assert said[0].outputs[0].endswith("True True\n1 1\nat the end\n"), said[0].explain()


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", -9)])
def test_plain_ranks_go_on_when_one_fails(script: Path, how: str, code: int) -> None:
    script.write_text(ENDS)
    done = launch("plain", 3, script, [how, "leave"])
    assert done.returncode == code, done.explain()
    assert done.outputs == ["left\n", "", "left\n"]
    assert ("ValueError: as planted" in done.errors[1]) == (how == "raise")


def test_ranks_of_a_process_group_are_ended_when_one_fails(script: Path) -> None:
    script.write_text(ENDS)
    done = launch("process_group", 3, script, ["raise", "stay"])
    assert done.returncode != 0
    assert not done.timed_out
    assert done.outputs == [""] * 3
    assert not done.orphans


def test_at_the_deadline_forks_write_their_stacks_and_are_killed(script: Path) -> None:
    script.write_text(ENDS)
    done = launch("plain", 2, script, ["kill", "stay"], timeout_s=5.0)
    assert done.timed_out
    assert "script.py" in done.errors[0], "where it was"
    assert not done.orphans
