"""Gathers between the same two tensors again and again are laid out once (paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .exchange import Exchange, plan_all_gather
from .layouts import Layouts, Splits

_MOST_KNOWN = 4  # a channel keeps their memory


class Gathers:
    """Lays out gathers, and remembers those between the same two tensors: the ranks of a loop say as much in each step.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        layouts: Remembers those of others.
    """

    def __init__(self, rank: int, world_size: int, layouts: Layouts) -> None:
        self._rank, self._world_size, self._layouts = rank, world_size, layouts
        self._known: dict[int, _Gather] = {}

    def plan(self, block: Tensor, sizes: Splits | None, out: Tensor | None, devices: Sequence[str]) -> Exchange:
        """As `plan_all_gather`."""
        if sizes is not None or out is None or (isinstance(block, Tensor) and block.is_cuda):
            return plan_all_gather(self._rank, self._world_size, block, sizes, out, devices, self._layouts)
        known = self._known.get(id(out))
        if known is not None and known.is_between(block, out):
            return known.again()
        exchange = plan_all_gather(self._rank, self._world_size, block, sizes, out, devices)
        gather = _Gather(block, out, exchange)
        if gather.can_repeat:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[id(out)] = gather
        return exchange


class _Gather:
    """A gather as it was laid out between two tensors, which are kept so that they stay the ones meant."""

    def __init__(self, block: Tensor, out: Tensor, exchange: Exchange) -> None:
        self._block, self._out, self._exchange = block, out, exchange
        self._places = _places(block, out)
        at = (exchange.source.data_ptr(), exchange.target.data_ptr())
        self.can_repeat = exchange.out is out and exchange.kept_bytes > 0 and self._places[:2] == at
        self.can_repeat &= not block.is_cuda
        if self.can_repeat:
            start = int(exchange.received_at[exchange.rank])
            kept = exchange.target.numpy()[start : start + exchange.kept_bytes]
            # By words where possible: NumPy holds the interpreter lock for up to 500 elements.
            width = np.int64 if kept.size % 8 == 0 else np.uint8
            self._mine, self._kept = exchange.source.numpy().view(width), kept.view(width)

    def is_between(self, block: Tensor, out: Tensor) -> bool:
        """Whether these are the tensors, in the same memory as then, and ranks agreed about them."""
        same = block is self._block and out is self._out and _places(block, out) == self._places
        return same and not self._exchange.incomplete

    def again(self) -> Exchange:
        """The exchange, with this rank's own piece in its place."""
        self._kept[:] = self._mine
        return self._exchange


def _places(block: Tensor, out: Tensor) -> tuple[object, ...]:
    return block.data_ptr(), out.data_ptr(), block.shape, out.shape, block.dtype, block.is_contiguous()
