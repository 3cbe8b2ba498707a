"""Streams of a copy engine that are threads, and device memory that is a file in memory: its protocol without a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from freescale.transport.cuda_streams import HANDLE_BYTES, RECEIVE, SEND
from freescale.transport.exchange import Exchange
from freescale.transport.slots import has_reached, low


def _set(event: threading.Event, adopted: Exchange) -> None:
    """Comes last in a stream, so that what it adopted is kept until then."""
    event.set()


class HostStreams:
    """Two threads that carry out, in order, what was enqueued to each.

    Args:
        delay_s: How long each copy takes at least.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], object]]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._delay_s = delay_s
        self._mapped: list[mmap.mmap] = []
        for each in self._queues:
            threading.Thread(target=self._run, args=(each,), daemon=True).start()

    def _run(self, todo: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            todo.get()()

    def adopt(self, exchange: Exchange) -> None:
        self._adopted = exchange

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        def run() -> None:
            time.sleep(self._delay_s)
            ctypes.memmove(target, source, size)

        self._queues[stream].put(run)

    copy_beside_compute = copy

    def wait(self, stream: int, address: int, count: int) -> None:
        flag = ctypes.c_uint32.from_address(address)

        def run() -> None:
            while not has_reached(flag.value, count):
                time.sleep(0.0001)

        self._queues[stream].put(run)

    def write(self, stream: int, address: int, count: int) -> None:
        flag = ctypes.c_uint32.from_address(address)

        def run() -> None:
            flag.value = low(count)

        self._queues[stream].put(run)

    def joined(self) -> Callable[[], object]:
        events = [threading.Event(), threading.Event()]
        for stream in (SEND, RECEIVE):
            self._queues[stream].put(partial(_set, events[stream], self._adopted))
        return lambda: [event.wait() for event in events]

    def allocate(self, size: int) -> tuple[int, bytes]:
        file = os.memfd_create("device memory")
        os.ftruncate(file, size)
        return self._map(file, size), f"{os.getpid()}/{file}/{size}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        pid, file, size = handle.rstrip(b"\0").decode().split("/")
        theirs = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        return self._map(theirs, int(size))

    def register(self, address: int, size: int) -> int:
        return address

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    def _map(self, file: int, size: int) -> int:
        self._mapped.append(mmap.mmap(file, size))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapped[-1]))
