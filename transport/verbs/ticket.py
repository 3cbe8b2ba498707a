"""One exchange over RDMA: records first, small pieces with them, chunks where the receiver grants places (section 3.3).

Every rank tells every other what it is about to exchange with it (the record that other backends compare, so both find
a disagreement before a byte moves). A piece of up to 4032 bytes rides along. For a larger one the receiver, once it
agrees, grants places for some chunks, and for more as these arrive; the sender writes each chunk to its place. Larger
blocks of an all_gather go around the ring of Figure 6: a rank passes on one chunk while the next one comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..agreement import ROW_BYTES, SENT, disagreement, make_records
from ..errors import TransportError
from ..exchange import Exchange
from ..ring import Chunk, Stream, pairwise_receives, pairwise_sends, ring_receives, ring_sends
from .link import WINDOW, Link
from .messages import GRANTS_PER_MESSAGE, PAYLOAD_BYTES, Grant, Key, Message, write_grants, write_record
from .trace import Step

if TYPE_CHECKING:
    from .wire import VerbsWire


@dataclass
class _Incoming:
    """Chunks from one peer. The first `num_granted` have a place, the first `num_arrived` are here."""

    stream: Stream
    num_granted: int = 0
    num_arrived: int = 0


@dataclass
class _Outgoing:
    """Chunks for one peer. The first `num_posted` are on the wire, the first `num_delivered` there."""

    stream: Stream
    grants: deque[Grant] = field(default_factory=deque)
    num_posted: int = 0
    num_delivered: int = 0


@dataclass(frozen=True)
class Place:
    """Where a chunk of a peer's will arrive.

    Attributes:
        ticket: The exchange.
        peer: The sender.
        index: Of the chunk in what the peer sends.
        chunk: The chunk.
        slot: Of the landing memory; None where it goes straight to the caller's memory.
    """

    ticket: VerbsTicket
    peer: int
    index: int
    chunk: Chunk
    slot: int | None


class VerbsTicket:
    """One exchange under way. See `Ticket`. Everything but `poll` and `block` is called under the wire's lock."""

    def __init__(self, wire: VerbsWire, exchange: Exchange, key: Key) -> None:
        self._wire, self._exchange, self._key = wire, exchange, key
        self._rank, self._world_size = exchange.rank, len(exchange.sent_rows)
        self._gathers = exchange.operation == "all_gather"
        self._source, self._target = exchange.source.numpy(), exchange.target.numpy()
        self._mine = make_records(exchange, key.sequence)
        self._theirs = np.full_like(self._mine, -1)
        self._unsent = pairwise_sends(self._rank, self._world_size)
        self._records_sent: list[tuple[Link, int]] = []
        self._unheard = set(self._unsent)
        self._agreed: set[int] = set()
        self._found: list[TransportError] = []
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._passing: dict[tuple[int, int], NDArray[np.uint8]] = {}  # of blocks that this rank does not agree to
        self._is_apart = False  # some rank is at another operation
        self._is_finished = False
        self.waits_for_source = False

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        if not self._is_finished:
            self._wire.advance()
        return self._is_finished_or_raise()

    def block(self, seconds: float) -> bool:
        """See `Ticket.block`. Waits in the kernel, without the interpreter lock, for the card to report."""
        return self._wire.block(self, seconds)

    def missing(self) -> list[int]:
        """Ranks that this one still waits for."""
        return sorted(self.needed())

    def needed(self) -> set[int]:
        """Ranks without which the exchange cannot be completed."""
        receiving = {peer for peer, each in self._incoming.items() if each.num_arrived < len(each.stream)}
        sending = {peer for peer, each in self._outgoing.items() if each.num_delivered < len(each.stream)}
        waiting = {link.peer for link, number in self._records_sent if not link.has_sent(number)}
        return self._unheard | receiving | sending | waiting | set(self._unsent)

    def _is_finished_or_raise(self) -> bool:
        if not self._is_finished:
            self._is_finished = self._has_all()
        if not self._is_finished and self._wire.troubled:
            for peer in sorted(self.needed() & self._wire.troubled):
                link = self._wire.links[peer]
                reason = link.broken if link.left is None else f"rank {peer} has left: {link.left}"
                self._wire.forget(self._key)
                raise self._disagreement() or TransportError(reason)
        if self._is_finished:
            self._wire.forget(self._key)
            error = self._disagreement()
            if error is not None:
                raise error
        return self._is_finished

    def _has_all(self) -> bool:
        if self._unsent or self._unheard:
            return False
        self._records_sent = [each for each in self._records_sent if not each[0].has_sent(each[1])]
        arrived = all(each.num_arrived == len(each.stream) for each in self._incoming.values())
        delivered = all(each.num_delivered == len(each.stream) for each in self._outgoing.values())
        return arrived and delivered and not self._records_sent

    def _disagreement(self) -> TransportError | None:
        if not self._found:
            return None
        more = f" (and {len(self._found) - 1} more ranks disagree)" if len(self._found) > 1 else ""
        return type(self._found[0])(f"{self._found[0]}{more}")

    def advance(self) -> None:
        """Go as far as possible without blocking."""
        self.waits_for_source = False
        if self._unsent:
            self._send_records()
        for peer, incoming in self._incoming.items():
            if incoming.num_granted < len(incoming.stream):
                self._grant(peer, incoming)
        for peer, outgoing in self._outgoing.items():
            if outgoing.grants:
                self._send_chunks(peer, outgoing)

    def _send_records(self) -> None:
        for peer in list(self._unsent):
            start = int(self._exchange.sent_at[peer])
            size = int(self._exchange.sent_rows[peer]) * self._exchange.row_bytes
            payload = self._source[start : start + size] if size <= PAYLOAD_BYTES else b""
            if len(payload) and not self._is_ready(start, size):
                continue
            self._unsent.remove(peer)
            link = self._wire.links[peer]
            self._records_sent.append((link, link.send(write_record(self._key, self._mine[peer], payload))))

    def hear(self, peer: int, message: Message) -> None:
        """Take a peer's record, and its piece if that came along."""
        theirs = message.record
        size = int(theirs[SENT]) * int(theirs[ROW_BYTES])
        if peer not in self._unheard or size < 0 or len(message.payload) != (size if size <= PAYLOAD_BYTES else 0):
            raise TransportError(
                f"rank {peer} broke the protocol: a second record, or one of {size} bytes with {len(message.payload)}"
            )
        self._unheard.discard(peer)
        self._theirs[peer] = theirs
        error = disagreement(self._rank, peer, self._mine[peer], theirs)
        if error is not None:
            self._found.append(error)
            self._exchange.skip(peer)
            self._is_apart |= bool((theirs[:SENT] != self._mine[peer, :SENT]).any())
        else:
            self._agreed.add(peer)
            if message.payload:
                self._put(peer, Chunk(peer, 0, size), np.frombuffer(message.payload, dtype=np.uint8))
        if not self._gathers and error is None:
            self._open_pair(peer)
        if self._gathers and not self._unheard and not self._is_apart:
            self._open_ring()

    def _open_pair(self, peer: int) -> None:
        received, sent = int(self._exchange.received_bytes[peer]), int(self._exchange.sent_bytes[peer])
        if received > PAYLOAD_BYTES:
            self._incoming[peer] = _Incoming(Stream([peer], [received], self._wire.chunk_bytes))
            order = pairwise_receives(self._rank, self._world_size)
            self._incoming = {each: self._incoming[each] for each in order if each in self._incoming}
        if sent > PAYLOAD_BYTES:
            self._outgoing[peer] = _Outgoing(Stream([peer], [sent], self._wire.chunk_bytes))

    def _open_ring(self) -> None:
        """All blocks' sizes are as their owners say, also where this rank expects another one and only passes it on."""
        sizes = [int(theirs[SENT]) * int(theirs[ROW_BYTES]) for theirs in self._theirs]
        sizes[self._rank] = len(self._source)
        sizes = [size if size > PAYLOAD_BYTES else 0 for size in sizes]
        before, after = (self._rank - 1) % self._world_size, (self._rank + 1) % self._world_size
        received, sent = ring_receives(self._rank, self._world_size), ring_sends(self._rank, self._world_size)
        chunk_bytes = self._wire.chunk_bytes
        self._incoming[before] = _Incoming(Stream(received, [sizes[owner] for owner in received], chunk_bytes))
        self._outgoing[after] = _Outgoing(Stream(sent, [sizes[owner] for owner in sent], chunk_bytes))

    def _grant(self, peer: int, incoming: _Incoming) -> None:
        link, wire = self._wire.links[peer], self._wire
        grants: list[Grant] = []
        while incoming.num_granted < len(incoming.stream) and link.num_granted < WINDOW:
            index = incoming.num_granted
            chunk = incoming.stream[index]
            address = self._target_address(chunk) if chunk.owner in self._agreed else 0
            grant = wire.grant(Place(self, peer, index, chunk, None), address)
            if grant is None:
                break
            incoming.num_granted += 1
            grants.append(grant)
            if len(grants) == GRANTS_PER_MESSAGE:
                break
        if grants:
            link.send(write_grants(self._key, grants))

    def take_grants(self, peer: int, grants: list[Grant]) -> None:
        """Take note that a peer has places for some of the next chunks."""
        outgoing = self._outgoing.get(peer)
        if outgoing is None or outgoing.num_posted + len(outgoing.grants) + len(grants) > len(outgoing.stream):
            raise TransportError(f"rank {peer} broke the protocol: it has places for chunks that it does not get")
        for grant in grants:
            index = outgoing.num_posted + len(outgoing.grants)
            self._note("granted", peer, outgoing.stream[index])
            outgoing.grants.append(grant)

    def _send_chunks(self, peer: int, outgoing: _Outgoing) -> None:
        link = self._wire.links[peer]
        while outgoing.grants and link.has_room_for_data():
            chunk = outgoing.stream[outgoing.num_posted]
            data = self._find(outgoing.num_posted, chunk)
            if data is None:
                return
            staged = self._wire.stage(data)
            if staged is None:
                return
            source, release = staged
            self._post(peer, outgoing, chunk, source, release)
            self._passing.pop(chunk[:2], None)

    def _post(
        self,
        peer: int,
        outgoing: _Outgoing,
        chunk: Chunk,
        source: tuple[int, int, int],
        release: Callable[[], None],
    ) -> None:
        grant = outgoing.grants.popleft()
        if grant.size != chunk.size:
            raise TransportError(f"rank {peer} has a place of {grant.size} bytes for a chunk of {chunk.size}")
        outgoing.num_posted += 1

        def delivered() -> None:
            outgoing.num_delivered += 1
            release()
            self._note("delivered", peer, chunk)

        self._note("on the wire", peer, chunk)
        self._wire.links[peer].write_data(source, grant.address, grant.remote_key, grant.tag, delivered)

    def _find(self, index: int, chunk: Chunk) -> NDArray[np.uint8] | None:
        """The bytes of an outgoing chunk, or None while they are not there."""
        if self._gathers and chunk.owner != self._rank:
            incoming = self._incoming[(self._rank - 1) % self._world_size]
            own = -(-len(self._source) // self._wire.chunk_bytes) if len(self._source) > PAYLOAD_BYTES else 0
            if index >= own + incoming.num_arrived:  # the outgoing stream is ours, then the incoming one
                return None
            if chunk.owner not in self._agreed:
                return self._passing[chunk[:2]]
            start = int(self._exchange.received_at[chunk.owner]) + chunk.start
            return self._target[start : start + chunk.size]
        start = chunk.start if self._gathers else int(self._exchange.sent_at[chunk.owner]) + chunk.start
        if not self._is_ready(start, chunk.size):
            return None
        return self._source[start : start + chunk.size]

    def arrive(self, place: Place) -> None:
        """Take a chunk that was written to its place: put it where it belongs, pass it on."""
        chunk, incoming = place.chunk, self._incoming[place.peer]
        if place.index != incoming.num_arrived:
            raise TransportError(f"rank {place.peer} sent chunk {place.index} before chunk {incoming.num_arrived}")
        self._note("arrived", place.peer, chunk)
        incoming.num_arrived += 1
        if place.slot is None:
            self._put(place.peer, chunk, None)
            return
        data = self._wire.landed(place.slot, chunk.size)
        passed_on = self._pass_on(chunk, place.slot)
        if chunk.owner in self._agreed:
            self._put(place.peer, chunk, data)
        elif not passed_on:
            self._passing[chunk[:2]] = data.copy()
        if not passed_on:
            self._wire.free(place.slot)

    def _pass_on(self, chunk: Chunk, slot: int) -> bool:
        """Send a chunk of the ring on from where it landed, if the next rank has a place for it already."""
        after = (self._rank + 1) % self._world_size
        if not self._gathers or chunk.owner == after:
            return False
        outgoing = self._outgoing[after]
        is_next = outgoing.grants and outgoing.stream[outgoing.num_posted] == chunk
        if not is_next or not self._wire.links[after].has_room_for_data():
            return False
        wire = self._wire
        self._post(after, outgoing, chunk, wire.landing_source(slot, chunk.size), lambda: wire.free(slot))
        return True

    def _put(self, peer: int, chunk: Chunk, data: NDArray[np.uint8] | None) -> None:
        start = int(self._exchange.received_at[chunk.owner]) + chunk.start
        if data is not None:
            self._target[start : start + chunk.size] = data
        self._note("in place", peer, chunk)
        if self._exchange.chunks is not None:
            self._exchange.chunks.landed(start, start + chunk.size)

    def _target_address(self, chunk: Chunk) -> int:
        return self._target.ctypes.data + int(self._exchange.received_at[chunk.owner]) + chunk.start

    def _is_ready(self, start: int, size: int) -> bool:
        chunks = self._exchange.chunks
        if chunks is None or chunks.is_ready(start, start + size):
            return True
        self.waits_for_source = True
        return False

    def _note(self, step: Step, peer: int, chunk: Chunk) -> None:
        if self._key.lane == 0:
            self._wire.note(step, self._key.sequence, peer, chunk)
