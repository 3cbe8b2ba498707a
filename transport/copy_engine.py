"""GPUs of one host exchange by copies alone: no kernel, no host thread (paper, sections 3.3, 5.3 and 6.3).

Large pieces go straight from one GPU's tensor to the other's (`meetings.py`). Small ones, and all of them where GPUs do
not reach each other's memory, go through host memory that both registered: the sender's stream copies a chunk into a
slot and raises a flag, the receiver's waits for the flag, copies the chunk to its place and raises another
(`windows.py`, `slots.py`). Hosts only enqueue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from .base import Transport
from .copy_options import CopyOptions
from .cuda_streams import CudaStreams, Streams, check_connections, check_installation, nothing
from .device_wire import ENQUEUED, DeviceWire, Enqueued, Meet, host_of
from .errors import TransportClosed, TransportError, TransportTimeout
from .exchange import Exchange
from .lane import HostTransport
from .layouts import Layout
from .meetings import Meeting, Meetings
from .watch import watch
from .windows import Mark, Rounds, Windows
from .windows_opening import open_windows, put_away, together

Via = Literal["peer", "segment"]
DIRECT_FROM = 1 << 20  # smaller pieces are sooner there through slots, which takes fewer steps
_MOST_LOOKS_AFTER_A_FAILURE = 40
_MOST_PREPARED = 8


def connect_copy_engine(through: Transport, options: CopyOptions, timeout_s: float, check_sizes: bool) -> HostTransport:
    """Make the first channel whose CUDA tensors travel by copies within one host; collective.

    Args:
        through: Connects the ranks already. A channel of it carries host tensors, sizes and addresses.
        options: How to copy.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Whether ranks compare sizes first.

    Raises:
        ValueError: `through` is no transport between processes, or the options ask for another backend.
        Unavailable: No GPU, no cuda-bindings, or too few connections, on some rank.
    """
    if not isinstance(through, HostTransport):
        raise ValueError(f"through must be a transport that connects processes, got {type(through).__name__}")
    if options.inside == "staged":
        raise ValueError("copies.inside must be 'peer' or 'segment' for backend 'copy_engine', got 'staged'")
    lane = through.channel("copy_engine", check_sizes)
    assert isinstance(lane, HostTransport), "a channel is of its parent's kind"
    lane.timeout_s = timeout_s
    try:
        with together(lane):  # others would wait for a rank that cannot run it
            check_installation("copy_engine")
            check_connections()
    except TransportError:
        lane.close()
        raise
    members = list(range(lane.world_size))
    engine = CopyEngine(lane.rank, members, timeout_s, options.inside, options.window_bytes)
    lane.use_wire(lambda wire: DeviceWire(host_of(wire), engine, lane.rank, lane.world_size, timeout_s))
    return lane


class CopyEngine:
    """Moves CUDA tensors between members of one host, in stream order.

    The first CUDA tensor of all makes slots for as many channels as may be in use at once, which is collective; a
    channel that moves none costs nothing. The slots of a closed channel serve later ones.

    Args:
        rank: This rank.
        members: Ranks of this host in order, this one among them. Nothing is exchanged with others.
        timeout_s: Deadline of every transfer, in seconds, from its beginning on the host.
        via: "peer" copies large pieces between the GPUs' memories, "segment" all through host memory.
        window_bytes: Most shared host memory for what is on its way to a rank; see `CopyOptions`.
        make_streams: Makes the streams for a device index.
        first_count: Where counts of chunks and meetings begin.
        direct_from: Bytes of a piece from which on "peer" copies it directly.
        patience_s: See `Meetings`.
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
        direct_from: int = DIRECT_FROM,
        patience_s: float | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._rank, self._members, self._timeout_s = rank, list(members), timeout_s
        here = self._members.index(rank)
        self._in_order = self._members[here + 1 :] + self._members[:here]
        self._via, self._window_bytes = via, window_bytes
        self._direct_from = direct_from if via == "peer" else 2**62
        self._make_streams, self._first_count = make_streams, first_count
        self._windows: Windows | None = None
        self._meetings: Meetings | None = None
        self._device = -1
        self._lane: HostTransport | None = None
        self._under_way: deque[_Transfer] = deque()
        self._prepared: dict[Layout, tuple[list[int], Rounds]] = {}
        self._failure: TransportError | None = None
        self._released = False
        self._reason: BaseException | None = None
        self._num_releases = 0
        self._looking = threading.Lock()  # never held by what enqueues, which a full stream may block

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        """See `Engine.begin`."""
        index = exchange.rows.device.index or 0
        if self._windows is None or self._failure is not None or self._released:
            self.open(index, meet)
        if index != self._device:
            raise TransportError(f"this channel moves tensors of device {self._device}, not of device {index}")
        assert self._windows is not None, "it was opened just now"
        call, device = f"{exchange.operation} #{sequence}", self._windows.streams.on_device()
        if device is nothing:
            transfer = self._enqueue(exchange, call)
        else:
            with device:
                transfer = self._enqueue(exchange, call)
        self._under_way.append(transfer)
        if len(self._under_way) == 1:  # or else the watch looks already, and goes on
            watch.add(self._look)
        return ENQUEUED

    def open(self, device: int, meet: Meet) -> None:
        """See `OpensFirst.open`."""
        self.raise_failure()
        if self._released:
            raise TransportClosed("another thread closed the channel")
        if self._windows is None:
            self._lane, self._device = meet(), device
            self._windows, self._meetings = open_windows(
                self._lane,
                self._members,
                lambda: self._make_streams(device),
                device,
                self._via,
                self._window_bytes,
                self._first_count,
                self._patience_s,
            )

    def _enqueue(self, exchange: Exchange, call: str) -> _Transfer:
        windows, meetings = self._windows, self._meetings
        assert windows is not None, "it was opened just now"
        assert meetings is not None, "it was opened just now"
        deadline = time.monotonic() + self._timeout_s
        peers, rounds = self._prepare(exchange, windows)
        sends = bool(peers) or self._via == "segment"
        windows.streams.adopt(exchange, sends)
        try:
            mark = windows.enqueue(exchange, rounds)
            met = meetings.enqueue(exchange, peers, deadline) if peers else []
        except BaseException:
            with suppress(RuntimeError):  # where CUDA has failed, it fails again
                windows.streams.joined()  # peers may wait for a flag that was noted only
            raise
        joined = windows.streams.joined(meetings.flags_to_wait_for(met) if met else (), sends)
        transfer = _Transfer(mark, met, deadline, call, exchange if met else None)
        exchange.join = _Join(self, transfer, joined)
        return transfer

    def _prepare(self, exchange: Exchange, windows: Windows) -> tuple[list[int], Rounds]:
        """With whom pieces are copied directly, and what goes through slots; known where a layout comes again."""
        layout = exchange.known_layout()
        found = None if layout is None else self._prepared.get(layout)
        if found is not None:
            return found
        sent, received = exchange.sent_bytes.tolist(), exchange.received_bytes.tolist()
        peers = [peer for peer in self._in_order if max(sent[peer], received[peer]) >= self._direct_from]
        for peer in peers:
            sent[peer] = received[peer] = 0
        made = peers, windows.lay_out(exchange, sent, received)
        if layout is not None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[layout] = made
        return made

    def split(self, timeout_s: float) -> CopyEngine:
        """See `Engine.split`."""
        return CopyEngine(
            self._rank,
            self._members,
            timeout_s,
            self._via,
            self._window_bytes,
            self._make_streams,
            self._first_count,
            self._direct_from,
            self._patience_s,
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
        """See `Engine.raise_failure`."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def _look(self) -> bool:
        """Look after deadlines and peers, from the watch's thread; calls no CUDA. True while there is something."""
        with self._looking:
            return self._look_after(self._windows)

    def _look_after(self, windows: Windows | None) -> bool:
        if windows is None:
            return False
        if self._failure is not None:  # a peer that is alive may have overwritten what let our streams go
            self._let_go()
            self._num_releases += 1
            return self._num_releases < _MOST_LOOKS_AFTER_A_FAILURE
        self._drop_what_is_done(windows)
        under_way = self._under_way
        if under_way:
            first = under_way[0]
            news, missing = windows.bad_news(), self._missing(first)
            if news is not None and missing:
                self._fail(TransportError(f"{first.call}: {news}"))
            elif time.monotonic() > first.deadline:
                self._fail(
                    TransportTimeout(
                        f"{first.call}: rank {self._rank}: the GPUs have not moved the data {self._timeout_s:g} s "
                        f"after the call; missing: ranks {missing}"
                    )
                )
            return True
        if self._reason is not None:
            self._fail(TransportError(str(self._reason)))
            return True
        if self._released and windows.is_quiet():
            assert self._meetings is not None, "made with the windows"
            put_away(windows, self._meetings)
            self._windows = None
            return False
        return self._released

    def _drop_what_is_done(self, windows: Windows) -> None:
        """There may be thousands, of half a second: where the last is through the slots, those before it are too."""
        under_way = self._under_way
        count = len(under_way)  # others may follow meanwhile
        if count and not windows.missing(under_way[count - 1].mark):
            assert self._meetings is not None, "made with the windows"
            for _ in range(count):
                if self._meetings.missing(under_way[0].met):
                    return
                under_way.popleft()
        while under_way and not self._missing(under_way[0]):
            under_way.popleft()

    def _fail(self, error: TransportError) -> None:
        if self._failure is None and self._windows is not None:
            self._failure = error
            _never_freed.append(list(self._under_way))  # a peer may still copy to this memory
            self._windows.segment.tell(str(error))
            self._let_go()
            self._windows.streams.rest()
            watch.add(self._look)

    def _let_go(self) -> None:
        if self._windows is not None and self._meetings is not None:
            self._windows.let_go()
            self._meetings.let_go()

    def _missing(self, transfer: _Transfer) -> list[int]:
        assert self._windows is not None, "something has been exchanged"
        assert self._meetings is not None, "something has been exchanged"
        missing, met = self._windows.missing(transfer.mark), transfer.met
        return sorted({*missing, *self._meetings.missing(met)}) if met else missing


@dataclass(eq=False, slots=True)
class _Transfer:
    """What has been enqueued. Keeps the memory that a peer copies from and to, until the caller has joined."""

    mark: Mark
    met: list[Meeting]
    deadline: float
    call: str
    exchange: Exchange | None


_never_freed: list[list[_Transfer]] = []


class _Join:
    """Makes the current stream wait for the copies, unless they have failed."""

    __slots__ = ("_engine", "_joined", "_transfer")

    def __init__(self, engine: CopyEngine, transfer: _Transfer, joined: Callable[[], object]) -> None:
        self._engine, self._transfer, self._joined = engine, transfer, joined

    def __call__(self) -> None:
        engine = self._engine
        if engine._failure is not None:
            engine.raise_failure()
        self._joined()
        self._transfer.exchange = None
        if engine._failure is not None:  # it may have let go before this wait was enqueued
            engine._let_go()
