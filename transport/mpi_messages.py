"""Describes to MPI what an exchange sends and receives, also where C ints are too short (paper, section 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .exchange import Exchange

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST_COUNT = 2**31 - 1  # MPI 3 counts and displacements are C ints
_BLOCK_BYTES = 2**30


def describe_gather(exchange: Exchange) -> tuple[list[object], list[object]]:
    """Describe what is sent and received to Iallgatherv."""
    from mpi4py import MPI

    counts = exchange.received_bytes.astype(np.intc)
    counts[exchange.rank] = exchange.kept_bytes
    received = [exchange.target.numpy(), counts, exchange.received_at.astype(np.intc), MPI.BYTE]
    return [exchange.source.numpy(), exchange.kept_bytes, MPI.BYTE], received


def describe(
    memory: Tensor, sizes: NDArray[np.int64], starts: NDArray[np.int64]
) -> tuple[list[object], list[MPI.Datatype]]:
    """Describe pieces of one buffer to Ialltoallw; makes datatypes only for what C ints cannot describe."""
    from mpi4py import MPI

    types = [MPI.BYTE] * len(sizes)
    made: list[MPI.Datatype] = []
    if memory.nbytes <= LARGEST_COUNT:  # not by NumPy: to free its view of a tensor lets another thread run
        view = MPI.buffer.fromaddress(memory.data_ptr(), memory.nbytes)
        return [view, sizes.tolist(), starts.tolist(), types], made
    far = np.flatnonzero((sizes > 0) & (starts + sizes > LARGEST_COUNT))
    counts, displacements = sizes, np.where(sizes > 0, starts, 0)
    if len(far):
        counts = sizes.copy()
        for peer in far.tolist():
            types[peer] = _large_piece(int(starts[peer]), int(sizes[peer]))
            made.append(types[peer])
            counts[peer], displacements[peer] = 1, 0
    return [memory.numpy(), counts.tolist(), displacements.tolist(), types], made


def _large_piece(start: int, size: int) -> MPI.Datatype:
    from mpi4py import MPI

    offsets = range(0, size, _BLOCK_BYTES)
    lengths = [min(_BLOCK_BYTES, size - offset) for offset in offsets]
    datatype = MPI.BYTE.Create_hindexed(lengths, [start + offset for offset in offsets])
    return datatype.Commit()
