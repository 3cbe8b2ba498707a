"""Pairs of ranks that copy straight between their tensors: whoever comes later copies for both (paper, section 3.3).

Copies within one GPU need multiprocessors, whatever CUDA call makes them; copies between GPUs do not. So a large piece
goes from the sender's tensor to the receiver's with no slot between. For that a rank must know where the other's
tensors are, and it does when the other has come to the same exchange before it. Under a lock of the pair, each notes
where its tensors are and looks whether the other has done so. The first goes on: its stream says when its tensors are
ready. The second enqueues both copies, one to the other's memory and one from it, behind that, and says when they are
done. No host waits for another, but for a moment: one GPU takes twice as long for both copies as two GPUs for one each,
so the first looks for about that time whether the second comes, and then each enqueues its own. Whoever is ahead by
more than a meeting first lets the other catch up, for as long: it would stay ahead for ever, as the other has more to
do. Where that is in vain again and again, the first waits less.

Up to some MiB both copies take less time than the host needs for the next exchange. Then nobody looks, and the second
enqueues both in one stream, where two streams would take four calls more. A flag is always written by the same
stream: it counts, and would otherwise show a meeting before the one that came earlier is over.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .cuda_streams import HANDLE_BYTES, RECEIVE, SEND, Streams
from .errors import SizeMismatch, TransportError, TransportTimeout
from .exchange import Exchange
from .segment import Segment
from .slots import low

RING = 64
ONE_STREAM_BYTES = 8 << 20  # of both pieces of a pair
NUM_EXPORTS = 512
_RECORD = struct.Struct("8q")
_RECORD_WORDS = 8
_EXPORT_WORDS = 1 + HANDLE_BYTES // 8
_NUMBER, _SENT, _RECEIVED, _SOURCE, _SOURCE_AT, _TARGET, _TARGET_AT, _IS_STILL_HERE = range(8)
_READY, _PUSHED, _PULLED = range(3)  # written by the sending, the sending and the receiving stream
_NAP_S = 0.0002
_BYTES_PER_S = 400e9  # of a fast link; a first rank looks for the second for as long as both copies take
_MOST_PATIENCE_S = 400e-6
_PATIENT, _OF = 8, 32  # in so many of so many meetings in a row to which the second came late
_IMPATIENCE = 0.1


def book_bytes(num_members: int) -> int:
    """Room in the segment for records and exported memory of all members."""
    return 8 * (num_members**2 * RING * _RECORD_WORDS + num_members * NUM_EXPORTS * _EXPORT_WORDS)


class Meeting(NamedTuple):
    """One exchange of one pair, as this rank sees it.

    Attributes:
        peer: The other rank.
        number: Of the meetings of this pair.
        theirs: The other's record; None when this rank did not see it, so that the other copies for both.
        both_here: Each copies its own piece.
        on_one_stream: Whoever copies for both does so in one stream.
    """

    peer: int
    number: int
    theirs: tuple[int, ...] | None
    both_here: bool = False
    on_one_stream: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the other copies for both."""
        return self.theirs is None


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
        patience_s: How long a first rank looks for the second; None means about as long as the copies take.
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
        patience_s: float | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._rank, self._members = rank, list(members)
        self._index = {peer: index for index, peer in enumerate(members)}
        self._streams, self._segment, self._flags = streams, segment, flags
        self._me, self._n = self._index[rank], len(members)
        words: NDArray[np.int64] = segment.view(book_at, book_bytes(self._n)).view(np.int64)
        num_words = self._n**2 * RING * _RECORD_WORDS
        # NumPy would take several times as long for so few words.
        self._records = words[:num_words].view(np.uint8).data
        self._record_words = self._records.cast("q")
        self._exports = words[num_words:].reshape(self._n, NUM_EXPORTS, _EXPORT_WORDS)
        self._serials: dict[object, int] = {}
        self._opened: dict[tuple[int, int], int] = {}
        self._num_exports = self._num_missed = 0
        pairs = [(peer, rank) for peer in members] + [(rank, peer) for peer in members]
        me, n = self._me, self._n
        self._locks = {peer: segment.locked(min(me, other) * n + max(me, other)) for peer, other in self._index.items()}
        # Asked for some ten times an exchange.
        self._places_of_flags = {
            (flag, writer, other): segment.meeting(flag, self._index[writer], self._index[other])
            for writer, other in pairs
            for flag in (_READY, _PUSHED, _PULLED)
        }
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
        source, target = self._export(exchange.rows), self._export(exchange.out)
        patience_s = self._patience(exchange, peers)
        if patience_s:
            ahead = [(peer, self._next[peer] - 1) for peer in peers if self._next[peer] > self._first]
            self._look_for(ahead, patience_s)
        meetings = [self._come(exchange, peer, source, target, deadline, patience_s > 0) for peer in peers]
        if patience_s:
            self._look_for([(each.peer, each.number) for each in meetings if each.theirs is None], patience_s)
            meetings = [self._settle(exchange, meeting) for meeting in meetings]
            self._count_missed(meetings)
        for meeting in meetings:
            if meeting.theirs is None or meeting.both_here:
                self._write(SEND, _READY, meeting)
        for meeting in meetings:
            if meeting.theirs is not None:
                self._push(exchange, meeting)
        for meeting in meetings:
            if not (meeting.theirs is None or meeting.both_here or meeting.on_one_stream):
                self._pull(exchange, meeting)
        return meetings

    def _count_missed(self, meetings: Sequence[Meeting]) -> None:
        if any(meeting.theirs is None for meeting in meetings):
            self._num_missed += 1
        elif any(meeting.both_here for meeting in meetings):
            self._num_missed = 0

    def _patience(self, exchange: Exchange, peers: Sequence[int]) -> float:
        if self._patience_s is not None:
            return self._patience_s
        size = sum(int(exchange.sent_bytes[peer]) + int(exchange.received_bytes[peer]) for peer in peers)
        if size <= ONE_STREAM_BYTES:
            return 0.0
        patience_s = min(_MOST_PATIENCE_S, size / _BYTES_PER_S)
        if self._num_missed % _OF >= _PATIENT:
            patience_s *= _IMPATIENCE
        return patience_s

    def flags_to_wait_for(self, meetings: Sequence[Meeting]) -> list[tuple[int, int]]:
        """Flags, by address, and counts that come when peers have copied for this rank."""
        return [
            (self._flags + self._at(flag, meeting.peer, self._rank), meeting.number + 1)
            for meeting in meetings
            for flag in _awaited(meeting)
        ]

    def missing(self, meetings: Sequence[Meeting]) -> list[int]:
        """Peers with whom a meeting is not over."""
        return [meeting.peer for meeting in meetings if not self._is_over(meeting)]

    def let_go(self) -> None:
        """Set the flags that this rank waits for, so that its streams end."""
        for peer, count in self._next.items():
            for flag in (_READY, _PUSHED, _PULLED):
                self._segment.write(self._at(flag, peer, self._rank), low(count))

    def _come(
        self,
        exchange: Exchange,
        peer: int,
        source: tuple[int, int],
        target: tuple[int, int],
        deadline: float,
        stays: bool = True,
    ) -> Meeting:
        """Note where the tensors are, and see whether the other has. Who does not stay has made up its mind."""
        number = self._next[peer]
        self._next[peer] = number + 1
        mine, theirs = self._places(peer, number)
        if number + 1 - RING > self._first:
            self._await_room(number, peer, deadline)
        sent, received = int(exchange.sent_bytes[peer]), int(exchange.received_bytes[peer])
        sent_at, received_at = source[1] + int(exchange.sent_at[peer]), target[1] + int(exchange.received_at[peer])
        with self._locks[peer]:
            _RECORD.pack_into(
                self._records, 8 * mine, number + 1, sent, received, source[0], sent_at, target[0], received_at, stays
            )
            seen = _RECORD.unpack_from(self._records, 8 * theirs)
        on_one_stream = sent + received <= ONE_STREAM_BYTES
        if seen[_NUMBER] != number + 1:
            return Meeting(peer, number, None, False, on_one_stream)
        meeting = Meeting(peer, number, seen, seen[_IS_STILL_HERE] != 0, on_one_stream)
        if not stays:
            self._compare(exchange, meeting)
        return meeting

    def _look_for(self, meetings: Sequence[tuple[int, int]], patience_s: float) -> None:
        """Give peers a moment to come to meetings, of these numbers."""
        words = self._record_words
        waited_for = [(self._places(peer, number)[1] + _NUMBER, number + 1) for peer, number in meetings]
        until = time.perf_counter() + patience_s
        while any(words[at] < number for at, number in waited_for) and time.perf_counter() < until:
            pass

    def _settle(self, exchange: Exchange, meeting: Meeting) -> Meeting:
        """Decide who copies, for both alike, and compare sizes."""
        peer, number = meeting.peer, meeting.number
        if meeting.theirs is None:
            mine, theirs = self._places(peer, number)
            with self._locks[peer]:
                if self._record_words[theirs + _NUMBER] != number + 1:
                    self._record_words[mine + _IS_STILL_HERE] = 0
                    return meeting
                seen = _RECORD.unpack_from(self._records, 8 * theirs)
            meeting = meeting._replace(theirs=seen, both_here=True)
        self._compare(exchange, meeting)
        return meeting

    def _compare(self, exchange: Exchange, meeting: Meeting) -> None:
        peer, theirs = meeting.peer, meeting.theirs
        assert theirs is not None, "whoever is not the first has seen the other's record"
        sent, received = int(exchange.sent_bytes[peer]), int(exchange.received_bytes[peer])
        if sent != theirs[_RECEIVED] or received != theirs[_SENT]:
            raise SizeMismatch(
                f"rank {self._rank} sends {sent} bytes to rank {peer} and expects {received}, which sends "
                f"{theirs[_SENT]} and expects {theirs[_RECEIVED]}"
            )

    def _places(self, peer: int, number: int) -> tuple[int, int]:
        """Where this rank's and the other's records of a meeting are, in words."""
        other, at = self._index[peer], number % RING
        mine, theirs = self._me * self._n + other, other * self._n + self._me
        return (mine * RING + at) * _RECORD_WORDS, (theirs * RING + at) * _RECORD_WORDS

    def _await_room(self, number: int, peer: int, deadline: float) -> None:
        """A record serves again after RING meetings: when the peer has come to a later one, and so is through with it.

        That it has come to that meeting itself is not enough: it may be about to look whether this rank has.
        """
        later = number - RING + 1
        if later <= self._first:
            return
        at = self._places(peer, later)[1] + _NUMBER
        while self._record_words[at] < later + 1:
            if time.monotonic() > deadline:
                raise TransportTimeout(f"rank {peer} is {RING} exchanges behind rank {self._rank}")
            time.sleep(_NAP_S)

    def _push(self, exchange: Exchange, meeting: Meeting) -> None:
        """Copy this rank's piece to the other's memory; the other's from there too, where that is not `_pull`'s."""
        peer, theirs, streams = meeting.peer, meeting.theirs, self._streams
        assert theirs is not None, "only who knows where to copies"
        sent = theirs[_RECEIVED]
        pulled = theirs[_SENT] if meeting.on_one_stream and not meeting.both_here else 0
        if sent or pulled:
            self._await_ready(SEND, meeting)
        if sent:
            to = self._open(self._index[peer], theirs[_TARGET]) + theirs[_TARGET_AT]
            streams.copy(SEND, to, exchange.rows.data_ptr() + int(exchange.sent_at[peer]), sent)
        if pulled:
            self._copy_back(SEND, exchange, peer, theirs)
        self._write(SEND, _PUSHED, meeting)

    def _pull(self, exchange: Exchange, meeting: Meeting) -> None:
        """Copy the other's piece from its memory."""
        assert meeting.theirs is not None, "only who knows where from copies"
        if meeting.theirs[_SENT]:
            self._await_ready(RECEIVE, meeting)
            self._copy_back(RECEIVE, exchange, meeting.peer, meeting.theirs)
        self._write(RECEIVE, _PULLED, meeting)

    def _copy_back(self, stream: int, exchange: Exchange, peer: int, theirs: tuple[int, ...]) -> None:
        origin = self._open(self._index[peer], theirs[_SOURCE]) + theirs[_SOURCE_AT]
        self._streams.copy(stream, exchange.out.data_ptr() + int(exchange.received_at[peer]), origin, theirs[_SENT])

    def _await_ready(self, stream: int, meeting: Meeting) -> None:
        """Let a stream wait until the other's tensors are ready, unless they are already."""
        at, count = self._places_of_flags[_READY, meeting.peer, self._rank], meeting.number + 1
        if not self._segment.shows(at, count):
            self._streams.wait(stream, self._flags + at, count)

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
        here, there, number = self._rank, meeting.peer, meeting.number + 1
        if meeting.both_here:
            return self._shows(_PUSHED, here, there, number) and self._shows(_PUSHED, there, here, number)
        writer, other = (there, here) if meeting.theirs is None else (here, there)
        pushed = self._shows(_PUSHED, writer, other, number)
        return pushed and (meeting.on_one_stream or self._shows(_PULLED, writer, other, number))

    def _shows(self, flag: int, writer: int, other: int, count: int) -> bool:
        return self._segment.shows(self._places_of_flags[flag, writer, other], count)

    def _write(self, stream: int, flag: int, meeting: Meeting) -> None:
        at = self._places_of_flags[flag, self._rank, meeting.peer]
        self._streams.write(stream, self._flags + at, meeting.number + 1)

    def _at(self, flag: int, writer: int, other: int) -> int:
        return self._places_of_flags[flag, writer, other]


def _awaited(meeting: Meeting) -> tuple[int, ...]:
    """Flags that the other writes when it has copied for this rank."""
    if meeting.theirs is not None:
        return (_PUSHED,) if meeting.both_here else ()
    return (_PUSHED,) if meeting.on_one_stream else (_PUSHED, _PULLED)
