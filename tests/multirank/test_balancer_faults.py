"""A rank in trouble is an error on every rank, within the deadline; ranks are real processes."""

import re
from pathlib import Path

import pytest

from balancer_faults import TIMEOUT_S
from rank_processes import Launched, launch

SCRIPT = Path(__file__).parents[1] / "support" / "balancer_faults.py"
SLACK_S = 60.0  # of a machine that is busy, or stands still for a while
pytestmark = pytest.mark.multirank


def run(backend: str, trouble: str, *, recovery: bool = False) -> Launched:
    done = launch(backend, 3, SCRIPT, [backend.replace("plain", "process_group"), trouble], recovery=recovery)
    assert not done.timed_out, done.explain()
    return done


# "plain" is gloo as torchrun sets it up, without the agent that kills the others as soon as one rank fails
@pytest.mark.parametrize("backend", ["mpi", "plain"])
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("loader raises", "rank 1 failed at step 3: OSError: disk on fire"),
        ("partitioner differs", r"step 0: .* on ranks \[1\]"),
    ],
)
def test_every_rank_says_which_rank_failed_and_why(backend: str, trouble: str, message: str) -> None:
    done = run(backend, trouble)
    assert done.returncode != 0, done.explain()
    for output in done.outputs:
        assert re.search(message, output), done.explain()


@pytest.mark.parametrize("backend", ["mpi", "plain"])
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("trainer raises", "rank 1 failed.*: RuntimeError: loss is NaN|PeerClosed: rank 1"),
        ("exits", "PeerClosed: rank 1 stopped iterating|rank 1 failed"),
        ("leaves early", "PeerClosed: rank 1 stopped iterating before step"),
    ],
)
def test_peers_hear_that_a_trainer_is_gone(backend: str, trouble: str, message: str) -> None:
    done = run(backend, trouble)
    assert (done.returncode == 0) == (trouble == "leaves early"), done.explain()
    for rank in (0, 2):
        assert re.search(message, done.outputs[rank]), done.explain()


@pytest.mark.parametrize(
    ("backend", "trouble"),
    [
        ("mpi", "killed while loading"),
        ("mpi", "killed while training"),
        ("mpi", "stopped for a while"),
        ("plain", "killed while loading"),
        ("plain", "stopped for a while"),
    ],
)
def test_a_silent_rank_is_an_error_that_names_stage_and_step(backend: str, trouble: str) -> None:
    done = run(backend, trouble, recovery=True)
    for rank in (0, 2):
        found = re.search(r"(Transport\w+): .*, step \d+: .* after ([\d.]+) s", done.outputs[rank], re.DOTALL)
        assert found, done.explain()
        assert float(found[2]) < 3 * TIMEOUT_S + SLACK_S, done.explain()
