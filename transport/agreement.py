"""Two ranks compare what they are about to exchange, before a byte of it moves (paper, section 3.3)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import SizeMismatch, TransportError
from .exchange import Exchange, plan_all_to_all

SEQUENCE, OPERATION, SENT, EXPECTED, ROW_BYTES = range(5)
_OPERATIONS = ("all_gather", "all_to_all")


class Comparison:
    """One exchange of records with every rank. Another may follow in the same memory when it is over.

    Args:
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        carried: The exchange that carries the records, for a backend to begin.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._mine, self._theirs, self._agreed = (np.zeros((world_size, 5), dtype=np.int64) for _ in range(3))
        ones, mine, theirs = [1] * world_size, torch.from_numpy(self._mine), torch.from_numpy(self._theirs)
        self.carried = plan_all_to_all(rank, world_size, mine, ones, ones, theirs)

    def prepare(self, exchange: Exchange, sequence: int) -> None:
        """Write what this rank says about an exchange. Nothing is known of the others yet."""
        mine, theirs = self._mine, self._theirs
        _write_records(mine, exchange, sequence)
        theirs.fill(-1)
        theirs[self._rank] = mine[self._rank]  # which sends as many rows as it expects
        self.carried.waited_s = 0.0

    def foresee(self) -> None:
        """Work out what the others say when all is well, while it is on its way."""
        mine, agreed = self._mine, self._agreed
        agreed[:] = mine
        agreed[:, SENT], agreed[:, EXPECTED] = mine[:, EXPECTED], mine[:, SENT]

    def outcome(self, exchange: Exchange) -> TransportError | None:
        """As `find_disagreements`, when all records are here."""
        if self._theirs.tobytes() == self._agreed.tobytes():
            return None
        return find_disagreements(exchange, self._mine, self._theirs)

    def silent(self) -> list[int]:
        """Ranks whose records are not here."""
        silent: list[int] = np.flatnonzero(self._theirs[:, SEQUENCE] < 0).tolist()
        return silent


def make_records(exchange: Exchange, sequence: int) -> NDArray[np.int64]:
    """Say to every rank what this one is about to do with it. Shape [world_size, 5], int64."""
    records = np.empty((len(exchange.sent_rows), 5), dtype=np.int64)
    _write_records(records, exchange, sequence)
    return records


def _write_records(records: NDArray[np.int64], exchange: Exchange, sequence: int) -> None:
    records[:, SEQUENCE] = sequence
    records[:, OPERATION] = _OPERATIONS.index(exchange.operation)
    records[:, SENT] = exchange.sent_rows
    records[:, EXPECTED] = exchange.received_rows
    records[:, ROW_BYTES] = exchange.row_bytes


def disagreement(rank: int, peer: int, mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> TransportError | None:
    """Compare this rank's record for a peer with the peer's record for this rank. Both find the same.

    Args:
        rank: This rank.
        peer: The other one.
        mine: What this rank says to the peer. Shape [5], int64.
        theirs: What the peer says to this rank. Shape [5], int64.

    Returns:
        What to raise, or None.
    """
    if tuple(mine[:SENT]) != tuple(theirs[:SENT]):
        return TransportError(f"rank {rank} is at {_call(mine)}, rank {peer} at {_call(theirs)}")
    if mine[EXPECTED] != theirs[SENT]:
        return _mismatch(rank, mine[EXPECTED], peer, theirs[SENT])
    if mine[SENT] != theirs[EXPECTED]:
        return _mismatch(peer, theirs[EXPECTED], rank, mine[SENT])
    if mine[ROW_BYTES] != theirs[ROW_BYTES] and mine[SENT] + mine[EXPECTED] > 0:
        return SizeMismatch(
            f"rank {rank} has rows of {mine[ROW_BYTES]} bytes, rank {peer} of {theirs[ROW_BYTES]} bytes"
        )
    return None


def find_disagreements(exchange: Exchange, mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> TransportError | None:
    """Compare with every rank; where two disagree, let nothing move between them.

    Third ranks are not disturbed: they get their rows.
    """
    found: list[TransportError] = []
    differs = mine[:, SEQUENCE : OPERATION + 1] != theirs[:, SEQUENCE : OPERATION + 1]
    suspects = differs.any(axis=1) | (mine[:, ROW_BYTES] != theirs[:, ROW_BYTES])
    suspects |= (mine[:, EXPECTED] != theirs[:, SENT]) | (mine[:, SENT] != theirs[:, EXPECTED])
    for peer in np.flatnonzero(suspects).tolist():
        error = disagreement(exchange.rank, peer, mine[peer], theirs[peer])
        if error is not None:
            exchange.skip(peer)
            found.append(error)
    if not found:
        return None
    more = f" (and {len(found) - 1} more ranks disagree)" if len(found) > 1 else ""
    return type(found[0])(f"{found[0]}{more}")


def _call(record: NDArray[np.int64]) -> str:
    index = int(record[OPERATION])
    operation = _OPERATIONS[index] if index in range(len(_OPERATIONS)) else f"operation {index}"
    return f"{operation} #{record[SEQUENCE]}"


def _mismatch(receiver: int, expected: np.int64, sender: int, got: np.int64) -> SizeMismatch:
    return SizeMismatch(f"rank {receiver} expected {expected} rows from rank {sender}, got {got}")
