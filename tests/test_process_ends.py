"""A process ends with the status that it chose, and soon, though a thread of ours is inside C++ (section 3.3)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rank_processes import Launched, launch

SCRIPT = Path(__file__).parent / "support" / "ending_process.py"
PLACES = ["by_watch", "by_stage", "by_lane", "by_source", "by_destructor"]
DEADLINE_S = 120.0

pytestmark = pytest.mark.multirank


def end(enters: str, seconds: float, status: int | str = 0) -> Launched:
    """Run a process that ends while a thread is inside C++ for so many seconds."""
    done = launch("plain", 1, SCRIPT, [f"{enters}", str(seconds), str(status)], timeout_s=DEADLINE_S)
    assert done.outputs[0].startswith("at the end\n"), done.explain()
    assert (done.timed_out, done.orphans) == (False, []), done.explain()
    return done


@pytest.mark.parametrize("place", PLACES)
def test_a_thread_inside_cpp_is_waited_for(place: str) -> None:
    done = end(place, 1.0)
    assert (done.returncode, done.errors) == (0, [""]), done.explain()


@pytest.mark.parametrize(("status", "expected"), [(3, 3), ("error", 1)])
def test_the_process_keeps_its_status(status: int | str, expected: int) -> None:
    done = end("by_source", 1.0, status)
    assert done.returncode == expected, done.explain()
    assert "freescale:" not in done.errors[0], done.explain()


@pytest.mark.parametrize("place", ["by_watch", "by_source"])
def test_a_thread_that_does_not_end_is_named_and_the_process_ends_without_it(place: str) -> None:
    done = end(place, 200.0)
    assert done.returncode == 1, done.explain()
    name = {"by_watch": "freescale deadlines", "by_source": "freescale-balancer"}[place]
    said = f"freescale: the process ends with exit status 1, without waiting longer for its threads: {name}"
    assert done.errors[0].splitlines()[-1] == said, done.explain()


def test_an_end_that_is_interrupted_is_one_at_once() -> None:
    done = end("and_interrupt", 200.0)
    assert done.returncode == 1, done.explain()
    assert done.errors[0].endswith("without waiting longer for its threads: interrupted\n"), done.explain()


def test_an_epoch_at_hooks_that_is_left_half_way_ends_where_python_begins_no_threads() -> None:
    done = end("nothing", 1.0)
    assert (done.returncode, done.errors) == (0, [""]), done.explain()
    assert done.outputs[0].splitlines()[1:] == ["the epoch has ended"], done.explain()


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 lets nobody begin a thread at that point")
def test_a_thread_goes_on_training_after_the_main_thread() -> None:
    done = end("by_trainer", 1.0)
    assert (done.returncode, done.errors) == (0, [""]), done.explain()
    assert done.outputs[0].splitlines()[1:] == ["trained 9 batches"], done.explain()
