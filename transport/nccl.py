"""CUDA tensors through NCCL, the baseline: its kernels take multiprocessors from compute (paper, section 5.3)."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .device_wire import Enqueued, Meet
from .errors import TransportClosed, TransportError, TransportTimeout
from .exchange import Exchange
from .watch import watch

_c10d: Any = dist  # torch's stubs lack what is used through this name
_NEVER = timedelta(days=365)  # NCCL's own deadline ends the process; ours raises


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
        self._group: _Group | None = None
        self._num_channels = 0
        self._options = dist.AllToAllOptions()
        self._lock = threading.Lock()  # the watch looks from its own thread
        self._under_way: deque[tuple[dist.Work, float, str]] = deque()
        self._failure: TransportError | None = None
        self._released = False

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        """See `Engine.begin`."""
        del meet  # NCCL has its own way
        self.raise_failure()
        if self._released:
            raise TransportClosed("another thread closed the channel")
        group = self._group = self._group or self._meet()
        sources, targets = exchange.pieces()
        stream = torch.cuda.current_stream(exchange.source.device.index)
        assert exchange.ready is not None, "only CUDA tensors come here"
        stream.wait_event(exchange.ready)  # recorded by a call that may have been on another stream
        try:
            work = group.alltoall(targets, sources, self._options)
        except RuntimeError as error:
            raise _translate(error) from error
        exchange.join = _Join(self, work)
        with self._lock:
            self._under_way.append((work, time.monotonic() + self._timeout_s, f"{exchange.operation} #{sequence}"))
            is_first = len(self._under_way) == 1
        if is_first:  # or else the watch looks already, and goes on
            watch.add(self._look)
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
        self._look()

    def _meet(self) -> _Group:
        """Wait until all ranks are here, then make the communicator. Its own making has no deadline."""
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
        return made

    def _look(self) -> bool:
        """Drop what is done; end everything when a deadline has passed. True while something is under way."""
        with self._lock:
            while self._under_way and self._under_way[0][0].is_completed():
                self._under_way.popleft()
            late = bool(self._under_way) and time.monotonic() > self._under_way[0][1]
            if late:
                self._failure = TransportTimeout(
                    f"{self._under_way[0][2]}: rank {self._rank} of {self._world_size}: NCCL has not moved the data "
                    f"{self._timeout_s:g} s after the call; which ranks are missing is not known"
                )
                self._under_way.clear()
            idle = not self._under_way
        if late or (idle and self._released):
            self._end()
        return not idle

    def _end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # local, unlike a shutdown

    def raise_failure(self) -> None:
        """See `Engine.raise_failure`."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure


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
