"""Ranks as threads of one process: for tests, notebooks and trying things (paper, section 3.3)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .agreement import disagreement, make_records
from .errors import TransportError
from .exchange import Exchange
from .lane import HostTransport
from .wire import Purpose, SizeCheck, Wire


@dataclass(eq=False)
class _Posted:
    """What one rank brought to one exchange; shared by all ranks, under the meeting's lock."""

    exchange: Exchange
    records: NDArray[np.int64]
    missing: set[int]
    mismatch: TransportError | None = None
    absence: TransportError | None = None
    withdrawn: bool = False


@dataclass(eq=False)
class Meeting:
    """Where the threads of one channel meet. Whoever comes later copies for both, so waiting ranks sleep.

    Attributes:
        world_size: Number of ranks.
        changed: Guards everything here.
        posted: Exchanges that not all ranks have come to: sequence number → rank → what it brought.
        left: Ranks that closed the channel, with the reason.
        channels: Meetings of the channels made from this one that not all ranks have come to: number → meeting.
        num_takers: How many ranks have come to this one.
    """

    world_size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    posted: dict[int, dict[int, _Posted]] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    channels: dict[int, Meeting] = field(default_factory=dict)
    num_takers: int = 0

    def bring(self, exchange: Exchange, sequence: int) -> _Posted:
        """Bring one rank's side of an exchange and copy from and to all that came before."""
        rank = exchange.rank
        mine = _Posted(exchange, make_records(exchange, sequence), set(range(self.world_size)) - {rank})
        with self.changed:
            others = self.posted.setdefault(sequence, {})
            for peer, theirs in others.items():
                _trade(rank, mine, peer, theirs)
            others[rank] = mine
            if len(others) == self.world_size:
                del self.posted[sequence]
            self._notice_absence()
            self.changed.notify_all()
        return mine

    def leave(self, rank: int, reason: str) -> None:
        """Say that a rank will bring nothing more; whoever waits for it is told."""
        with self.changed:
            self.left.setdefault(rank, reason)
            for ranks in self.posted.values():
                if rank in ranks and ranks[rank].missing:
                    ranks[rank].withdrawn = True
            self._notice_absence()
            if len(self.left) == self.world_size:
                self.posted.clear()
            self.changed.notify_all()

    def _notice_absence(self) -> None:
        for ranks in self.posted.values():
            for posted in ranks.values():
                gone = sorted(posted.missing & self.left.keys() - ranks.keys())
                if gone and posted.absence is None:
                    posted.absence = TransportError(f"rank {gone[0]} has left: {self.left[gone[0]]}")


def _trade(rank: int, mine: _Posted, peer: int, theirs: _Posted) -> None:
    """Copy both ways between two ranks; one copy, from the sender's memory into the receiver's."""
    if theirs.withdrawn:
        mine.absence = mine.absence or TransportError(f"rank {peer} has given up this exchange")
        return
    mine.missing.discard(peer)
    theirs.missing.discard(rank)
    error = disagreement(rank, peer, mine.records[peer], theirs.records[rank])
    if error is not None:
        mirrored = disagreement(peer, rank, theirs.records[rank], mine.records[peer])
        mine.mismatch, theirs.mismatch = mine.mismatch or error, theirs.mismatch or mirrored
        return
    mine.exchange.incoming(peer).copy_(theirs.exchange.outgoing(rank))
    theirs.exchange.incoming(rank).copy_(mine.exchange.outgoing(peer))


class _LocalTicket:
    """Waits for the other threads."""

    def __init__(self, meeting: Meeting, posted: _Posted) -> None:
        self._meeting, self._posted = meeting, posted

    def poll(self) -> bool:
        with self._meeting.changed:
            return self._settled()

    def block(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self._meeting.changed:
            while not self._settled():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._meeting.changed.wait(left_s)
        return True

    def missing(self) -> list[int]:
        with self._meeting.changed:
            return sorted(self._posted.missing)

    def _settled(self) -> bool:
        posted = self._posted
        if posted.missing:
            if posted.absence is not None:
                raise posted.absence
            return False
        if posted.mismatch is not None:
            raise posted.mismatch
        return True


class LocalWire:
    """One rank's end of a meeting."""

    devices: tuple[str, ...] = ("cpu",)
    size_check: SizeCheck = "in the backend"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self._num_channels = meeting, rank, 0

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> _LocalTicket:
        """See `Wire.begin`."""
        assert purpose == "data", "the meeting compares sizes by itself"
        return _LocalTicket(self._meeting, self._meeting.bring(exchange, sequence))

    def split(self, check_sizes: bool, timeout_s: float) -> Wire:
        """See `Wire.split`."""
        del check_sizes, timeout_s  # nothing to wait for: the first rank that comes makes the meeting
        with self._meeting.changed:
            made = self._meeting.channels.setdefault(self._num_channels, Meeting(self._meeting.world_size))
            made.num_takers += 1
            if made.num_takers == made.world_size:
                del self._meeting.channels[self._num_channels]
        self._num_channels += 1
        return LocalWire(made, self._rank)

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`."""
        self._meeting.leave(self._rank, "it closed the channel" if reason is None else str(reason))


def make_group(world_size: int, timeout_s: float) -> list[HostTransport]:
    """Make the first channel of every rank of a new group of threads."""
    meeting = Meeting(world_size)
    return [
        HostTransport(LocalWire(meeting, rank), "main", rank, world_size, timeout_s, True) for rank in range(world_size)
    ]
