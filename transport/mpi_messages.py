"""Describes to MPI what an exchange sends and receives, also where C ints are too short (paper, section 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .exchange import Exchange

if TYPE_CHECKING:
    from mpi4py import MPI

    Spec = list[object]

LARGEST_COUNT = 2**31 - 1  # MPI 3 counts and displacements are C ints
_BLOCK_BYTES = 2**30


class Messages:
    """What this process needs of mpi4py for each exchange, imported once.

    Attributes:
        error_type: What mpi4py raises.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self.error_type = MPI.Exception
        self._byte, self._view = MPI.BYTE, MPI.buffer.fromaddress

    def describe(self, exchange: Exchange) -> tuple[tuple[Spec, Spec], list[MPI.Datatype]]:
        """Describe an exchange to Ialltoallw; makes datatypes only for what C ints cannot describe."""
        source, target = exchange.source, exchange.target
        if max(source.nbytes, target.nbytes) > LARGEST_COUNT:
            sent, made = self._pieces(source, exchange.sent_bytes, exchange.sent_at)
            received, also_made = self._pieces(target, exchange.received_bytes, exchange.received_at)
            return (sent, received), made + also_made
        layout = exchange.known_layout()
        if layout is None:
            lists = _lists(exchange)
        else:
            lists = layout.lists = layout.lists or _lists(exchange)
        sent_bytes, sent_at, received_bytes, received_at = lists
        types = [self._byte] * len(sent_bytes)
        # Not by NumPy: to free its view of a tensor lets another thread run.
        outgoing = self._view(source.data_ptr(), source.nbytes)
        incoming = self._view(target.data_ptr(), target.nbytes)
        return ([outgoing, sent_bytes, sent_at, types], [incoming, received_bytes, received_at, types]), []

    def _pieces(
        self, memory: Tensor, sizes: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[Spec, list[MPI.Datatype]]:
        """Describe pieces of one large buffer."""
        types = [self._byte] * len(sizes)
        made: list[MPI.Datatype] = []
        far = np.flatnonzero((sizes > 0) & (starts + sizes > LARGEST_COUNT))
        counts, displacements = sizes.copy(), np.where(sizes > 0, starts, 0)
        for peer in far.tolist():
            types[peer] = self._large_piece(int(starts[peer]), int(sizes[peer]))
            made.append(types[peer])
            counts[peer], displacements[peer] = 1, 0
        return [memory.numpy(), counts.tolist(), displacements.tolist(), types], made

    def _large_piece(self, start: int, size: int) -> MPI.Datatype:
        offsets = range(0, size, _BLOCK_BYTES)
        lengths = [min(_BLOCK_BYTES, size - offset) for offset in offsets]
        datatype = self._byte.Create_hindexed(lengths, [start + offset for offset in offsets])
        return datatype.Commit()


def _lists(exchange: Exchange) -> tuple[list[int], ...]:
    sent, received = exchange.sent_bytes.tolist(), exchange.received_bytes.tolist()
    return sent, exchange.sent_at.tolist(), received, exchange.received_at.tolist()
