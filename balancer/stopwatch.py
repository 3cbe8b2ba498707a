"""Times the compute of steps, on the host's clock or by CUDA events, and never waits for it (paper, section 4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Mark = Callable[[], Any]


@dataclass
class _Lap:
    """One step: marks that start and stop the watch, in turn."""

    label: Any
    marks: list[Any] = field(default_factory=list)


class Stopwatch:
    """Measures one step at a time; results come when they are known, some steps later on a GPU.

    Args:
        device: Where the compute runs: CUDA is timed by events on the current stream, all else by `clock`.
        clock: Seconds of the host.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._on_gpu = device.type == "cuda"
        self._clock = clock
        self._lap: _Lap | None = None
        self._finished: deque[_Lap] = deque()
        self._free: list[torch.cuda.Event] = []  # of laps that were told: to make one takes longer than to record it

    @property
    def is_timing(self) -> bool:
        """Whether a step is being timed, also where the watch is stopped for a while."""
        return self._lap is not None

    @property
    def is_running(self) -> bool:
        """Whether compute is being timed now."""
        return self._lap is not None and len(self._lap.marks) % 2 == 1

    def begin(self, label: Any) -> None:
        """Start the watch for a step; one that was not ended is forgotten."""
        self._lap = _Lap(label)
        self._mark()

    def pause(self) -> None:
        """Stop the watch where the step waits for peers."""
        if self.is_running:
            self._mark()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._lap is not None and not self.is_running:
            self._mark()

    def end(self) -> None:
        """Stop the watch; the step's time is complete."""
        if self._lap is None:
            return
        self.pause()
        self._finished.append(self._lap)
        self._lap = None

    def _mark(self) -> None:
        assert self._lap is not None
        if not self._on_gpu:
            self._lap.marks.append(self._clock())
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._lap.marks.append(event)

    def collect(self) -> list[tuple[Any, float]]:
        """Labels and seconds of the steps that are known by now, oldest first. Does not synchronise."""
        known = []
        while self._finished and (not self._on_gpu or self._finished[0].marks[-1].query()):
            lap = self._finished.popleft()
            pairs = zip(lap.marks[::2], lap.marks[1::2], strict=True)
            if self._on_gpu:
                seconds = sum(start.elapsed_time(stop) for start, stop in pairs) / 1e3
                self._free += lap.marks
            else:
                seconds = sum(stop - start for start, stop in pairs)
            known.append((lap.label, seconds))
        return known
