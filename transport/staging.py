"""CUDA tensors over a host transport: copy engines to and from pinned memory, a thread between (sections 3.3, 6.3).

A transfer goes in rounds of a slot each. The sending stream copies a round's bytes to a pinned slot and raises a flag;
the thread passes them to the other ranks and raises another; the receiving stream waits for it and copies the bytes
to their place. So the copy of a round runs while the one before is on the wire, and nobody who computes waits: not the
host, and no stream but the one that wants the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .cuda_streams import RECEIVE, SEND, CudaStreams, Streams
from .device_wire import Enqueued, Meet
from .errors import TransportClosed, TransportError
from .exchange import Exchange
from .lane import HostTransport
from .pinned_slots import PinnedSlots, channels_within, slots_for
from .rounds import Layout, lay_out_rounds
from .staging_thread import Job, Mover
from .windows_opening import least_said, together


class StagingEngine:
    """Moves CUDA tensors over a channel of a host transport.

    The first CUDA tensor of all makes pinned slots for as many channels as may be in use at once; the first that a
    channel moves takes some of them and starts its thread. The slots of a closed channel serve later ones.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline of every transfer, in seconds.
        window_bytes: Most pinned memory; see `CopyOptions`.
        make_streams: Makes the streams for a device index.
        first_count: Where counts of rounds begin.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        window_bytes: int,
        make_streams: Callable[[int], Streams] = CudaStreams,
        first_count: int = 0,
    ) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._window_bytes, self._make_streams, self._first_count = window_bytes, make_streams, first_count
        self._mover: Mover | None = None
        self._device = -1
        self._released = False

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        """See `Engine.begin`."""
        index = exchange.source.device.index or 0
        self.open(index, meet)
        if index != self._device:
            raise TransportError(f"this channel moves tensors of device {self._device}, not of device {index}")
        assert self._mover is not None, "it was made just now"
        mover = self._mover
        layouts = list(
            lay_out_rounds(exchange.sent_bytes, exchange.received_bytes, self._rank, mover.slots.chunk_bytes)
        )
        call = f"{exchange.operation} #{sequence}"
        mover.add(Job(call, layouts, mover.slots.count, time.monotonic() + self._timeout_s))
        with mover.slots.streams.on_device():
            _enqueue(exchange, layouts, mover.slots)
            exchange.join = _Join(mover, mover.slots.streams.joined())
        mover.let_go_if_failed()  # it may have let go before these waits were enqueued
        return Enqueued()

    def open(self, device: int, meet: Meet) -> None:
        """See `OpensFirst.open`."""
        if self._released:
            raise TransportClosed("another thread closed the channel")
        if self._mover is None:
            lane = meet()
            num_channels = least_said(lane, channels_within(self._world_size, self._window_bytes))
            self._mover, self._device = Mover(lane, self._take_slots(lane, device, num_channels)), device
        self._mover.raise_failure()

    def _take_slots(self, lane: HostTransport, device: int, num_channels: int) -> PinnedSlots:
        """Where one rank gets none, all learn of it: else at their deadlines, from streams that wait."""
        slots: PinnedSlots | None = None
        try:
            with together(lane):
                where = device, self._world_size, self._window_bytes, num_channels
                slots = slots_for(*where, self._make_streams, self._first_count, lane.timeout_s)
        except BaseException:
            if slots is not None:
                slots.put_away()
            lane.close()
            raise
        return slots

    def split(self, timeout_s: float) -> StagingEngine:
        """See `Engine.split`."""
        return StagingEngine(
            self._rank, self._world_size, timeout_s, self._window_bytes, self._make_streams, self._first_count
        )

    def raise_failure(self) -> None:
        """See `Engine.raise_failure`."""
        if self._mover is not None:
            self._mover.raise_failure()

    def release(self, reason: BaseException | None) -> None:
        """See `Engine.release`. What is under way is left to end by itself."""
        del reason
        self._released = True
        if self._mover is not None:
            self._mover.stop()


def _enqueue(exchange: Exchange, layouts: list[Layout], slots: PinnedSlots) -> None:
    """Enqueue this rank's copies to and from the slots, and its own piece."""
    streams = slots.streams
    streams.adopt(exchange)
    if exchange.kept_bytes:
        source, target = exchange.kept()
        streams.copy(RECEIVE, target.data_ptr(), source.data_ptr(), exchange.kept_bytes)
    from_here, to_here = exchange.source.data_ptr(), exchange.target.data_ptr()
    for layout in layouts:
        number = slots.next()
        slots.fill_when_free(number)
        for piece in layout.sends:
            at = from_here + int(exchange.sent_at[piece.peer]) + piece.start
            streams.copy(SEND, slots.outgoing_address(number) + piece.slot_at, at, piece.size)
        slots.say_filled(number)
        slots.empty_when_arrived(number)
        for piece in layout.receives:
            at = to_here + int(exchange.received_at[piece.peer]) + piece.start
            streams.copy(RECEIVE, at, slots.incoming_address(number) + piece.slot_at, piece.size)
        slots.say_emptied(number)


class _Join:
    """Makes the current stream wait for the copies, unless they have failed."""

    def __init__(self, mover: Mover, joined: Callable[[], object]) -> None:
        self._mover, self._joined = mover, joined

    def __call__(self) -> None:
        self._mover.raise_failure()
        self._joined()
