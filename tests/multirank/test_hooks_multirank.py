"""The balancer at hooks between real processes: every sample once, the same number of steps, no thread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rank_processes import launch


@pytest.mark.multirank
@pytest.mark.parametrize("backend", ["mpi", "process_group"])
def test_hooks_balance_between_processes_that_skip_and_end_unevenly(backend: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("hooked_rank.py")
    done = launch(backend, 3, script, [backend, str(tmp_path)])
    assert done.returncode == 0, done.explain()
    assert all(f"rank {rank}: 12 steps" in output for rank, output in enumerate(done.outputs)), done.explain()
    seen = sorted(i for path in tmp_path.glob("*.json") for i in json.loads(path.read_text()))
    expected = [i + 100 * step + 10_000 * rank for rank in range(3) for step in range(6 + 3 * rank) for i in range(4)]
    assert seen == sorted(expected)
