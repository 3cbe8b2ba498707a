"""CUDA tensors through NCCL, the baseline: its kernels take multiprocessors from compute (paper, section 5.3)."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .background import BackgroundThread, python_ends
from .device_wire import Enqueued, Meet
from .errors import TransportClosed, TransportError, TransportTimeout
from .exchange import Exchange
from .stream_pool import fill_pool
from .watch import watch

_c10d: Any = dist  # torch's stubs lack what is used through this name
_NEVER = timedelta(days=365)  # NCCL's own deadline ends the process; ours raises
_PATIENCE_S = 2.0  # of whoever closes a channel, until its communicator is gone
_NAP_S = 0.05


class _Group(Protocol):
    """What is used here of torch.distributed.ProcessGroupNCCL."""

    def alltoall(self, targets: list[Tensor], sources: list[Tensor], options: object) -> dist.Work: ...

    def abort(self) -> None: ...


class NcclEngine:
    """An NCCL communicator of the channel's own, made by the first CUDA tensor that the channel moves.

    A channel that never moves one costs neither time nor device memory. Making it is collective, as is the operation
    that causes it, and comes after all ranks are known to have come. Operations are enqueued on NCCL's own stream.

    Args:
        store: Where the ranks find each other, for this engine alone.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline of every transfer, in seconds, from its beginning on the host.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._communicator: _Communicator | None = None
        self._num_channels = 0
        self._options = dist.AllToAllOptions()
        self._failure: TransportError | None = None
        self._released = False

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        """See `Engine.begin`."""
        del meet  # NCCL has its own way
        self.raise_failure()
        if self._released:
            raise TransportClosed("another thread closed the channel")
        device = exchange.source.device.index or 0
        communicator = self._communicator = self._communicator or self._meet(device)
        group = communicator.group
        if group is None:
            raise TransportClosed("another thread closed the channel")
        sources, targets = exchange.pieces()
        stream = torch.cuda.current_stream(device)
        assert exchange.ready is not None, "only CUDA tensors come here"
        stream.wait_event(exchange.ready)  # recorded by a call that may have been on another stream
        try:
            work = group.alltoall(targets, sources, self._options)
        except RuntimeError as error:
            raise _translate(error) from error
        exchange.join = _Join(self, work)
        call = f"{exchange.operation} #{sequence}"
        if communicator.under_way.add(work, time.monotonic() + self._timeout_s, call):
            watch.add(self._look)  # or else it looks already, and goes on
        return Enqueued()

    def split(self, timeout_s: float) -> NcclEngine:
        """See `Engine.split`."""
        self._num_channels += 1
        store = _c10d.PrefixStore(str(self._num_channels), self._store)
        return NcclEngine(store, self._rank, self._world_size, timeout_s)

    def release(self, reason: BaseException | None) -> None:
        """See `Engine.release`. What is under way is left to end by itself."""
        del reason
        self._released = True
        if self._communicator is not None:
            self._communicator.end_when_idle()

    def _meet(self, device: int) -> _Communicator:
        """Wait until all ranks are here, then make the communicator. Its own making has no deadline."""
        if python_ends():
            raise TransportClosed("the process ends: no communicator can be made any more")
        fill_pool(device)
        keys = [f"here/{rank}" for rank in range(self._world_size)]
        try:
            self._store.set(keys[self._rank], b"1")
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TransportTimeout(
                f"rank {self._rank} of {self._world_size} waited {self._timeout_s:g} s for the others to make an NCCL "
                f"communicator; missing: ranks {missing}"
            ) from error
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        try:
            made: _Group = _c10d.ProcessGroupNCCL(self._store, self._rank, self._world_size, options)
        except RuntimeError as error:
            raise _translate(error) from error
        communicator = _Communicator(made)
        weakref.finalize(self, communicator.ask).atexit = False  # for a channel that nobody closes
        return communicator

    def _look(self) -> bool:
        """Drop what is done; end everything when a deadline has passed. True while something is under way."""
        communicator = self._communicator
        if communicator is None or communicator.under_way.is_over():
            return False
        late = communicator.under_way.late()
        if late is None:
            return True
        self._failure = TransportTimeout(
            f"{late}: rank {self._rank} of {self._world_size}: NCCL has not moved the data "
            f"{self._timeout_s:g} s after the call; which ranks are missing is not known"
        )
        communicator.cut()
        return False

    def raise_failure(self) -> None:
        """See `Engine.raise_failure`."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure


class _UnderWay:
    """Operations that have been enqueued, in order. Several threads look. An operation keeps what it brings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: deque[tuple[dist.Work, float, str]] = deque()
        self._is_watched = False

    def add(self, work: dist.Work, deadline: float, call: str) -> bool:
        """True if somebody has to begin to look; what is done is dropped, long before who looks comes to it."""
        with self._lock:
            self._drop_what_is_done()
            self._all.append((work, deadline, call))
            is_watched, self._is_watched = self._is_watched, True
            return not is_watched

    def is_over(self) -> bool:
        """Drop what is done; whether all is, so that nobody needs to look."""
        with self._lock:
            self._drop_what_is_done()
            self._is_watched = bool(self._all)
            return not self._all

    def _drop_what_is_done(self) -> None:
        while self._all and _is_done(self._all[0][0]):
            self._all.popleft()

    def late(self) -> str | None:
        """The first call, if its deadline has passed: then nothing counts as under way any more."""
        with self._lock:
            if not self._all or time.monotonic() <= self._all[0][1]:
                return None
            call = self._all[0][2]
            self._all.clear()
            return call


def _is_done(work: dist.Work) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:  # the device has failed, and with it whatever was enqueued
        return True


class _Communicator:
    """An NCCL communicator, and the thread that aborts it.

    Who aborts a communicator waits for all that the GPU has to do: NCCL gives back memory. Where a kernel of another
    communicator waits for a peer that is gone, that is over when it is aborted too. So each has a thread of its own,
    nobody waits for one without a deadline, and all end side by side, those of a process that ends too. (Python 3.12
    starts none then.)

    Attributes:
        group: The communicator; None once it is gone.
        under_way: What was enqueued.
    """

    def __init__(self, group: _Group) -> None:
        self.group: _Group | None = group
        self.under_way = _UnderWay()
        self._asked, self._at_once = threading.Event(), threading.Event()
        self._thread = BackgroundThread("freescale end of NCCL", self._run, self.ask, self.cut)
        self._thread.start()

    def ask(self) -> None:
        """Abort it when nothing is under way any more."""
        self._asked.set()

    def cut(self) -> None:
        """Abort it now. Does not wait."""
        self._at_once.set()
        self._asked.set()

    def end_when_idle(self) -> None:
        """Abort it when nothing is under way any more; if that is so now, wait for it, for seconds at most."""
        self.ask()
        if self.under_way.is_over():
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        self._asked.wait()
        while not (self._at_once.is_set() or self.under_way.is_over()):
            self._at_once.wait(_NAP_S)
        group, self.group = self.group, None
        assert group is not None, "it is aborted once"
        group.abort()  # local, unlike a shutdown


class _Join:
    """Makes the current stream wait for NCCL's."""

    def __init__(self, engine: NcclEngine, work: dist.Work) -> None:
        self._engine, self._work = engine, work

    def __call__(self) -> None:
        self._engine.raise_failure()
        self._work.wait()


def _translate(error: RuntimeError) -> TransportError:
    text = str(error).strip().splitlines()
    return TransportError(f"NCCL: {text[0] if text else repr(error)}")
