"""The background thread that loads, balances and queues batches ahead of the trainer (paper, section 3.1)."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from .batch import JaggedBatch
from .errors import PeerClosed, PeerFailed
from .header import State
from .protocol import LocalBatch, Protocol
from .report import Report


@dataclass
class Item:
    """A balanced batch in the queue, and the state to go on from once it was handed out."""

    batch: Any
    report: Report
    snapshot: Callable[[], dict[str, Any]]


@dataclass
class End:
    """The last entry of the queue: the end of the data, or an error."""

    error: BaseException | None


class Worker:
    """Runs one epoch in a thread: pull, flatten, three stages, restore, queue.

    Nothing here refers to the object that the user iterates, so that forgetting that object ends the thread.

    Args:
        protocol: This rank's side of the protocol.
        batches: The local batches. None when the source could not be started.
        flatten: Turns a user's batch into what the protocol takes. May raise.
        restore: Turns balanced columns into a user's batch. May raise.
        snapshot: Captures source and partitioner after a pull. May raise.
        prefetch: Batches to have ready ahead of the consumer.
        exhausted: Start as a rank whose data has ended.
        error: Why the source could not be started; told to all ranks.
    """

    def __init__(
        self,
        protocol: Protocol,
        batches: Iterator[Any],
        flatten: Callable[[Any], LocalBatch],
        restore: Callable[[JaggedBatch], Any],
        snapshot: Callable[[bool], Callable[[], dict[str, Any]]],
        *,
        prefetch: int,
        exhausted: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.queue: SimpleQueue[Item | End] = SimpleQueue()
        self._protocol = protocol
        self._batches = batches
        self._flatten = flatten
        self._restore = restore
        self._snapshot = snapshot
        self._room = threading.Semaphore(prefetch)
        self._exhausted = exhausted
        self._error = error
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="freescale-balancer", daemon=True)
        _live.add(self)
        _watch_interpreter()
        self._thread.start()

    # ---- called by the consumer's thread -----------------------------------------------------------------------------

    def take(self) -> Item | End:
        """Wait for the next entry, and make room for another."""
        entry = self.queue.get()
        self._room.release()
        return entry

    def close(self) -> None:
        """Stop after the running step; the thread tells the peers. Returns at once."""
        self._closing = True
        self._room.release()

    def fail(self, error: BaseException) -> None:
        """Stop after the running step, and tell the peers why."""
        if self._error is None:
            self._error = error
        self._room.release()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; false if it has not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._step():
                pass
        except BaseException as caught:
            error = caught
            if isinstance(caught, PeerFailed) and caught.rank == self._protocol.transport.rank:
                caught.__cause__ = caught.__cause__ or self._error
        finally:
            _live.discard(self)
            close = getattr(self._batches, "close", None)
            self._batches = iter(())
            if close is not None:
                close()
            self.queue.put(End(error))

    def _step(self) -> bool:
        """One global batch; false when no more follow."""
        self._room.acquire()
        started = time.perf_counter()
        local = self._pull()
        local.load_seconds = time.perf_counter() - started
        try:
            snapshot = self._snapshot(self._exhausted)
        except Exception as error:
            local = self._failed(error)
        outcome = self._protocol.run(local)
        if outcome.dropped:
            self._room.release()
            return True
        if outcome.columns is None or outcome.report is None:
            if outcome.left is not None and not self._closing:
                raise PeerClosed(outcome.left, self._protocol.step)
            return False
        try:
            batch = self._restore(outcome.columns)
        except Exception as error:
            self._protocol.run(self._failed(error))
        self.queue.put(Item(batch, outcome.report, snapshot))
        return True

    def _pull(self) -> LocalBatch:
        """Take the next local batch; what this rank has to say instead, when there is none."""
        if self._error is not None:
            return self._failed(self._error)
        if not (self._closing or self._exhausted):
            try:
                batch = next(self._batches)
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                return self._failed(error)
            else:
                try:
                    local = self._flatten(batch)
                except Exception as error:
                    return self._failed(error)
                if not self._closing:
                    return local
        return LocalBatch(State.CLOSING if self._closing else State.EXHAUSTED)

    def _failed(self, error: BaseException) -> LocalBatch:
        self._error = error
        return LocalBatch(State.FAILED, text=f"{type(error).__name__}: {error}")


_live: weakref.WeakSet[Worker] = weakref.WeakSet()
_watching = False


def _watch_interpreter() -> None:
    """Have peers told when this process ends: by an uncaught exception, or with a loop left half-way."""
    global _watching
    if _watching:
        return
    _watching = True
    previous = sys.excepthook

    def tell_peers(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for worker in list(_live):
            worker.fail(error)
        previous(kind, error, trace)

    sys.excepthook = tell_peers
    atexit.register(_finish)


def _finish() -> None:
    """Let threads tell their peers that this rank leaves; each wait has the transport's deadline."""
    workers = list(_live)
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join(worker._protocol.transport.timeout_s)
