"""An RDMA network inside one process, behind the same interface as the libraries: for bookkeeping and faults only.

Writes go from registered memory to registered memory with the checks that a card makes; a thread of none delivers them:
whoever writes does. What a real card does beside is tested between virtual machines, in tests/rdma.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freescale.transport import Transport
from freescale.transport.lane import open_lane
from freescale.transport.verbs.binding import Address, Completion, Pair, Queue, Region, explain_status
from freescale.transport.verbs.device import Port
from freescale.transport.verbs.memory import Kept
from freescale.transport.verbs.opened import Device
from freescale.transport.verbs.trace import ChunkEvent
from freescale.transport.verbs.wire import VerbsWire

FLUSHED, REMOTE_ACCESS, NO_ANSWER = 5, 10, 12


@dataclass
class Network:
    """What connects the cards.

    Attributes:
        refuse: May return a status for a write (pair, bytes, tag): it fails with that.
        alter: May change tag and bytes of a write on its way.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    pairs: dict[int, FakePair] = field(default_factory=dict)
    regions: dict[int, tuple[int, int]] = field(default_factory=dict)
    next_number: int = 16
    num_registered: int = 0
    refuse: Callable[[FakePair, int, int | None], int] = lambda *_: 0
    alter: Callable[[FakePair, int, int | None], tuple[int, int | None]] = lambda _pair, size, tag: (size, tag)

    def number(self) -> int:
        self.next_number += 1
        return self.next_number


class FakeRegion:
    def __init__(self, network: Network, memory: NDArray[np.uint8]) -> None:
        self._network = network
        with network.lock:
            self.local_key = self.remote_key = network.number()
            network.regions[self.local_key] = (memory.ctypes.data, memory.ctypes.data + memory.nbytes)
            network.num_registered += 1

    def close(self) -> None:
        with self._network.lock:
            del self._network.regions[self.local_key]


class FakeQueue:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.done: deque[Completion] = deque()
        self.is_armed = self.is_closed = False

    def add(self, done: Completion) -> None:
        self.done.append(done)
        if self.is_armed and not self.is_closed:
            self.is_armed = False
            os.eventfd_write(self.fd, 1)

    def poll(self, most: int) -> list[Completion]:
        with self._network.lock:
            return [self.done.popleft() for _ in range(min(most, len(self.done)))]

    def arm(self) -> None:
        with self._network.lock:
            self.is_armed = True

    def acknowledge(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._network.lock:
            self.is_closed = True
            os.close(self.fd)


class FakePair:
    def __init__(self, network: Network, queue: FakeQueue, sends: int, receives: int) -> None:
        self._network, self.queue = network, queue
        self._most_receives, self.num_receives = receives, 0
        self.peer: int | None = None
        self.failure = 0
        self._waiting: deque[tuple[FakePair, int, int | None, int]] = deque()
        with network.lock:
            self.number = network.number()
            network.pairs[self.number] = self

    def connect(self, peer: Address, first_packet: int, ack_timeout: int) -> None:
        self.peer = peer.number

    def expect(self, count: int) -> None:
        with self._network.lock:
            self.num_receives += count
            assert self.num_receives <= self._most_receives, "more receives than the pair was made for"
            while self._waiting and self.num_receives:
                self._arrive(*self._waiting.popleft())

    def write(
        self, work: int, source: tuple[int, int, int], remote_address: int, remote_key: int, tag: int | None
    ) -> None:
        with self._network.lock:
            size, tag = self._network.alter(self, source[1], tag)
            other = self._network.pairs.get(self.peer or 0)
            status = FLUSHED if self.failure else self._network.refuse(self, size, tag)
            if not status and other is None:
                status = NO_ANSWER
            if not status and size:
                status = self._copy((source[0], size, source[2]), remote_address, remote_key)
            if status or other is None:
                self.failure = self.failure or status
                self.queue.add(Completion(work, self.number, explain_status(status), 0, 0))
            elif tag is None or other.num_receives:
                other._arrive(self, work, tag, size)
            else:
                other._waiting.append((self, work, tag, size))

    def _copy(self, source: tuple[int, int, int], address: int, key: int) -> int:
        for begin, size, which in (source, (address, source[1], key)):
            first, last = self._network.regions.get(which, (0, 0))
            if not first <= begin <= begin + size <= last:
                return REMOTE_ACCESS
        ctypes.memmove(address, source[0], source[1])
        return 0

    def _arrive(self, sender: FakePair, work: int, tag: int | None, size: int) -> None:
        if tag is not None:
            self.num_receives -= 1
            self.queue.add(Completion(0, self.number, "", tag, size))
        sender.queue.add(Completion(work, sender.number, "", 0, 0))

    def close(self) -> None:
        with self._network.lock:
            self._network.pairs.pop(self.number, None)


class FakeCard:
    error: type[Exception] = OSError
    lid, mtu = 0, 5
    most_message_bytes, most_completions = 2**23, 2**15

    def __init__(self, network: Network) -> None:
        self.network = network
        self.is_closed = False

    def register(self, memory: NDArray[np.uint8]) -> Region:
        return FakeRegion(self.network, memory)

    def make_queue(self, depth: int) -> Queue:
        return FakeQueue(self.network)

    def make_pair(self, queue: Queue, sends: int, receives: int) -> Pair:
        assert isinstance(queue, FakeQueue)
        return FakePair(self.network, queue, sends, receives)

    def close(self) -> None:
        self.is_closed = True


def connect_fakes(
    network: Network,
    world_size: int,
    *,
    timeout_s: float = 120.0,
    chunk_bytes: int = 2**16,
    traces: list[list[ChunkEvent]] | None = None,
) -> list[Transport]:
    """Make ranks that are threads of this process, over a fake network."""
    port = Port("fake0", 1, True, 0, bytes(range(16)))
    wires = []
    for rank in range(world_size):
        card = FakeCard(network)
        trace = None if traces is None else traces[rank]
        wires.append(VerbsWire(Device(card, port, "ibverbs", 14, trace, Kept(card)), rank, world_size, chunk_bytes))
    described = [wire.describe() for wire in wires]
    for rank, wire in enumerate(wires):
        wire.attach(np.stack([theirs[rank] for theirs in described]))
    lanes: dict[int, Transport] = {}

    def open_one(rank: int) -> None:
        lanes[rank] = open_lane(wires[rank], "main", rank, world_size, timeout_s, True)

    threads = [threading.Thread(target=open_one, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return [lanes[rank] for rank in range(world_size)]
