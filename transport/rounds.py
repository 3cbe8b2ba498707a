"""Cuts an exchange into rounds that fit a pinned slot, and places their pieces (paper, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 8
"""Before each rank's piece: how many rounds the sender has, an int64."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `start + size` of what goes to or comes from a peer, and where in the slot they are."""

    peer: int
    start: int
    size: int
    slot_at: int


@dataclass(frozen=True)
class Layout:
    """One round of one rank.

    Attributes:
        sends: Pieces that are not empty.
        receives: Pieces that are not empty.
        sent_splits: Bytes for each rank, headers included; 0 for this one. Shape [world_size], int64.
        received_splits: Bytes from each rank, likewise.
    """

    sends: list[Piece]
    receives: list[Piece]
    sent_splits: NDArray[np.int64]
    received_splits: NDArray[np.int64]


def num_rounds(sent: NDArray[np.int64], received: NDArray[np.int64], chunk_bytes: int) -> int:
    """How many rounds have data on this rank."""
    return -(-int(max(sent.max(), received.max())) // chunk_bytes)


def lay_out_round(
    number: int, sent: NDArray[np.int64], received: NDArray[np.int64], rank: int, chunk_bytes: int
) -> Layout:
    """Place the pieces of one round; one that no longer has data has headers alone.

    Args:
        number: Which round, from 0.
        sent: Bytes for each rank. Shape [world_size], int64.
        received: Bytes from each rank. Shape [world_size], int64.
        rank: This rank.
        chunk_bytes: Most bytes for a rank in a round.
    """
    sends, sent_splits = _place(number, sent, rank, chunk_bytes)
    receives, received_splits = _place(number, received, rank, chunk_bytes)
    return Layout(sends, receives, sent_splits, received_splits)


def lay_out_rounds(
    sent: NDArray[np.int64], received: NDArray[np.int64], rank: int, chunk_bytes: int
) -> Iterator[Layout]:
    """Lay out all rounds that have data on this rank.

    Example:
        >>> bytes_ = np.array([0, 10, 3])
        >>> [[(p.peer, p.start, p.size, p.slot_at) for p in x.sends] for x in lay_out_rounds(bytes_, bytes_, 0, 8)]
        [[(1, 0, 8, 8), (2, 0, 3, 24)], [(1, 8, 2, 8)]]
    """
    for number in range(num_rounds(sent, received, chunk_bytes)):
        yield lay_out_round(number, sent, received, rank, chunk_bytes)


def _place(number: int, sizes: NDArray[np.int64], rank: int, chunk_bytes: int) -> tuple[list[Piece], NDArray[np.int64]]:
    start = number * chunk_bytes
    parts = np.clip(sizes - start, 0, chunk_bytes)
    splits = parts + HEADER_BYTES
    splits[rank] = 0
    places = np.cumsum(splits) - splits + HEADER_BYTES
    pieces = [
        Piece(peer, start, int(parts[peer]), int(places[peer]))
        for peer in np.flatnonzero(parts).tolist()
        if peer != rank
    ]
    return pieces, splits
