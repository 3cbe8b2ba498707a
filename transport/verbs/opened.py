"""An opened RDMA device, which the channels made from one another share (paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import TransportError
from .binding import Card, explain_error
from .device import Port
from .memory import Kept
from .trace import ChunkEvent


@dataclass(eq=False)
class Device:
    """An opened card, which the channels made from one another share; the last one closes it.

    Attributes:
        card: The card.
        port: Of it.
        binding: Name of the library.
        ack_timeout: How long the card waits for an acknowledgement: 4.096 µs times 2 to this, tried 7 times.
        trace: Where to note what happens to each chunk.
        kept: Memory of callers that stays registered.
        num_users: Channels.
    """

    card: Card
    port: Port
    binding: str
    ack_timeout: int
    trace: list[ChunkEvent] | None
    kept: Kept
    num_users: int = 0

    def leave(self) -> None:
        """A channel was closed."""
        self.num_users -= 1
        if not self.num_users:
            self.kept.close()
            self.card.close()


@contextmanager
def translated(card: Card) -> Iterator[None]:
    """Turn what a library raises into a TransportError."""
    try:
        yield
    except card.error as error:
        raise TransportError(f"verbs: {explain_error(error)}") from error
