"""One epoch of a balanced loader, as whoever iterates it has it (paper, section 3.1)."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from .report import Report
from .worker import End, Worker

if TYPE_CHECKING:
    from .loader import BalancedLoader

T = TypeVar("T")


class BalancedIterator(Generic[T]):
    """One epoch of a balanced loader. Forgetting it leaves the epoch."""

    def __init__(self, loader: BalancedLoader[T], worker: Worker) -> None:
        self.loader = loader
        self._worker: Worker | None = worker
        self._leave = weakref.finalize(self, worker.close)
        self._leave.atexit = False

    def __iter__(self) -> BalancedIterator[T]:
        return self

    def __next__(self) -> tuple[T, Report]:
        if self._worker is None:
            raise StopIteration
        if self.loader._worker is not self._worker:
            raise RuntimeError("this iteration was left when its loader was closed, loaded a state or iterated again")
        loader, started = self.loader, time.perf_counter()
        loader.wake_thread()
        sleeps = loader.lets_thread_sleep  # once: another thread may change it while this one waits
        entry = self._worker.take(makes_room=not sleeps)
        if sleeps:
            loader._without_room = self._worker
        if isinstance(entry, End):
            self._worker = None
            self._leave.detach()
            if entry.error is not None:
                self.loader.forget_loaded_state()
                raise entry.error
            self.loader._finished(entry.state)
            raise StopIteration
        entry.report.exposed_seconds = time.perf_counter() - started
        self.loader._hand_out(entry.report, entry.state)
        return entry.batch, entry.report
