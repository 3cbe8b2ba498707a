"""GPUs of one host exchange by copies alone: no kernel, no host thread (paper, sections 3.3, 5.3 and 6.3).

A sender's stream copies chunks into slots of the receiver, in its device memory (CUDA IPC) or in host memory that both
registered, and raises a flag in shared memory. The receiver's stream waits for the flag, copies the chunk to its place
and raises another. Hosts only enqueue. See `slots.py` for the order and `windows.py` for the counts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from .base import Transport
from .copy_options import CopyOptions
from .cuda_streams import CudaStreams, Streams, check_connections, check_installation
from .device_wire import DeviceWire, Enqueued, Meet, host_of
from .errors import TransportClosed, TransportError, TransportTimeout
from .exchange import Exchange
from .lane import HostTransport
from .watch import watch
from .windows import Mark, Windows
from .windows_opening import open_windows, put_away

Via = Literal["peer", "segment"]


def connect_copy_engine(through: Transport, options: CopyOptions, timeout_s: float, check_sizes: bool) -> HostTransport:
    """Make the first channel whose CUDA tensors travel by copies within one host; collective.

    Args:
        through: Connects the ranks already. A channel of it carries host tensors, sizes and addresses.
        options: How to copy.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Whether ranks compare sizes first.

    Raises:
        ValueError: `through` is no transport between processes, or the options ask for another backend.
        Unavailable: No GPU, no cuda-bindings, or too few connections.
    """
    if not isinstance(through, HostTransport):
        raise ValueError(f"through must be a transport that connects processes, got {type(through).__name__}")
    if options.inside == "staged":
        raise ValueError("copies.inside must be 'peer' or 'segment' for backend 'copy_engine', got 'staged'")
    check_installation("copy_engine")
    check_connections()
    lane = through.channel("copy_engine", check_sizes)
    assert isinstance(lane, HostTransport), "a channel is of its parent's kind"
    lane.timeout_s = timeout_s
    members = list(range(lane.world_size))
    engine = CopyEngine(lane.rank, members, timeout_s, options.inside, options.window_bytes)
    lane.use_wire(lambda wire: DeviceWire(host_of(wire), engine, lane.rank, lane.world_size, timeout_s))
    return lane


class CopyEngine:
    """Moves CUDA tensors between members of one host, in stream order.

    The first CUDA tensor that a channel moves makes its slots, which is collective; a channel that moves none costs
    nothing. The device memory of a closed channel serves later ones.

    Args:
        rank: This rank.
        members: Ranks of this host in order, this one among them. Nothing is exchanged with others.
        timeout_s: Deadline of every transfer, in seconds, from its beginning on the host.
        via: "peer" copies into the other GPU's memory, "segment" through host memory that both GPUs registered.
        window_bytes: Most memory that a rank gives to the slots of a channel.
        make_streams: Makes the streams for a device index.
        first_count: Where counts of chunks begin.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        via: Via,
        window_bytes: int,
        make_streams: Callable[[int], Streams] = CudaStreams,
        first_count: int = 0,
    ) -> None:
        self._rank, self._members, self._timeout_s = rank, list(members), timeout_s
        self._via, self._window_bytes = via, window_bytes
        self._make_streams, self._first_count = make_streams, first_count
        self._windows: Windows | None = None
        self._device = -1
        self._lane: HostTransport | None = None
        self._under_way: deque[tuple[Mark, float, str]] = deque()
        self._failure: TransportError | None = None
        self._released = False
        self._reason: BaseException | None = None
        self._num_releases = 0
        self._looking = threading.Lock()  # never held by what enqueues, which a full stream may block

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        """See `Engine.begin`."""
        self.raise_failure()
        if self._released:
            raise TransportClosed("another thread closed the channel")
        index = exchange.source.device.index or 0
        if self._windows is None:
            self._open(meet, index)
        elif index != self._device:
            raise TransportError(f"this channel moves tensors of device {self._device}, not of device {index}")
        assert self._windows is not None, "it was opened just now"
        mark = self._windows.enqueue(exchange)
        exchange.join = _Join(self, self._windows.streams.joined())
        self._under_way.append((mark, time.monotonic() + self._timeout_s, f"{exchange.operation} #{sequence}"))
        watch.add(self._look)
        return Enqueued()

    def split(self, timeout_s: float) -> CopyEngine:
        """See `Engine.split`."""
        return CopyEngine(
            self._rank, self._members, timeout_s, self._via, self._window_bytes, self._make_streams, self._first_count
        )

    def release(self, reason: BaseException | None) -> None:
        """See `Engine.release`. What is under way is left to end by itself; then peers are told of a failure."""
        self._released, self._reason = True, reason
        if self._windows is not None:
            watch.add(self._look)
            self._look()
        if self._lane is not None:
            self._lane.close()

    def raise_failure(self) -> None:
        """Raise what has ended the transfers that were under way."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def _open(self, meet: Meet, device: int) -> None:
        self._lane, self._device = meet(), device
        self._windows = open_windows(
            self._lane,
            self._members,
            lambda: self._make_streams(device),
            device,
            self._via,
            self._window_bytes,
            self._first_count,
        )

    def _look(self) -> bool:
        """Look after deadlines and peers, from the watch's thread; calls no CUDA. True while there is something."""
        with self._looking:
            return self._look_after(self._windows)

    def _look_after(self, windows: Windows | None) -> bool:
        if windows is None:
            return False
        if self._failure is not None:  # a peer that is alive may have overwritten what let our streams go
            windows.let_go()
            self._num_releases += 1
            return self._num_releases < 40
        under_way = self._under_way
        while under_way and not windows.missing(under_way[0][0]):
            under_way.popleft()
        if under_way:
            mark, deadline, call = under_way[0]
            news = windows.bad_news()
            if news is not None and windows.missing(mark):
                self._fail(TransportError(f"{call}: {news}"))
            elif time.monotonic() > deadline:
                self._fail(
                    TransportTimeout(
                        f"{call}: rank {self._rank}: the GPUs have not moved the data {self._timeout_s:g} s after the "
                        f"call; missing: ranks {windows.missing(mark)}"
                    )
                )
            return True
        if self._reason is not None:
            self._fail(TransportError(str(self._reason)))
            return True
        if self._released and windows.is_quiet():
            self._windows = None
            put_away(windows)
            return False
        return self._released

    def _fail(self, error: TransportError) -> None:
        if self._failure is None and self._windows is not None:
            self._failure = error
            self._windows.segment.tell(str(error))
            self._windows.let_go()
            watch.add(self._look)


class _Join:
    """Makes the current stream wait for the copies, unless they have failed."""

    def __init__(self, engine: CopyEngine, joined: Callable[[], object]) -> None:
        self._engine, self._joined = engine, joined

    def __call__(self) -> None:
        self._engine.raise_failure()
        self._joined()
