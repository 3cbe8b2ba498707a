"""Streams of a copy engine that are threads, and other ranks' memory by way of /proc: its protocol without a GPU."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from freescale.transport.cuda_streams import HANDLE_BYTES, RECEIVE, SEND
from freescale.transport.errors import Unavailable
from freescale.transport.exchange import Exchange
from freescale.transport.slots import has_reached, low

_PID_SHIFT = 48
_PR_SET_PTRACER = 0x59616D61


def _await(address: int, count: int) -> None:
    flag = ctypes.c_uint32.from_address(address)
    while not has_reached(flag.value, count):
        time.sleep(0.0001)


def _move(target: int, source: int, size: int) -> None:
    """Copy within this process, or to or from another."""
    into, out_of = target >> _PID_SHIFT, source >> _PID_SHIFT
    if not into and not out_of:
        ctypes.memmove(target, source, size)
        return
    file = os.open(f"/proc/{into or out_of}/mem", os.O_RDWR)
    try:
        if into:
            data = ctypes.string_at(source, size)
            assert os.pwrite(file, data, target - (into << _PID_SHIFT)) == size
        else:
            data = os.pread(file, size, source - (out_of << _PID_SHIFT))
            ctypes.memmove(target, data, size)
    finally:
        os.close(file)


def _set(event: threading.Event, adopted: Exchange) -> None:
    """Comes last in a stream, so that what it adopted is kept until then."""
    event.set()


_all: list[HostStreams] = []
_driver = threading.RLock()


def _synchronise() -> None:
    """As CUDA does before it registers memory: nobody enqueues until all streams of the process have come to an end."""
    with _driver:
        ended = []
        for streams in tuple(_all):
            for each in streams._queues:
                ended.append(threading.Event())
                each.put(ended[-1].set)
        for event in ended:
            event.wait()


class HostStreams:
    """Two threads that carry out, in order, what was enqueued to each.

    Attributes:
        synchronises: Registering memory waits for all streams of the process, and lets nobody enqueue meanwhile.
        most: How many channels of the process may use streams at once.

    Args:
        delay_s: How long each copy of the receiving stream takes at least, so that senders could overrun it.
    """

    synchronises = False
    most = 1000
    in_use: set[HostStreams] = set()  # noqa: RUF012 - of all of them

    def __init__(self, delay_s: float = 0.0) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], object]]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._delay_s = delay_s
        self.before_ready: Callable[[], object] | None = None  # what the next exchange has to come after
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # ranks read each other's memory
        for each in self._queues:
            threading.Thread(target=self._run, args=(each,), daemon=True).start()
        _all.append(self)

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def use(self) -> None:
        self.in_use.add(self)
        if len(self.in_use) > self.most:
            self.in_use.discard(self)
            raise Unavailable(f"{self.most} channels of this process move tensors already")

    def rest(self) -> None:
        self.in_use.discard(self)

    def _run(self, todo: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            todo.get()()

    def adopt(self, exchange: Exchange, sends: bool = True) -> None:
        self._adopted = exchange
        if self.before_ready is not None:
            for each in self._queues:
                each.put(self.before_ready)
            self.before_ready = None

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        def run() -> None:
            if stream == RECEIVE and self._delay_s:
                time.sleep(self._delay_s)
            _move(target, source, size)

        self._put(stream, run)

    def _put(self, stream: int, todo: Callable[[], object]) -> None:
        if self.synchronises:
            with _driver:
                pass
        self._queues[stream].put(todo)

    def wait(self, stream: int, address: int, count: int) -> None:
        self._put(stream, partial(_await, address, count))

    def write(self, stream: int, address: int, count: int) -> None:
        flag = ctypes.c_uint32.from_address(address)

        def run() -> None:
            flag.value = low(count)

        self._put(stream, run)

    def joined(self, flags: Sequence[tuple[int, int]] = (), sends: bool = True) -> Callable[[], object]:
        events = []
        for stream in (SEND, RECEIVE) if sends else (RECEIVE,):
            events.append(threading.Event())
            self._queues[stream].put(partial(_set, events[-1], self._adopted))

        def join() -> None:
            for event in events:
                event.wait()
            for address, count in flags:
                _await(address, count)

        return join

    def identify(self, address: int) -> tuple[object, int]:
        return "all memory", 0

    def export(self, base: int) -> bytes:
        return str(os.getpid()).encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        return int(handle.rstrip(b"\0")) << _PID_SHIFT

    def register(self, address: int, size: int) -> int:
        if self.synchronises:
            _synchronise()
        return address

    def pinned(self, size: int) -> Tensor:
        if self.synchronises:
            _synchronise()
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
