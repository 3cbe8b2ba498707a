"""Ranks that die, stall, raise and disagree: the others report, nobody hangs, the job fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launched_ahead import Case, cases, launches
from rank_processes import Launched, launch, support_path

pytestmark = pytest.mark.multirank
SCRIPT = Path(__file__).with_name("failing_rank.py")
DEADLINE_S = 5.0
LAUNCH_S = 200.0
NO_DEADLINE_S = 2 * LAUNCH_S  # whoever waits for this one is late for the launch
# Nobody has to wait until a deadline to learn of these.
AT_ONCE = {"raise", "raise before a channel", "kill the job", "mismatch", "unchecked mismatch", "fork", "thread"}
RECOVERED = {"kill", "kill unchecked", "gone before connecting", "gone before a channel"}
BOTH = ["process_group", "mpi"]


def fail(backend: str, how: str) -> Launched:
    """Launch three ranks of which rank 1 fails."""
    # torchrun ends all ranks when one fails; here the ranks themselves must.
    launcher = "plain" if backend == "process_group" else "mpi"
    arguments = [backend, how.removesuffix(" the job"), str(NO_DEADLINE_S if how in AT_ONCE else DEADLINE_S)]
    more = {"PYTHONPATH": support_path()}
    done = launch(launcher, 3, SCRIPT, arguments, timeout_s=LAUNCH_S, recovery=how in RECOVERED, environment=more)
    assert not done.timed_out, done.explain()
    assert all("begun" in output for output in done.outputs), done.explain()
    return done


result_of = launches(fail)


@pytest.fixture
def case(request: pytest.FixtureRequest, result_of: Callable[[Case], Launched]) -> tuple[str, Launched]:
    """The backend, and what became of the launch."""
    return request.param[0], result_of(request.param)


def reported(done: Launched, rank: int) -> str:
    """What a rank reported."""
    found = re.search(r"reported (.*)", done.outputs[rank])
    assert found, done.explain()
    return found[1]


def seconds(report: str) -> float:
    found = re.search(r"after ([\d.]+) s", report)
    assert found
    return float(found[1])


@cases(BOTH, ["raise"])
def test_a_rank_that_raises_is_reported_by_all_others_at_once(case: tuple[str, Launched]) -> None:
    backend, done = case
    assert done.returncode == 1
    assert "ValueError: the loader broke" in done.errors[1]
    for rank in (0, 2):
        text = reported(done, rank)
        assert "all_gather #2 on channel 'main'" in text
        assert "TransportError" in done.errors[rank]
        if backend == "mpi":
            assert "rank 1 failed: ValueError: the loader broke" in text


@cases(["mpi"], ["raise before a channel"])
def test_a_rank_that_raises_while_others_make_a_channel_is_reported_by_them_at_once(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode == 1
    for rank in (0, 2):
        assert "rank 1 failed: ValueError: the loader broke" in reported(done, rank)


@cases(BOTH, ["kill"])
def test_a_killed_rank_is_reported_by_the_survivors(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode != 0
    for rank in (0, 2):
        assert reported(done, rank).startswith("Transport")
        assert "freescale.transport.errors.Transport" in done.errors[rank]


@cases(["mpi"], ["kill the job"])
def test_mpiexec_ends_the_job_when_a_rank_is_killed(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode != 0


@cases(BOTH, ["stop"])
def test_a_stopped_rank_is_a_timeout_of_the_others(case: tuple[str, Launched]) -> None:
    _, done = case
    texts = [reported(done, rank) for rank in (0, 2)]
    timeouts = [text for text in texts if text.startswith("TransportTimeout")]
    assert timeouts, done.explain()
    assert all(seconds(text) >= DEADLINE_S for text in timeouts), done.explain()
    assert all("missing: ranks [1]" in text for text in texts), "whoever heard it from a peer too"


@pytest.mark.parametrize(
    "case",
    [("mpi", "stop unchecked"), ("mpi", "kill unchecked"), ("mpi", "stop inside"), ("process_group", "stop inside")],
    indirect=True,
    ids="-".join,
)
def test_waits_in_which_no_sizes_are_compared_name_the_missing_rank(case: tuple[str, Launched]) -> None:
    _, done = case
    texts = [reported(done, rank) for rank in (0, 2)]
    timeouts = [text for text in texts if text.startswith("TransportTimeout")]
    assert timeouts, done.explain()
    assert all("on channel 'trusting'" in text and "missing: ranks [1]" in text for text in timeouts), done.explain()
    assert all("missing: ranks [1]" in text for text in texts), "whoever heard it from a peer"


@cases(BOTH, ["mismatch"])
def test_a_mismatch_is_reported_on_both_sides_and_the_third_rank_goes_on_until_it_needs_them(
    case: tuple[str, Launched],
) -> None:
    _, done = case
    assert done.returncode == 1
    for rank in (0, 1):
        assert reported(done, rank).startswith("SizeMismatch")
        assert "rank 1 expected 2 rows from rank 0, got 1" in reported(done, rank)
    assert "all_gather #3" in reported(done, 2), "it got the rows of the exchange in which the others disagreed"


@cases(BOTH, ["unchecked mismatch"])
def test_ranks_that_trust_sizes_and_disagree_get_an_error_and_not_an_abort(case: tuple[str, Launched]) -> None:
    backend, done = case
    assert "terminate called" not in "".join(done.errors), done.explain()
    for rank in (0, 2):
        text = reported(done, rank)
        if backend == "process_group":
            assert text.startswith("SizeMismatch")
            assert f"rank {rank} expected 536 rows from rank 1, got 712" in text
        else:
            assert text.startswith("TransportError")
            assert "ranks disagree about which operation this is or about its size" in text


@cases(["mpi"], ["exit"])
def test_a_rank_that_leaves_early_is_a_timeout_and_not_a_hang(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode != 0
    for rank in (0, 2):
        assert "missing: ranks [1]" in reported(done, rank)


@cases(["mpi"], ["gone before connecting"])
def test_an_error_that_is_caught_while_connecting_to_a_dead_rank_does_not_keep_the_process(
    case: tuple[str, Launched],
) -> None:
    _, done = case
    for rank in (0, 2):
        assert "which ranks are missing is not known" in reported(done, rank), done.explain()


@cases(["mpi"], ["gone before a channel"])
def test_an_error_that_is_caught_while_making_a_channel_with_a_dead_rank_does_not_keep_the_process(
    case: tuple[str, Launched],
) -> None:
    _, done = case
    for rank in (0, 2):
        assert "missing: ranks [1]" in reported(done, rank), done.explain()


@cases(["mpi"], ["fork"])
def test_a_forked_child_neither_uses_the_transport_nor_disturbs_its_parent(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode == 0, done.explain()
    assert done.outputs[1].count("child ended with 0") == 1
    assert done.outputs[1].count("child ended with 1") == 2
    assert "a child forked from a rank is no rank" in done.errors[1]
    assert all("ended normally" in output for output in done.outputs)


@cases(["mpi"], ["thread"])
def test_a_thread_that_fails_does_not_keep_the_job(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode == 0, done.explain()
    assert "sizes[1] must be the rows" in done.errors[1]


@cases(["mpi"], ["stuck thread"])
def test_a_thread_that_waits_does_not_keep_a_failed_rank(case: tuple[str, Launched]) -> None:
    _, done = case
    assert done.returncode == 1
    assert "the main thread broke" in reported(done, 0)
