"""A coverage-guided fuzzer finds nothing in what reads messages and states, but does find a hidden fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "support" / "guided_fuzz.py"
SECONDS = 25
FOUND = 77  # libFuzzer's status for a target that raises


def fuzz(target: str, folder: Path, seconds: int = SECONDS) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("atheris", reason="atheris is not installed: pip install -r requirements/fuzz.txt")
    command = [sys.executable, str(SCRIPT), target, str(seconds), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize("target", ["header", "schema", "batch_type", "payload", "arrow", "plan", "states"])
def test_bytes_that_are_led_to_new_code_are_read_or_refused(target: str, tmp_path: Path) -> None:
    done = fuzz(target, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "stat::number_of_executed_units" in done.stderr, done.stderr[-3000:]


def test_a_fault_behind_five_bytes_is_found(tmp_path: Path) -> None:
    done = fuzz("planted", tmp_path, 200)  # it ends as soon as it is found
    crashes = list(tmp_path.glob("crash-*"))
    assert [crash.read_bytes()[:5] for crash in crashes] == [b"frees"], done.stderr[-3000:]
    # On a busy machine an alarm of libFuzzer's may come while the interpreter ends.
    assert done.returncode in (FOUND, -signal.SIGALRM), done.stderr[-3000:]
