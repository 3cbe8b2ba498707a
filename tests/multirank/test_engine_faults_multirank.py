"""Streams that wait for a rank that does not come are let go, and the next call says what happened."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import device_contract
from launched_ahead import Case, cases, launches
from rank_processes import Launched, launch, support_path

pytestmark = pytest.mark.multirank
SCRIPT = Path(device_contract.__file__).with_name("engine_faults.py")


def run(engine: str, how: str) -> Launched:
    done = launch("plain", 2, SCRIPT, [engine, how], environment={"PYTHONPATH": support_path()})
    assert not done.timed_out, done.explain()
    return done


result_of = launches(run)


@pytest.fixture
def case(request: pytest.FixtureRequest, result_of: Callable[[Case], Launched]) -> tuple[str, str]:
    """What rank 0 raised, and its message."""
    done = result_of(request.param)
    found = re.search(r"raised (\w+): (.*)", done.outputs[0])
    assert found, done.explain()
    return found[1], found[2]


@cases(["segment"], ["late"])
def test_a_late_rank_is_a_timeout_that_names_it(case: tuple[str, str]) -> None:
    kind, message = case
    assert kind == "TransportTimeout"
    assert "all_to_all #7: rank 0: the GPUs have not moved the data 2 s after the call; missing: ranks [1]" in message


@cases(["staged"], ["late"])
def test_a_late_rank_is_a_timeout_of_the_host_transport_where_it_carries_the_data(case: tuple[str, str]) -> None:
    kind, message = case
    assert kind == "TransportTimeout"
    assert "all_to_all #7: " in message


@cases(["peer"], ["killed"])
def test_a_rank_that_died_is_noticed_long_before_the_deadline(case: tuple[str, str]) -> None:
    kind, message = case
    assert kind == "TransportError"
    assert "all_to_all #7: rank 1 has left: its process has ended" in message


@cases(["peer", "staged"], ["unready"])
def test_nothing_is_copied_before_it_is_ready(case: tuple[str, str]) -> None:
    assert case == ("nothing", "all in order")


@cases(["peer"], ["disagrees"])
def test_direct_copies_of_other_sizes_than_expected_move_nothing(case: tuple[str, str]) -> None:
    kind, message = case
    assert kind in ("SizeMismatch", "TransportError")
    assert re.search(r"sends 4000 bytes to rank 1 and expects 4000, which sends 8000|rank 1 has left", message)
