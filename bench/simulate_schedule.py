"""Vector clocks of many ranks: what each computes, waits for and sends, event after event (paper, Figures 1 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COMPUTE, WAIT, TRANSFER, HOST, BACKGROUND = "compute", "wait", "exposed transfer", "host", "background transfer"


@dataclass(frozen=True)
class Interval:
    """One event on all ranks.

    Attributes:
        kind: One of the names above.
        name: What it is.
        start: When it begins on each rank, seconds. Shape [world_size].
        end: When it ends. Shape [world_size].
    """

    kind: str
    name: str
    start: Floats
    end: Floats


class Schedule:
    """Three clocks a rank: the stream that computes, the network behind it, and the host that launches both.

    Collectives start when the last rank has come. What runs in the background takes the network in the order in which
    it was put there, and may slow the computing that it overlaps.

    Args:
        world_size: Number of ranks.
        contention: By how much computing slows while a transfer with SMs runs behind it: 0.1 is 10 percent.

    Example:
        >>> schedule = Schedule(2)
        >>> schedule.compute("forward", np.array([1.0, 3.0]))
        >>> schedule.exchange("rows", 0.5)
        >>> schedule.now.tolist(), schedule.spent(WAIT).tolist()
        ([3.5, 3.5], [2.0, 0.0])
    """

    def __init__(self, world_size: int, contention: float = 0.0) -> None:
        self.now = np.zeros(world_size)
        self.intervals: list[Interval] = []
        self.step_ends: list[float] = []
        self._network = np.zeros(world_size)
        self._launched = np.zeros(world_size)
        self._begun = [np.zeros(world_size)] * 2  # the steps before this one and before that
        self._contention = contention
        self._busy: list[tuple[float, float]] = []  # transfers with SMs in the background, the same on all ranks

    def compute(self, name: str, seconds: Floats) -> None:
        """Compute on every rank."""
        end = self.now + seconds
        for _ in range(3):  # slower computing overlaps with more of the transfers; three rounds settle it
            overlap = sum(
                (np.clip(np.minimum(end, last) - np.maximum(self.now, first), 0, None) for first, last in self._busy),
                np.zeros(len(self.now)),
            )
            end = self.now + seconds + np.where(seconds > 0, self._contention * overlap, 0.0)
        self._to(COMPUTE, name, end)

    def host(self, name: str, seconds: float) -> None:
        """Let the host hold everything up."""
        self._to(HOST, name, self.now + seconds)

    def launch(self, name: str, seconds: float) -> None:
        """Hold the step up that was computed last until the host has launched it; hosts are a step ahead at most."""
        self._launched = np.maximum(self._launched, self._begun[0]) + seconds
        self._to(HOST, name, np.maximum(self.now, self._launched))

    def exchange(self, name: str, seconds: float) -> None:
        """Run a collective in the way of everything: wait for the slowest rank, then for the transfer."""
        begin = float(self.now.max())
        self._to(WAIT, f"wait: {name}", np.full_like(self.now, begin))
        self._to(TRANSFER, name, self.now + seconds)

    def background(self, name: str, seconds: float, after: Floats | None = None, with_sms: bool = True) -> Floats:
        """Run a collective behind what is computed.

        Args:
            name: What it is.
            seconds: How long it takes once the last rank has come.
            after: When each rank can start; now if None.
            with_sms: Whether it slows computing.

        Returns:
            When it is done on each rank.
        """
        begin = float(np.maximum(self.now if after is None else after, self._network).max())
        start, end = np.full_like(self.now, begin), np.full_like(self.now, begin + seconds)
        self.intervals.append(Interval(BACKGROUND, name, start, end))
        self._network = end
        if with_sms:
            self._busy.append((begin, begin + seconds))
        return end

    def wait_for(self, name: str, ready: Floats) -> None:
        """Wait until something that ran in the background is there; what is left of it is exposed."""
        self._to(TRANSFER, f"rest of {name}", np.maximum(self.now, ready))

    def end_step(self) -> None:
        """Note that a step is over once the last rank is here; for a trace."""
        self.step_ends.append(float(self.now.max()))
        self._begun = [self._begun[1], self.now]

    def spent(self, kind: str, since: float = 0.0) -> Floats:
        """Seconds of a kind on each rank, of events that begin at or after a time. Shape [world_size]."""
        return sum(
            (
                each.end - each.start
                for each in self.intervals
                if each.kind == kind and float(each.start.min()) >= since
            ),
            np.zeros(len(self.now)),
        )

    def _to(self, kind: str, name: str, end: Floats) -> None:
        if (end > self.now).any():
            self.intervals.append(Interval(kind, name, self.now, end))
        self.now = end
