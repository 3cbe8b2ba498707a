"""A wire for host and CUDA tensors: the host's wire beside an engine for device memory (paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .exchange import Exchange
from .lane import HostTransport, open_lane
from .wire import Purpose, Settles, Ticket, Wire

Meet = Callable[[], HostTransport]
"""Makes a channel for host tensors between the same ranks, for an engine's own use; collective. Sizes go unchecked."""


class Engine(Protocol):
    """What moves CUDA tensors between the ranks of a channel, in stream order. Calls come from one thread at a time."""

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Ticket:
        """Enqueue an exchange behind `exchange.ready`, this rank's own piece too, and set `exchange.join`.

        The ticket polls true once everything is enqueued; whoever waits then makes a stream wait, not the host. All
        ranks begin their exchanges in the same order, so the first may do what is collective, over `meet()`.
        """

    def split(self, timeout_s: float) -> Engine:
        """Make another engine between the same ranks; collective."""

    def raise_failure(self) -> None:
        """Raise what has ended transfers that were under way."""

    def release(self, reason: BaseException | None) -> None:
        """Give back what can be given back without the other ranks; `reason` is the failure that led to it."""


class OpensFirst(Engine, Protocol):
    """An engine that can do what is collective, and may wait for all streams, before anything is enqueued."""

    def open(self, device: int, meet: Meet) -> None:
        """Make, or take over, what exchanges of this device's tensors need, unless it is there; collective."""

    def split(self, timeout_s: float) -> OpensFirst:
        """See `Engine.split`."""


class DeviceWire:
    """Host tensors, and the comparison of sizes, go over the host's wire; CUDA tensors through an engine."""

    devices: tuple[str, ...] = ("cpu", "cuda")

    def __init__(self, host: Wire, engine: Engine, rank: int, world_size: int, timeout_s: float) -> None:
        self._host, self._engine = host, engine
        self._place = rank, world_size, timeout_s
        self.size_check = host.size_check

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> Ticket:
        """See `Wire.begin`."""
        if exchange.ready is not None:
            return self._engine.begin(exchange, sequence, self._meet)
        return self._host.begin(exchange, sequence, purpose)

    def split(self, check_sizes: bool, timeout_s: float) -> Wire:
        """See `Wire.split`."""
        rank, world_size, _ = self._place
        host, engine = self._host.split(check_sizes, timeout_s), self._engine.split(timeout_s)
        return DeviceWire(host, engine, rank, world_size, timeout_s)

    def settle(self) -> None:
        """See `Settles.settle`."""
        if isinstance(self._host, Settles):
            self._host.settle()

    def raise_failure(self) -> None:
        """See `FailsLater.raise_failure`."""
        self._engine.raise_failure()

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`."""
        self._host.release(reason)
        self._engine.release(reason)

    def _meet(self) -> HostTransport:
        rank, world_size, timeout_s = self._place
        check_sizes = self._host.size_check == "always"
        wire = self._host.split(check_sizes, timeout_s)
        return open_lane(wire, "engine", rank, world_size, timeout_s, check_sizes, False)


def host_of(wire: Wire) -> Wire:
    """The part of a wire that moves host memory."""
    return wire._host if isinstance(wire, DeviceWire) else wire


class Enqueued:
    """The ticket of an exchange that streams will carry out: the host has nothing left to do."""

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        return True

    def block(self, seconds: float) -> bool:
        """See `Ticket.block`."""
        del seconds
        return True

    def missing(self) -> None:
        """Nobody is missing when nothing is waited for."""


ENQUEUED = Enqueued()
