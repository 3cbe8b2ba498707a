"""A wire for host and CUDA tensors: the host's wire beside an engine for device memory (paper, section 3.3)."""

from __future__ import annotations

from typing import Protocol

from .exchange import Exchange
from .wire import Purpose, Ticket, Wire


class Engine(Protocol):
    """What moves CUDA tensors between the ranks of a channel, in stream order. Calls come from one thread at a time."""

    def begin(self, exchange: Exchange, sequence: int) -> Ticket:
        """Enqueue an exchange behind `exchange.ready` and set `exchange.join`.

        The ticket polls true once everything is enqueued; whoever waits then makes a stream wait, not the host.
        """

    def split(self, timeout_s: float) -> Engine:
        """Make another engine between the same ranks; collective."""

    def release(self, reason: BaseException | None) -> None:
        """Give back what can be given back without the other ranks; `reason` is the failure that led to it."""


class DeviceWire:
    """Host tensors, and the comparison of sizes, go over the host's wire; CUDA tensors through an engine."""

    devices: tuple[str, ...] = ("cpu", "cuda")

    def __init__(self, host: Wire, engine: Engine) -> None:
        self._host, self._engine = host, engine
        self.size_check = host.size_check

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> Ticket:
        """See `Wire.begin`."""
        if exchange.ready is not None:
            return self._engine.begin(exchange, sequence)
        return self._host.begin(exchange, sequence, purpose)

    def split(self, check_sizes: bool, timeout_s: float) -> Wire:
        """See `Wire.split`."""
        return DeviceWire(self._host.split(check_sizes, timeout_s), self._engine.split(timeout_s))

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`."""
        self._host.release(reason)
        self._engine.release(reason)


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
