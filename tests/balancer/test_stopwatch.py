"""The watch of compute, with events of a model GPU; see balancer/stopwatch.py."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from freescale.balancer.stopwatch import Stopwatch


class Event:
    """An event of a GPU that passes when the test says so; `now` is its clock, in milliseconds."""

    made = 0
    now = 0.0
    passed = True

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.time = Event.now

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made, Event.now, Event.passed = 0, 0.0, True
    return Stopwatch(torch.device("cuda", 0), time.perf_counter)


def lap(watch: Stopwatch, label: int, milliseconds: float) -> None:
    """A step that waits for its peers for 100 ms in between."""
    watch.begin(label)
    Event.now += milliseconds
    watch.pause()
    Event.now += 100
    watch.resume()
    Event.now += milliseconds
    watch.end()


def told(watch: Stopwatch) -> dict[int, float]:
    """Milliseconds by step."""
    return {label: round(1e3 * seconds, 6) for label, seconds in watch.collect()}


def test_steps_are_told_in_turn_without_what_they_waited(watch: Stopwatch) -> None:
    for label in range(3):
        lap(watch, label, 10.0 * (label + 1))
    assert told(watch) == {0: 20, 1: 40, 2: 60}


def test_events_are_used_again_once_their_step_was_told_and_not_before(watch: Stopwatch) -> None:
    Event.passed = False
    lap(watch, 0, 10.0)
    assert told(watch) == {}
    lap(watch, 1, 30.0)
    assert Event.made == 8
    Event.passed = True
    assert told(watch) == {0: 20, 1: 60}
    for label in range(2, 50):
        lap(watch, label, float(label))
        assert told(watch) == {label: 2 * label}
    assert Event.made == 8


def test_it_is_timing_from_the_beginning_of_a_step_to_its_end(watch: Stopwatch) -> None:
    seen = [watch.is_timing]
    steps: list[Callable[[], None]] = [lambda: watch.begin(0), watch.pause, watch.resume, watch.end]
    for step in steps:
        step()
        seen.append(watch.is_timing)
    assert seen == [False, True, True, True, False]
