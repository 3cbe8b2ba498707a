"""The transport contract between real processes: one launch per backend and world size, all checks inside."""

from __future__ import annotations

from pathlib import Path

import pytest

import transport_contract
from rank_processes import launch

pytestmark = pytest.mark.multirank
SCRIPT = Path(transport_contract.__file__)
LARGE = Path(__file__).with_name("large_message_rank.py")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["process_group", "mpi"])
def test_processes_keep_the_contract_and_end_normally(backend: str, world_size: int) -> None:
    done = launch(backend, world_size, SCRIPT, [backend, "all"])
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == len(transport_contract.CHECKS)
        assert f"all passed {world_size}" in output


@pytest.mark.parametrize(("backend", "launcher"), [("process_group", "plain"), ("mpi", "mpi")])
def test_late_ranks_are_timeouts(backend: str, launcher: str) -> None:
    done = launch(launcher, 3, SCRIPT, [backend, "late"])
    assert not done.timed_out, done.explain()
    assert all("all passed 3" in output for output in done.outputs), done.explain()


@pytest.mark.parametrize("backend", ["process_group", "mpi"])
def test_more_than_2_gib_arrive(backend: str) -> None:
    done = launch(backend, 2, LARGE, [backend])
    assert done.returncode == 0, done.explain()
    assert all("arrived" in output for output in done.outputs), done.explain()
