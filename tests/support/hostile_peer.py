"""A transport that changes some bytes of what it sends: a peer that is broken, or means harm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.transport import Pending, Transport
from freescale.transport.layouts import Splits

EXTREMES = (-1, 0, 1, 2, 2**31, 2**48, 2**62, -(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Lie:
    """What to change.

    Attributes:
        message: Which message, counted over all channels but the first ones, which make channels.
        at: Where in it, as a share of its length.
        word: What a word of eight bytes becomes; None: one bit is flipped.
        bit: Which.
    """

    message: int
    at: float
    word: int | None
    bit: int = 0

    def told(self, block: Tensor) -> Tensor:
        """A copy of the block with the lie in it."""
        lying = block.clone()
        raw = lying.contiguous().view(-1).view(torch.uint8)
        place = int(self.at * (len(raw) - 1)) if len(raw) else 0
        if self.word is not None and len(raw) >= 8:
            raw.view(-1)[place // 8 * 8 :][:8].copy_(
                torch.tensor([self.word]).view(torch.uint8)[: len(raw) - place // 8 * 8]
            )
        elif len(raw):
            raw[place] ^= 1 << self.bit
        return raw.view(lying.dtype).view(lying.shape)


class HostilePeer(Transport):
    """Passes everything on to a transport, with lies.

    Args:
        inner: The rank's own.
        lies: What to change.
        count: Messages sent so far, shared between channels.
    """

    def __init__(self, inner: Transport, lies: list[Lie], count: list[int] | None = None) -> None:
        self._inner, self._lies = inner, lies
        self._count = [0] if count is None else count
        self.rank, self.world_size = inner.rank, inner.world_size
        self.timeout_s, self.check_sizes = inner.timeout_s, inner.check_sizes

    def _changed(self, block: Tensor) -> Tensor:
        number, self._count[0] = self._count[0], self._count[0] + 1
        for lie in self._lies:
            if lie.message == number:
                block = lie.told(block)
        return block

    def all_gather(self, block: Tensor, sizes: Splits | None = None, out: Tensor | None = None) -> Pending:
        """See `Transport.all_gather`."""
        return self._inner.all_gather(self._changed(block), sizes, out)

    def all_to_all(
        self, rows: Tensor, sent_splits: Splits, received_splits: Splits, out: Tensor | None = None
    ) -> Pending:
        """See `Transport.all_to_all`."""
        return self._inner.all_to_all(self._changed(rows), sent_splits, received_splits, out)

    def channel(self, name: str, check_sizes: bool | None = None) -> Transport:
        """See `Transport.channel`."""
        return HostilePeer(self._inner.channel(name, check_sizes), self._lies, self._count)

    def raise_if_failed(self) -> None:
        """See `Transport.raise_if_failed`."""
        self._inner.raise_if_failed()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()
