"""Times of small operations, on a GPU with and without the host's share, on a CPU with one thread (paper, Figure 7)."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

_REPEATS = 5
_BUDGET_S = 0.05  # what one measurement may take, about
_LONG_BUDGET_S = 0.4  # where few calls take more than that
_TURNS, _TURN_S, _TURNS_S = 15, 0.002, 1.0  # most turns of a way, what one takes at least, and all of all ways, about


def call_ms(calls: Sequence[Call], device: str) -> float:
    """Median milliseconds of a call when calls follow each other, the host's work included; inputs rotate over `calls`.

    The garbage collector is off, as in `timeit`: a loop over thousands of tensors starts it at times of its own.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    collecting = gc.isenabled()
    gc.disable()
    try:
        once = _elapsed(calls[:1], 1, wait)
        if once > _BUDGET_S:
            return statistics.median([once, *(_elapsed(calls[:1], 1, wait) for _ in range(2))]) * 1e3
        calls = affordable(calls, once)
        longest = _LONG_BUDGET_S if once > _BUDGET_S / _REPEATS else _BUDGET_S
        repeats = max(3, min(_REPEATS, int(longest / once / len(calls))))
        rounds = max(1, min(50, int(_BUDGET_S / repeats / once / len(calls))))
        return statistics.median(_elapsed(calls, rounds, wait) for _ in range(repeats)) * 1e3
    finally:
        if collecting:
            gc.enable()


def in_turn_ms(ways: Mapping[str, tuple[Sequence[Call], float]]) -> dict[str, float]:
    """Median milliseconds of a call on the host, where ways take short turns in an order that changes.

    What else a machine does slows down some ways at a time; so each meets it as often as the others.

    Args:
        ways: Calls over which the inputs of each way rotate, and the seconds that one takes, about.
    """
    counts = {name: max(1, int(_TURN_S / call_s)) for name, (_, call_s) in ways.items()}
    once_s = sum(counts[name] * call_s for name, (_, call_s) in ways.items())
    endless = {name: itertools.cycle(calls) for name, (calls, _) in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffled = list(ways), random.Random(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(max(3, min(_TURNS, int(_TURNS_S / max(once_s, _TURN_S))))):
            shuffled.shuffle(order)
            for name in order:
                calls = list(itertools.islice(endless[name], counts[name]))
                times[name].append(_elapsed(calls, 1, lambda: None))
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def affordable(calls: Sequence[Call], call_s: float) -> Sequence[Call]:
    """As many of the calls as one round may hold, two at least: slow calls need no rotation over a cache."""
    return calls[: max(2, int(_BUDGET_S / max(call_s, 1e-6)))]


def _elapsed(calls: Sequence[Call], rounds: int, wait: Call) -> float:
    wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    wait()
    return (time.perf_counter() - begin) / (rounds * len(calls))


def device_ms(calls: Sequence[Call], call_s: float) -> float | None:
    """Milliseconds of a call on the GPU alone, from replays of a CUDA graph.

    None if the call synchronises, or takes so long that the host's share is nothing.

    The results of a round are kept, so that outputs rotate as inputs do. `call_s` is what a call takes, about.
    """
    if call_s > _BUDGET_S / 2:
        return None
    calls = affordable(calls, call_s)
    rounds = max(1, 16 // len(calls)) if call_s * 16 < _BUDGET_S else 1
    graph = _captured(calls, rounds)
    if graph is None:
        return None
    graph.replay()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (rounds * len(calls)))
    return statistics.median(times)


def _captured(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph | None:
    """Capture the calls. `torch.cuda.graph` would also collect garbage and empty the cache, which takes seconds."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(_keeper().pool())
        try:
            for _ in range(rounds):
                kept = [call() for call in calls]
                del kept
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            torch.cuda.synchronize()
            return None
        graph.capture_end()
    return graph


@functools.cache
def _keeper() -> torch.cuda.CUDAGraph:
    """A graph that is never replayed: it keeps the memory that the others share."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        torch.zeros(1, device="cuda")
        graph.capture_end()
    return graph
