"""Pairs of ranks that copy straight between their tensors: whoever comes later copies for both (paper, section 3.3).

Copies within one GPU need multiprocessors, whatever CUDA call makes them; copies between GPUs do not. So a large piece
goes from the sender's tensor to the receiver's with no slot between. For that a rank must know where the other's
tensors are, and it does when the other has come to the same exchange before it. Under a lock of the pair, each notes
where its tensors are and looks whether the other has done so. The first goes on at once: its stream says when its
tensors are ready. The second enqueues both copies, one to the other's memory and one from it, behind that, and says
when they are done. No host waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .cuda_streams import HANDLE_BYTES, RECEIVE, SEND, Streams
from .errors import SizeMismatch, TransportError, TransportTimeout
from .exchange import Exchange
from .segment import Segment
from .slots import has_reached, low

RING = 64
NUM_EXPORTS = 512
_RECORD_WORDS = 8
_EXPORT_WORDS = 1 + HANDLE_BYTES // 8
_NUMBER, _SENT, _RECEIVED, _SOURCE, _SOURCE_AT, _TARGET, _TARGET_AT = range(7)
_READY, _PUSHED, _PULLED = range(3)
_NAP_S = 0.0002


def book_bytes(num_members: int) -> int:
    """Room in the segment for records and exported memory of all members."""
    return 8 * (num_members**2 * RING * _RECORD_WORDS + num_members * NUM_EXPORTS * _EXPORT_WORDS)


@dataclass(frozen=True)
class Meeting:
    """One exchange of one pair, as this rank sees it.

    Attributes:
        peer: The other rank.
        number: Of the meetings of this pair.
        theirs: The other's record, when it came first, so that this rank copies for both.
    """

    peer: int
    number: int
    theirs: list[int] | None

    @property
    def is_second(self) -> bool:
        """Whether this rank copies for both."""
        return self.theirs is not None


class Meetings:
    """The meetings of this rank with the other members of its host.

    Args:
        rank: This rank.
        members: Ranks of this host in order, this one among them.
        streams: Where copies and flags are enqueued.
        segment: Holds flags and records.
        flags: Where the segment is for the device.
        book_at: Where the records begin, in bytes from the segment's address.
        first: Where meetings are counted from.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        streams: Streams,
        segment: Segment,
        flags: int,
        book_at: int,
        first: int,
    ) -> None:
        self._rank, self._members = rank, list(members)
        self._streams, self._segment, self._flags = streams, segment, flags
        self._me, self._n = self._members.index(rank), len(members)
        words: NDArray[np.int64] = segment.view(book_at, book_bytes(self._n)).view(np.int64)
        num_records = self._n**2 * RING * _RECORD_WORDS
        self._records = words[:num_records].reshape(self._n, self._n, RING, _RECORD_WORDS)
        self._exports = words[num_records:].reshape(self._n, NUM_EXPORTS, _EXPORT_WORDS)
        self._serials: dict[object, int] = {}
        self._opened: dict[tuple[int, int], int] = {}
        self._num_exports = 0
        self.start_counts_at(first)

    def start_counts_at(self, first: int) -> None:
        """Set all counts, and the flags that this rank writes. Before anything is exchanged, on every member alike."""
        self._first = first
        self._next = dict.fromkeys((peer for peer in self._members if peer != self._rank), first)
        for peer in self._next:
            for flag in (_READY, _PUSHED, _PULLED):
                self._segment.write(self._at(flag, self._rank, peer), low(first))

    def enqueue(self, exchange: Exchange, peers: Sequence[int], deadline: float) -> list[Meeting]:
        """Meet these peers. Both tensors are adopted by the streams already; nothing here waits for a peer's tensors.

        Raises:
            SizeMismatch: The other was first, and disagrees about sizes.
            TransportTimeout: A peer is RING meetings behind.
        """
        if not peers:
            return []
        source, target = self._export(exchange.source), self._export(exchange.target)
        meetings = [self._meet(exchange, peer, source, target, deadline) for peer in peers]
        for meeting in meetings:
            if not meeting.is_second:
                self._write(SEND, _READY, meeting)
        for meeting in meetings:
            if meeting.is_second:
                self._copy_for_both(exchange, meeting)
        return meetings

    def flags_to_wait_for(self, meetings: Sequence[Meeting]) -> list[tuple[int, int]]:
        """Flags, by address, and counts that come when peers have copied for this rank."""
        return [
            (self._flags + self._at(flag, meeting.peer, self._rank), meeting.number + 1)
            for meeting in meetings
            if not meeting.is_second
            for flag in (_PUSHED, _PULLED)
        ]

    def missing(self, meetings: Sequence[Meeting]) -> list[int]:
        """Peers with whom a meeting is not over."""
        return [meeting.peer for meeting in meetings if not self._is_over(meeting)]

    def let_go(self) -> None:
        """Set the flags that this rank waits for, so that its streams end."""
        for peer, count in self._next.items():
            for flag in (_READY, _PUSHED, _PULLED):
                self._segment.write(self._at(flag, peer, self._rank), low(count))

    def _meet(
        self, exchange: Exchange, peer: int, source: tuple[int, int], target: tuple[int, int], deadline: float
    ) -> Meeting:
        number = self._next[peer]
        self._next[peer] = number + 1
        other = self._members.index(peer)
        mine, theirs = self._records[self._me, other, number % RING], self._records[other, self._me, number % RING]
        self._await_room(theirs, number, peer, deadline)
        sent, received = int(exchange.sent_bytes[peer]), int(exchange.received_bytes[peer])
        sent_at, received_at = source[1] + int(exchange.sent_at[peer]), target[1] + int(exchange.received_at[peer])
        with self._segment.locked(min(self._me, other) * self._n + max(self._me, other)):
            mine[:] = (number + 1, sent, received, source[0], sent_at, target[0], received_at, 0)
            seen: list[int] = theirs.tolist()
        if seen[_NUMBER] != number + 1:
            return Meeting(peer, number, None)
        if (sent, received) != (seen[_RECEIVED], seen[_SENT]):
            raise SizeMismatch(
                f"rank {self._rank} sends {sent} bytes to rank {peer} and expects {received}, which sends "
                f"{seen[_SENT]} and expects {seen[_RECEIVED]}"
            )
        return Meeting(peer, number, seen)

    def _await_room(self, theirs: NDArray[np.int64], number: int, peer: int, deadline: float) -> None:
        """A record serves again after RING meetings; before that, the peer must have seen it."""
        needed = number - RING + 1
        while needed > self._first and theirs[_NUMBER] < needed:
            if time.monotonic() > deadline:
                raise TransportTimeout(f"rank {peer} is {RING} exchanges behind rank {self._rank}")
            time.sleep(_NAP_S)

    def _copy_for_both(self, exchange: Exchange, meeting: Meeting) -> None:
        peer, streams = meeting.peer, self._streams
        other = self._members.index(peer)
        theirs = meeting.theirs
        assert theirs is not None, "only the second copies"
        ready = self._flags + self._at(_READY, peer, self._rank)
        sent, received = int(exchange.sent_bytes[peer]), int(exchange.received_bytes[peer])
        if sent:
            to = self._open(other, theirs[_TARGET]) + theirs[_TARGET_AT]
            streams.wait(SEND, ready, meeting.number + 1)
            streams.copy(SEND, to, exchange.source.data_ptr() + int(exchange.sent_at[peer]), sent)
        self._write(SEND, _PUSHED, meeting)
        if received:
            origin = self._open(other, theirs[_SOURCE]) + theirs[_SOURCE_AT]
            streams.wait(RECEIVE, ready, meeting.number + 1)
            streams.copy(RECEIVE, exchange.target.data_ptr() + int(exchange.received_at[peer]), origin, received)
        self._write(RECEIVE, _PULLED, meeting)

    def _export(self, memory: Tensor) -> tuple[int, int]:
        """Note in the book how others open the memory of a tensor. Returns its serial number and the offset."""
        if memory.numel() == 0:
            return -1, 0
        address = memory.data_ptr()
        key, base = self._streams.identify(address)
        serial = self._serials.get(key)
        if serial is None:
            serial = self._serials[key] = self._num_exports
            self._num_exports += 1
            entry = self._exports[self._me, serial % NUM_EXPORTS]
            entry[1:] = np.frombuffer(self._streams.export(base), dtype=np.int64)
            entry[0] = serial
        return serial, address - base

    def _open(self, member: int, serial: int) -> int:
        """Where a member's exported memory is for this rank's device."""
        address = self._opened.get((member, serial))
        if address is None:
            entry = self._exports[member, serial % NUM_EXPORTS]
            if entry[0] != serial:
                raise TransportError(
                    f"rank {self._members[member]} has shared {NUM_EXPORTS} more pieces of memory since"
                )
            address = self._opened[member, serial] = self._streams.open(entry[1:].tobytes())
        return address

    def _is_over(self, meeting: Meeting) -> bool:
        writer, other = (self._rank, meeting.peer) if meeting.is_second else (meeting.peer, self._rank)
        return all(
            has_reached(self._segment.read(self._at(flag, writer, other)), meeting.number + 1)
            for flag in (_PUSHED, _PULLED)
        )

    def _write(self, stream: int, flag: int, meeting: Meeting) -> None:
        self._streams.write(stream, self._flags + self._at(flag, self._rank, meeting.peer), meeting.number + 1)

    def _at(self, flag: int, writer: int, other: int) -> int:
        return self._segment.meeting(flag, self._members.index(writer), self._members.index(other))
