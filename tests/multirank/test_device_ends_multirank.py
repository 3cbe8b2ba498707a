"""Processes that end while their GPU is at work end as they should: status, words, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import device_ending_rank
import pytest

from rank_processes import launch, support_path

pytestmark = pytest.mark.multirank
SCRIPT = Path(device_ending_rank.__file__)
PATHS = {"PYTHONPATH": support_path(), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
SHARING = pytest.mark.gpus(shared=True)
APART = pytest.mark.gpus
ON_GPUS = [
    pytest.param("nccl", marks=APART),
    *(pytest.param(each, marks=SHARING) for each in ("peer", "segment", "staged")),
]


@pytest.mark.parametrize("engine", ["cpu", *ON_GPUS])
def test_a_script_that_is_through_half_way_in_an_epoch_ends_well(engine: str) -> None:
    done = launch("plain", 2, SCRIPT, ["left", engine], environment=PATHS, timeout_s=100)
    assert done.returncode == 0, done.explain()
    assert [done.timed_out, done.orphans, done.shared_memory] == [False, [], []], done.explain()
    assert all("trained" in output for output in done.outputs), done.explain()


@pytest.mark.parametrize("engine", ["cpu", *ON_GPUS])
def test_a_rank_that_raises_ends_with_its_error_and_the_other_hears_of_it(engine: str) -> None:
    done = launch("plain", 2, SCRIPT, ["raised", engine], environment=PATHS, timeout_s=100)
    assert done.returncode == 1, done.explain()
    assert [done.timed_out, done.orphans, done.shared_memory] == [False, [], []], done.explain()
    assert "ArithmeticError: on fire" in done.errors[1], done.explain()
    assert "freescale.transport.errors" in done.errors[0] or "PeerFailed" in done.errors[0], done.explain()
