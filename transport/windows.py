"""Slots between this rank and its peers, and the counts of what passed through them (paper, sections 3.3 and 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from .cuda_streams import RECEIVE, Streams
from .exchange import Exchange
from .segment import Segment
from .slots import in_rounds, low


class Mark(NamedTuple):
    """The counts at the end of a transfer: peer → chunks."""

    sent: dict[int, int]
    received: dict[int, int]


class Rounds(NamedTuple):
    """What an exchange copies by way of slots, and what a rank keeps; places are in bytes within the tensors.

    Attributes:
        kept_from: Where the own piece begins in the source.
        kept_to: Where it belongs in the target.
        rounds: One after the other; for each what is sent and what is received: peer, place and bytes.
    """

    kept_from: int
    kept_to: int
    rounds: list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]]


class Windows:
    """Everything that streams need to exchange chunks with the other members of this host.

    Args:
        rank: This rank.
        members: Ranks of this host in order, this one among them.
        streams: Where copies and flags are enqueued.
        segment: Holds the flags and the slots.
        flags: Where the segment is for the device.
        outgoing: Where the slots of each peer for what this rank sends are, for this device.
        incoming: Where this rank's slots for what each peer sends are, for this device.
        slot_bytes: Bytes of a slot.
        depth: Slots between a sender and a receiver.
        sending: The stream that fills slots: SEND, or RECEIVE where no piece is larger than a slot.
        first: Where counts begin.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        streams: Streams,
        segment: Segment,
        flags: int,
        outgoing: dict[int, int],
        incoming: dict[int, int],
        slot_bytes: int,
        depth: int,
        sending: int,
        first: int,
    ) -> None:
        self.rank, self.members, self.streams, self.segment = rank, list(members), streams, segment
        self.slot_bytes, self._depth, self._flags = slot_bytes, depth, flags
        self._outgoing, self._incoming, self._sending = outgoing, incoming, sending
        self._outgoing_flags = {p: (self._arrived_at(rank, p), self._consumed_at(rank, p)) for p in outgoing}
        self._incoming_flags = {p: (self._arrived_at(p, rank), self._consumed_at(p, rank)) for p in incoming}
        self.start_counts_at(first)

    def start_counts_at(self, first: int) -> None:
        """Set all counts, and the flags that show them. Before anything is exchanged, on every member alike."""
        self._sent = dict.fromkeys(self._outgoing, first)
        self._received = dict.fromkeys(self._incoming, first)
        self._first = first
        self._mark = Mark(self._sent.copy(), self._received.copy())  # of the last transfer
        for peer in self._outgoing:
            self.segment.write(self._arrived_at(self.rank, peer), low(first))
            self.segment.write(self._consumed_at(peer, self.rank), low(first))

    def lay_out(self, exchange: Exchange, sent: Sequence[int], received: Sequence[int]) -> Rounds:
        """Work out what goes through slots. It is the same for all exchanges of a layout.

        Args:
            exchange: The exchange.
            sent: Bytes for each rank that go through slots. Length world_size.
            received: Bytes from each rank that come through slots. Length world_size.
        """
        sent_at, received_at = exchange.sent_at.tolist(), exchange.received_at.tolist()
        kept_at = sent_at[self.rank], received_at[self.rank]
        if not (any(sent) or any(received)):
            return Rounds(*kept_at, [])
        sends = in_rounds(self.rank, self.members, sent, self.slot_bytes, sends=True)
        receives = in_rounds(self.rank, self.members, received, self.slot_bytes, sends=False)
        rounds = [
            (
                [(chunk.peer, sent_at[chunk.peer] + chunk.start, chunk.size) for chunk in outgoing],
                [(chunk.peer, received_at[chunk.peer] + chunk.start, chunk.size) for chunk in incoming],
            )
            for outgoing, incoming in zip_longest(sends, receives, fillvalue=())
        ]
        return Rounds(*kept_at, rounds)

    def enqueue(self, exchange: Exchange, todo: Rounds) -> Mark:
        """Enqueue copies of an exchange that the streams have adopted, and this rank's own piece. Waits for no peer.

        Sends and receives alternate in rounds: a stream that is full blocks the host, and then what it waits for has
        been enqueued everywhere.
        """
        if not (todo.rounds or exchange.kept_bytes):
            return self._mark
        from_here, to_here = exchange.rows.data_ptr(), exchange.out.data_ptr()
        if exchange.kept_bytes:
            self.streams.copy(RECEIVE, to_here + todo.kept_to, from_here + todo.kept_from, exchange.kept_bytes)
        for outgoing, incoming in todo.rounds:
            for peer, start, size in outgoing:
                self._send(peer, from_here + start, size)
            for peer, start, size in incoming:
                self._receive(peer, to_here + start, size)
        if todo.rounds:
            self._mark = Mark(self._sent.copy(), self._received.copy())
        return self._mark

    def _send(self, peer: int, source: int, size: int) -> None:
        streams = self.streams
        number = self._sent[peer]
        self._sent[peer] = number + 1
        needed, (arrived_at, at) = number + 1 - self._depth, self._outgoing_flags[peer]
        if needed > self._first and not self.segment.shows(at, needed):
            streams.wait(self._sending, self._flags + at, needed)
        slot = self._outgoing[peer] + number % self._depth * self.slot_bytes
        streams.copy(self._sending, slot, source, size)
        streams.write(self._sending, self._flags + arrived_at, number + 1)

    def _receive(self, peer: int, target: int, size: int) -> None:
        streams = self.streams
        number = self._received[peer]
        self._received[peer] = number + 1
        arrived_at, consumed_at = self._incoming_flags[peer]
        if not self.segment.shows(arrived_at, number + 1):
            streams.wait(RECEIVE, self._flags + arrived_at, number + 1)
        slot = self._incoming[peer] + number % self._depth * self.slot_bytes
        streams.copy(RECEIVE, target, slot, size)
        streams.write(RECEIVE, self._flags + consumed_at, number + 1)

    def missing(self, mark: Mark) -> list[int]:
        """Peers with whom a transfer has not been completed."""
        shows, received = self.segment.shows, mark.received
        return [
            peer
            for peer, count in mark.sent.items()
            if not shows(self._outgoing_flags[peer][0], count)
            or not shows(self._incoming_flags[peer][1], received[peer])
        ]

    def is_quiet(self) -> bool:
        """Whether nothing is under way, so that another channel may take over."""
        mark = Mark(self._sent, self._received)
        shows = self.segment.shows
        consumed = (shows(self._outgoing_flags[peer][1], count) for peer, count in self._sent.items())
        return not self.missing(mark) and all(consumed)

    def let_go(self) -> None:
        """Set the flags that this rank's streams wait for, so that they end. What they copy after that is worthless."""
        for peer in self._outgoing:
            self.segment.write(self._consumed_at(self.rank, peer), low(self._sent[peer]))
            self.segment.write(self._arrived_at(peer, self.rank), low(self._received[peer]))

    def bad_news(self) -> str | None:
        """What has become of a peer that failed or ended; None while all are well."""
        for index, peer in enumerate(self.members):
            if peer != self.rank and (news := self.segment.news(index)) is not None:
                return f"rank {peer} has left: {news}"
        return None

    def _arrived_at(self, source: int, target: int) -> int:
        return self.segment.arrived(self.members.index(source), self.members.index(target))

    def _consumed_at(self, source: int, target: int) -> int:
        return self.segment.consumed(self.members.index(source), self.members.index(target))
