"""Loads, balances and queues batches ahead of the trainer, in a thread or at the trainer's hooks (paper, section 3.1).

Whoever runs it, an epoch is one generator that pauses where messages are on the way. A thread resumes it at once and
waits. Hooks resume it where nothing is to be waited for, and `take` does what hooks have not done.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from ..kernels.one_core import use_one_core
from ..kernels.traced import traced
from ..transport import TransportError
from ..transport.background import BackgroundThread, python_ends
from .batches.batch import JaggedBatch
from .errors import BalancerError, PeerClosed, PeerFailed, describe
from .protocol.header import State
from .protocol.protocol import Protocol
from .protocol.step import LocalBatch, Posted
from .report import Report
from .source import Source


@dataclass
class Item:
    """A balanced batch in the queue, and the state to go on from once it was handed out. `scraps`: see `Outcome`."""

    batch: Any
    report: Report
    state: dict[str, Any]
    scraps: Sequence[object] = ()


@dataclass
class End:
    """The last entry of the queue: the end of the data with the state that begins the next epoch, or an error."""

    error: BaseException | None
    state: dict[str, Any]


class _Room:
    """A semaphore in C: the one of `threading` takes dozens of calls in Python, from a trainer that waits for them."""

    def __init__(self, size: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(size):
            self._free.put(None)
        self.acquire = self._free.get  # waits

    def acquire_at_once(self) -> bool:
        """As `acquire`, but false instead of waiting."""
        try:
            self._free.get_nowait()
        except Empty:
            return False
        return True

    def release(self) -> None:
        """Make room for one more."""
        self._free.put(None)


class Worker:
    """Runs one epoch: pull, flatten, three stages, restore, queue.

    Nothing here refers to the object that the user iterates, so that forgetting that object ends the thread.

    Args:
        protocol: This rank's side of the protocol.
        batches: The local batches. None when the source could not be started.
        flatten: Turns a user's batch into what the protocol takes. May raise.
        restore: Turns balanced columns into a user's batch. May raise.
        source: What they come from; says where it stands, for the state that goes with each batch. May raise.
        prefetch: Batches to have ready ahead of the consumer.
        epoch: Number of the epoch.
        end_state: For a rank whose data has ended before: how its source begins the next epoch.
        exhausted: Start as a rank whose data has ended.
        error: Why the source could not be started; told to all ranks.
        paced: Run where `advance` and `take` are called, instead of in a thread, until `run_freely` or `close`.
    """

    def __init__(
        self,
        protocol: Protocol,
        batches: Iterator[Any],
        flatten: Callable[[Any], LocalBatch],
        restore: Callable[[JaggedBatch], Any],
        source: Source,
        *,
        prefetch: int,
        epoch: int = 0,
        exhausted: bool = False,
        end_state: Any = None,
        error: BaseException | None = None,
        paced: bool = False,
    ) -> None:
        self.queue: SimpleQueue[Item | End] = SimpleQueue()
        self._protocol = protocol
        self._batches = batches
        self._flatten = flatten
        self._restore = restore
        self._source = source
        self._epoch = epoch
        self._end_state = end_state
        # At hooks one is ready while the next is under way, or there would be nothing to do between two steps.
        self._room = _Room(max(prefetch, 2) if paced else prefetch)
        self._exhausted = exhausted
        self._error = error
        self._closing = False
        self._run = self._epoch_steps()
        self._posted: Posted | None = None  # what the generator would wait for; None between steps
        self._ended = False
        self._driving = threading.Lock()  # held by whoever resumes the generator
        self._thread: BackgroundThread | None = None
        _live[self] = None
        _watch_interpreter()
        if not paced:
            self.run_freely()

    # ---- called by the consumer's thread

    def advance(self, passing: Collection[str]) -> None:
        """Go on as far as is possible without waiting. Does nothing when a thread runs the epoch.

        Args:
            passing: Stages whose messages, once they have arrived, may be taken in, and what follows be done. "load":
                a step may be begun.
        """
        while self._thread is None and self._driving.acquire(blocking=False):
            try:
                begins = self._posted is None
                if self._ended or not self._may_go_on(passing):
                    return
                self._resume()
                if begins:  # the rest is for later moments, though peers may have answered already
                    return
            finally:
                self._driving.release()

    def take(self, *, makes_room: bool = True) -> Item | End:
        """Wait for the next entry, and make room for another, or leave that to `make_room`."""
        with contextlib.ExitStack() as stack:
            if self._thread is None:
                stack.enter_context(self._driving)
            while self._thread is None and self.queue.empty() and not self._ended:
                if self._posted is None:
                    self._room.acquire_at_once()
                self._resume()
        entry = self.queue.get()
        if isinstance(entry, Item):
            entry.scraps = ()  # before there is room: to free tensors lets the thread in, which then has work to do
        if makes_room:
            self._room.release()
        if isinstance(entry, End):
            self.queue.put(entry)  # whoever asks again, from any thread, gets it again
            # An interpreter that ends while the thread is about to end would end with an abort.
            self.join(_ENDING_S)
        return entry

    def make_room(self) -> None:
        """Have another batch made: once for each entry that was taken without."""
        self._room.release()

    def close(self) -> None:
        """Stop after the running step; the thread tells the peers. Returns at once."""
        self._closing = True
        self._room.release()
        self.run_freely()

    def fail(self, error: BaseException) -> None:
        """Stop after the running step, and tell the peers why."""
        if self._error is None:
            self._error = error
        self._room.release()
        self.run_freely()

    def run_freely(self) -> None:
        """Leave the rest of the epoch to a thread; where Python ends, and begins no more threads, to the caller."""
        if self._thread is not None or self._ended:
            return
        if python_ends():
            self._run_to_the_end()
            return
        cut = self._protocol.transport.close
        self._thread = BackgroundThread("freescale-balancer", self._run_to_the_end, self.close, cut)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; false if it has not."""
        if self._thread is None:
            return self._ended
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- whoever runs the epoch

    def _run_to_the_end(self) -> None:
        use_one_core()  # as the workers of a DataLoader do: this is beside a trainer, which has use for the others
        with self._driving:
            while not self._ended:
                if self._posted is None:
                    self._room.acquire()
                self._resume()

    def _may_go_on(self, passing: Collection[str]) -> bool:
        if self._posted is None:
            return "load" in passing and self._room.acquire_at_once()
        return self._posted.stage in passing and self._posted.work.test()

    def _resume(self) -> None:
        """Go on to the next point where messages are on the way, or between two steps."""
        with traced(f"freescale.balancer {self._posted.stage if self._posted else 'load'}"):
            self._posted = next(self._run, None)

    def _epoch_steps(self) -> Generator[Posted | None, None, None]:
        error: BaseException | None = None
        state: dict[str, Any] = {}
        try:
            while (yield from self._step()):
                yield None
            self._protocol.step = self._protocol.dropped_samples = 0
            state = loop_state(self._protocol, self._epoch + 1, False, self._end_state)
        except BaseException as caught:
            error = caught
            if isinstance(caught, PeerFailed) and caught.rank == self._protocol.transport.rank:
                caught.__cause__ = caught.__cause__ or self._error
        try:
            batches, self._batches = self._batches, iter(())
            if isinstance(batches, Generator):  # anything else is the user's, and may be wanted again
                batches.close()
        except BaseException as caught:
            error = error or caught
        finally:  # an error keeps this frame, and on some Pythons a closed generator keeps the user's iterator
            del batches
        self._ended = True
        self.queue.put(End(error, state))

    def _step(self) -> Generator[Posted, None, bool]:
        """One global batch; false when no more follow."""
        started = time.perf_counter()
        local, source_state = self._pull()
        local.load_seconds = time.perf_counter() - started
        try:
            outcome = yield from self._protocol.stages(local)
            if outcome.dropped:
                self._room.release()
                return True
            if outcome.columns is None or outcome.report is None:
                if outcome.left is not None and not self._closing:
                    raise PeerClosed(outcome.left, self._protocol.step)
                return False
            batch = self._restore(outcome.columns)
            state = loop_state(self._protocol, self._epoch, self._exhausted, source_state)
        except BaseException as error:
            if self._protocol.alone:  # peers are done with the step: tell them at the next one
                yield from self._protocol.stages(self._failed(error))
            elif not isinstance(error, BalancerError | TransportError):
                # Peers do not know, and wait in an exchange that this rank will not join.
                self._protocol.transport.close()
            raise
        self.queue.put(Item(batch, outcome.report, state, outcome.scraps))
        return True

    def _pull(self) -> tuple[LocalBatch, Any]:
        """Take the next local batch, or what this rank says instead, and where the source stands then."""
        if self._error is not None:
            return self._failed(self._error), None
        try:
            if not (self._closing or self._exhausted):
                batch = next(self._batches, _NO_MORE)
                if batch is _NO_MORE:
                    self._exhausted, self._end_state = True, self._source.end_state()
                else:
                    local = self._flatten(batch)
                    if not self._closing:
                        return local, self._source.state(local.fingerprint)
        except BaseException as error:
            return self._failed(error), None
        return LocalBatch(State.CLOSING if self._closing else State.EXHAUSTED), self._end_state

    def _failed(self, error: BaseException) -> LocalBatch:
        self._error = error
        return LocalBatch(State.FAILED, text=describe(error))


def loop_state(protocol: Protocol, epoch: int, exhausted: bool, source_state: Any) -> dict[str, Any]:
    """What to load to go on with the protocol's next step."""
    partitioner = protocol.partitioner
    learned = partitioner.state_dict() if hasattr(partitioner, "state_dict") else None
    return {
        "rank": protocol.transport.rank,
        "world_size": protocol.transport.world_size,
        "step": protocol.step,
        "epoch": epoch,
        "source": source_state,
        "exhausted": exhausted,
        "dropped_samples": protocol.dropped_samples,
        "partitioner": copy.deepcopy(learned) if learned else learned,
    }


_NO_MORE = object()
_ENDING_S = 5.0  # more than a thread needs that has nothing left to do
# In order, the same on all ranks: those without a thread wait for their peers one after the other. A thread keeps its
# worker until it ends.
_live: weakref.WeakKeyDictionary[Worker, None] = weakref.WeakKeyDictionary()
_watching = False
_process_failed = False
_GRACE_S = 5.0  # for peers to hear why this process ends; they may be waiting for it elsewhere


def _watch_interpreter() -> None:
    """Have peers told when this process ends: by an uncaught exception, or with a loop left half-way."""
    global _watching
    if _watching:
        return
    _watching = True
    previous = sys.excepthook

    def tell_peers(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _process_failed
        _process_failed = True
        for worker in list(_live):
            worker.fail(error)
        previous(kind, error, trace)

    sys.excepthook = tell_peers
    atexit.register(_finish)


def _finish() -> None:
    """Let threads tell their peers that this rank leaves; each wait has a deadline.

    Threads that have told them and are about to end are waited for too: one that drops its last tensors while the
    interpreter ends takes the process down with it.
    """
    workers = list(_live)
    for worker in workers:
        worker.close()
    for worker in workers:
        transport = worker._protocol.transport
        if not worker.join(min(transport.timeout_s, _GRACE_S) if _process_failed else transport.timeout_s):
            transport.close()  # ends what the thread waits for: it must not outlive the interpreter
            worker.join(_GRACE_S)
