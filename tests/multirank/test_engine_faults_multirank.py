"""Streams that wait for a rank that does not come are let go, and the next call says what happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import device_contract
from rank_processes import launch, support_path

pytestmark = pytest.mark.multirank
SCRIPT = Path(device_contract.__file__).with_name("engine_faults.py")


def run(engine: str, how: str) -> tuple[str, str]:
    done = launch("plain", 2, SCRIPT, [engine, how], environment={"PYTHONPATH": support_path()})
    assert not done.timed_out, done.explain()
    found = re.search(r"raised (\w+): (.*)", done.outputs[0])
    assert found, done.explain()
    return found[1], found[2]


def test_a_late_rank_is_a_timeout_that_names_it() -> None:
    kind, message = run("segment", "late")
    assert kind == "TransportTimeout"
    assert "all_to_all #7: rank 0: the GPUs have not moved the data 2 s after the call; missing: ranks [1]" in message


def test_a_late_rank_is_a_timeout_of_the_host_transport_where_it_carries_the_data() -> None:
    kind, message = run("staged", "late")
    assert kind == "TransportTimeout"
    assert "all_to_all #7: " in message


def test_a_rank_that_died_is_noticed_long_before_the_deadline() -> None:
    kind, message = run("peer", "killed")
    assert kind == "TransportError"
    assert "all_to_all #7: rank 1 has left: its process has ended" in message


@pytest.mark.parametrize("engine", ["peer", "staged"])
def test_nothing_is_copied_before_it_is_ready(engine: str) -> None:
    assert run(engine, "unready") == ("nothing", "all in order")


def test_direct_copies_of_other_sizes_than_expected_move_nothing() -> None:
    kind, message = run("peer", "disagrees")
    assert kind in ("SizeMismatch", "TransportError")
    assert re.search(r"sends 4000 bytes to rank 1 and expects 4000, which sends 8000|rank 1 has left", message)
