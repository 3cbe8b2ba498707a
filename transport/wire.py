"""What a host backend has to do; `lane.py` does the rest (paper, section 3.3)."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from .exchange import Exchange

Purpose = Literal["sizes", "data"]
SizeCheck = Literal["if asked", "always", "in the backend"]


class Ticket(Protocol):
    """One exchange that a backend has begun."""

    def poll(self) -> bool:
        """True when all bytes are here and all of ours are gone. Does not block. Raises when the exchange broke."""

    def block(self, seconds: float) -> bool:
        """As `poll`, but wait up to so many seconds without holding the interpreter lock for long."""

    def missing(self) -> list[int] | None:
        """Ranks that have not taken part yet, or None when the backend cannot tell."""


class Wire(Protocol):
    """A backend's lane between the ranks. Calls come from one thread at a time.

    Attributes:
        devices: Types of the devices whose memory it moves.
        size_check: Whether ranks compare sizes over this wire: "if asked" for; "always", because the backend does not
            survive a disagreement; or "in the backend", which compares by itself in both ranks, whatever is asked.
            This concerns host memory. CUDA tensors are compared if asked, wherever they are moved at all.
    """

    devices: tuple[str, ...]
    size_check: SizeCheck

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> Ticket:
        """Begin to move bytes. Ranks begin the exchanges of one purpose in the same order; purposes are independent."""

    def split(self, check_sizes: bool, timeout_s: float) -> Wire:
        """Make another wire between the same ranks; collective. `check_sizes` says whether purpose "sizes" is used."""

    def release(self, reason: BaseException | None) -> None:
        """Give back what can be given back without the other ranks; `reason` is the failure that led to it."""


@runtime_checkable
class Settles(Protocol):
    """A wire that has something to put away once all ranks have made it."""

    def settle(self) -> None:
        """All ranks have made this wire: an exchange over it is complete."""


@runtime_checkable
class FailsLater(Protocol):
    """A wire whose transfers may fail when the host no longer waits for them."""

    def raise_failure(self) -> None:
        """Raise what has ended a transfer that was under way."""
