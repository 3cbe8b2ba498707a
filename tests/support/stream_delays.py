"""Random delays on every stream, and poison in every buffer that is free: what waits for too little shows.

With threads as streams (`LateStreams`) and on GPUs (`delays_on_gpus`); `Poisoning` works over either.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from freescale.transport import Pending, Transport
from freescale.transport.cuda_streams import CudaStreams
from freescale.transport.exchange import Exchange
from freescale.transport.layouts import Splits
from freescale.transport.pinned_slots import PinnedSlots

from host_streams import HostStreams

POISON = 0xFF  # bytes that are NaN in every floating type, and -1 in every signed integer
MOST_CYCLES = 2_000_000  # about a millisecond


def poison(memory: Tensor) -> None:
    """Make a tensor worthless, on the current stream."""
    if memory.numel():
        memory.detach().view(-1).view(torch.uint8).fill_(POISON)


class Poisoning(Transport):
    """Sends copies that are worthless as soon as a transfer is over, and receives in memory that was worthless before.

    Whoever reads rows before their `wait`, or lets `wait` come back before all is read, gets NaN.

    Args:
        inner: What moves the data.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.timeout_s, self.check_sizes = inner.timeout_s, inner.check_sizes

    def all_gather(self, block: Tensor, sizes: Splits | None = None, out: Tensor | None = None) -> Pending:
        """See `Transport.all_gather`."""
        sent = self._prepare(block, out)
        return _Spoiled(self._inner.all_gather(sent, sizes, out), sent)

    def all_to_all(
        self, rows: Tensor, sent_splits: Splits, received_splits: Splits, out: Tensor | None = None
    ) -> Pending:
        """See `Transport.all_to_all`."""
        sent = self._prepare(rows, out)
        return _Spoiled(self._inner.all_to_all(sent, sent_splits, received_splits, out), sent)

    def channel(self, name: str, check_sizes: bool | None = None) -> Transport:
        """See `Transport.channel`."""
        return Poisoning(self._inner.channel(name, check_sizes))

    def raise_if_failed(self) -> None:
        """See `Transport.raise_if_failed`."""
        self._inner.raise_if_failed()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    @staticmethod
    def _prepare(rows: Tensor, out: Tensor | None) -> Tensor:
        if out is not None:
            poison(out)
        return rows.detach().clone(memory_format=torch.contiguous_format)


class _Spoiled(Pending):
    def __init__(self, inner: Pending, sent: Tensor) -> None:
        self._inner, self._sent = inner, sent

    def test(self) -> bool:
        return self._inner.test()

    def wait(self) -> Tensor:
        arrived = self._inner.wait()
        poison(self._sent)
        return arrived


class _Kernel:
    """What writes a tensor that is to be sent, and reads for the last time the memory where something is to arrive.

    Until it has run, once, by whichever stream comes first, both are worthless.
    """

    def __init__(self, exchange: Exchange, seconds: float) -> None:
        self._source, self._target, self._seconds = exchange.source, exchange.target, seconds
        self._result: Tensor | None = exchange.source.clone()
        self._lock = threading.Lock()
        poison(self._source)

    def __call__(self) -> None:
        with self._lock:
            if self._result is not None:
                time.sleep(self._seconds)
                self._source.copy_(self._result)
                poison(self._target)
                self._result = None


class LateStreams(HostStreams):
    """Threads as streams that dawdle before any copy, wait or flag, and spoil a slot once it was copied out of.

    What is sent is not there before its turn comes in the stream, as if a kernel wrote it.

    Args:
        chance: Of when, and for how long.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._slots: list[range] = []

    def _seconds(self) -> float:
        """Of a delay; mostly none."""
        return self._chance.random() ** 3 * 0.008 if self._chance.random() < 0.05 else 0.0

    def _dawdle(self, stream: int) -> None:
        if seconds := self._seconds():
            self._queues[stream].put(lambda: time.sleep(seconds))

    def adopt(self, exchange: Exchange, sends: bool = True) -> None:
        """See `Streams.adopt`."""
        self.before_ready = _Kernel(exchange, self._seconds())
        super().adopt(exchange, sends)

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """See `Streams.copy`."""
        self._dawdle(stream)
        super().copy(stream, target, source, size)
        if any(source in slots for slots in self._slots):
            worthless = torch.full((size,), POISON, dtype=torch.uint8)

            self._queues[stream].put(lambda: ctypes.memmove(source, worthless.data_ptr(), size))

    def wait(self, stream: int, address: int, count: int) -> None:
        """See `Streams.wait`."""
        super().wait(stream, address, count)
        self._dawdle(stream)

    def write(self, stream: int, address: int, count: int) -> None:
        """See `Streams.write`."""
        self._dawdle(stream)
        super().write(stream, address, count)

    def register(self, address: int, size: int) -> int:
        """See `Streams.register`."""
        self._slots.append(range(address, address + size))
        return super().register(address, size)

    def pinned(self, size: int) -> Tensor:
        """See `Streams.pinned`."""
        made = super().pinned(size)
        self._slots.append(range(made.data_ptr(), made.data_ptr() + size))
        return made


@contextmanager
def spoiled_when_sent() -> Iterator[None]:
    """A pinned slot is worthless once its round has been sent, until the device fills it again."""
    say, fill = PinnedSlots.say_passed_on, PinnedSlots.outgoing
    sizes: dict[tuple[int, int], int] = {}

    def outgoing(slots: PinnedSlots, number: int, size: int) -> Tensor:
        sizes[id(slots), number] = size
        return fill(slots, number, size)

    def say_passed_on(slots: PinnedSlots, number: int) -> None:
        poison(fill(slots, number, sizes.pop((id(slots), number))))
        say(slots, number)

    with patch.object(PinnedSlots, "outgoing", outgoing), patch.object(PinnedSlots, "say_passed_on", say_passed_on):
        yield


class GpuDelays:
    """Has every stream that takes part sleep: before what it tells by an event, after what it waits for, at copies.

    Not run on the CPU, where there are no CUDA streams.

    Args:
        chance: Of when, and for how long.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.streams: dict[int, torch.cuda.Stream] = {}
        torch.cuda._sleep(1)  # loads the kernel, which would wait for streams that wait
        torch.cuda.synchronize()

    def dawdle(self, stream: torch.cuda.Stream) -> None:
        """Let a stream sleep for a random time, or not."""
        self.streams[stream.cuda_stream] = stream
        if self._chance.random() < 0.4:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(self._chance.random() ** 2 * MOST_CYCLES))

    def scribble(self) -> None:
        """Fill the memory that each stream's allocator has free: what was freed too early is NaN now."""
        for stream in list(self.streams.values()):
            if isinstance(stream, torch.cuda.ExternalStream):
                continue  # nothing is allocated on streams of copy engines
            with torch.cuda.stream(stream):
                held = [
                    torch.empty(size, dtype=torch.uint8, device=stream.device).fill_(POISON)
                    for size in (512, 4096, 65536, 1 << 20)
                    for _ in range(32)
                ]
                del held

    @contextmanager
    def everywhere(self) -> Iterator[GpuDelays]:
        """Reach into events and copies for as long as the block lasts."""
        record, wait, copy = torch.cuda.Event.record, torch.cuda.Event.wait, CudaStreams.copy

        def record_late(event: torch.cuda.Event, stream: Any = None) -> None:
            stream = torch.cuda.current_stream() if stream is None else stream
            self.dawdle(stream)
            record(event, stream)

        def wait_late(event: torch.cuda.Event, stream: Any = None) -> None:
            stream = torch.cuda.current_stream() if stream is None else stream
            wait(event, stream)
            self.dawdle(stream)

        def copy_late(streams: CudaStreams, stream: int, target: int, source: int, size: int) -> None:
            if streams._num_noted:  # flags, which come first
                streams._pass_on()
            self.dawdle(streams._streams[stream])
            copy(streams, stream, target, source, size)

        with (
            patch.object(torch.cuda.Event, "record", record_late),
            patch.object(torch.cuda.Event, "wait", wait_late),
            patch.object(CudaStreams, "copy", copy_late),
        ):
            yield self


def late_streams(seed: int) -> Callable[[int], LateStreams]:
    """Makes streams for a device's index, each with delays of its own."""
    chance = random.Random(seed)
    return lambda device: LateStreams(random.Random(chance.random()))
