"""Times of small operations, on a GPU with and without the host's share, on a CPU with one thread (paper, Figure 7)."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

_REPEATS = 5
_BUDGET_S = 0.05  # what one measurement may take, about


def call_ms(calls: Sequence[Call], device: str) -> float:
    """Milliseconds of a call when calls follow each other, the host's work included; inputs rotate over `calls`."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    once = _elapsed(calls, 1, wait)
    rounds = max(1, min(50, int(_BUDGET_S / _REPEATS / max(once, 1e-6) / len(calls))))
    if once > _BUDGET_S:
        return once * 1e3
    return statistics.median(_elapsed(calls, rounds, wait) for _ in range(_REPEATS)) * 1e3


def _elapsed(calls: Sequence[Call], rounds: int, wait: Call) -> float:
    wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    wait()
    return (time.perf_counter() - begin) / (rounds * len(calls))


def device_ms(calls: Sequence[Call]) -> float | None:
    """Milliseconds of a call on the GPU alone, from replays of a CUDA graph; None if the call synchronises.

    The results of a round are kept, so that outputs rotate as inputs do.
    """
    rounds = max(1, 16 // len(calls))
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
