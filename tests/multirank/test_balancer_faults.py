"""A rank in trouble is an error on every rank, within the deadline; ranks are real processes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from balancer_faults import TIMEOUT_S
from launched_ahead import Case, cases, launches
from rank_processes import Launched, launch

SCRIPT = Path(__file__).parents[1] / "support" / "balancer_faults.py"
SLACK_S = 60.0  # of a machine that is busy, or stands still for a while
# "plain" is gloo as torchrun sets it up, without the agent that kills the others as soon as one rank fails
BOTH = ["mpi", "plain"]
TOLD = {
    "loader raises": "rank 1 failed at step 3: OSError: disk on fire",
    "partitioner differs": r"step 0: .* on ranks \[1\]",
}
GONE = {
    "trainer raises": "rank 1 failed.*: RuntimeError: loss is NaN|PeerClosed: rank 1",
    "exits": "PeerClosed: rank 1 stopped iterating|rank 1 failed",
    "leaves early": "PeerClosed: rank 1 stopped iterating before step",
    "leaves without a word": "PeerClosed: rank 1 stopped iterating before step",
}
pytestmark = pytest.mark.multirank


def run(backend: str, trouble: str) -> Launched:
    recovery = trouble.startswith(("killed", "stopped"))
    done = launch(backend, 3, SCRIPT, [backend.replace("plain", "process_group"), trouble], recovery=recovery)
    assert not done.timed_out, done.explain()
    return done


result_of = launches(run)


@pytest.fixture
def case(request: pytest.FixtureRequest, result_of: Callable[[Case], Launched]) -> tuple[str, Launched]:
    """The trouble, and what became of the launch."""
    return request.param[1], result_of(request.param)


@cases(BOTH, list(TOLD))
def test_every_rank_says_which_rank_failed_and_why(case: tuple[str, Launched]) -> None:
    trouble, done = case
    assert done.returncode != 0, done.explain()
    for output in done.outputs:
        assert re.search(TOLD[trouble], output), done.explain()


@cases(BOTH, list(GONE))
def test_peers_hear_that_a_trainer_is_gone(case: tuple[str, Launched]) -> None:
    trouble, done = case
    assert (done.returncode == 0) == trouble.startswith("leaves"), done.explain()
    for rank in (0, 2):
        assert re.search(GONE[trouble], done.outputs[rank]), done.explain()


@pytest.mark.parametrize(
    "case",
    [
        ("mpi", "killed while loading"),
        ("mpi", "killed while training"),
        ("mpi", "stopped for a while"),
        ("plain", "killed while loading"),
        ("plain", "stopped for a while"),
    ],
    indirect=True,
    ids="-".join,
)
def test_a_silent_rank_is_an_error_that_names_stage_and_step(case: tuple[str, Launched]) -> None:
    _, done = case
    for rank in (0, 2):
        found = re.search(r"(Transport\w+): .*, step \d+: .* after ([\d.]+) s", done.outputs[rank], re.DOTALL)
        assert found, done.explain()
        assert float(found[2]) < 3 * TIMEOUT_S + SLACK_S, done.explain()
