"""A channel over RDMA: connections to all peers, one completion queue, and what arrives at it (paper, section 3.3)."""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import TransportClosed, TransportError, TransportTimeout, Unavailable
from ..exchange import Exchange, plan_all_to_all
from ..leaving import keep_for_ever, leave_in_time
from ..ring import Chunk
from ..wire import Purpose, SizeCheck
from .binding import Address, Completion
from .endpoint import ADDRESS_BYTES, Endpoint, pack_endpoint, unpack_endpoint
from .link import RECEIVES, RING_SLOTS, SENDS, Link
from .memory import Slots, allocate
from .messages import GRANTS, LEAVING, MESSAGE_BYTES, Grant, Key, Message, write_leaving
from .opened import Device, translated
from .ticket import Place, VerbsTicket
from .trace import ChunkEvent, Step

LANDING_SLOTS = 16
STAGING_SLOTS = 8
_LANES: dict[Purpose, int] = {"data": 0, "sizes": 1}
_CHANNEL_LANE = 2
_LINGER_S = 0.25
_KEEP_ALIVE_S = 1.0
_SOURCE_LOOK_S = 0.0005
_MOST_WAITING = 4096  # exchanges that a peer may be ahead


class VerbsWire:
    """See `Wire`. One thread uses it at a time, and another may release it meanwhile; a lock keeps them apart.

    Args:
        device: The card.
        rank: This rank.
        world_size: Number of ranks.
        chunk_bytes: Largest chunk that this rank can handle; all ranks take the least.

    Attributes:
        links: Connections, by peer.
        troubled: Peers that have left, or cannot be reached.
        chunk_bytes: Of every chunk, the last of a block apart.
    """

    devices: tuple[str, ...] = ("cpu",)
    size_check: SizeCheck = "in the backend"

    def __init__(self, device: Device, rank: int, world_size: int, chunk_bytes: int) -> None:
        self._device, self._rank, self._world_size = device, rank, world_size
        self.chunk_bytes = min(chunk_bytes, device.card.most_message_bytes)
        self.links: dict[int, Link] = {}
        self.troubled: set[int] = set()
        self._by_pair: dict[int, Link] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        self._tickets: dict[Key, VerbsTicket] = {}
        self._early: dict[Key, dict[int, Message]] = {}  # records for exchanges that have not begun here
        self._num_early: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        self._next_place = self._num_told = 0
        self._life_at = 0.0  # when peers that somebody waits for are next asked for a sign of life
        self._landing: Slots | None = None
        self._staging: Slots | None = None
        device.num_users += 1
        try:
            with translated(device.card):
                self._open()
        except BaseException:
            self._give_back()
            raise
        leave_in_time(self)
        self._pid = os.getpid()

    def _open(self) -> None:
        peers = [peer for peer in range(self._world_size) if peer != self._rank]
        card, depth = self._device.card, max(1, len(peers) * (SENDS + RECEIVES))
        if depth > card.most_completions:
            raise Unavailable(f"verbs: {self._world_size} ranks need {depth} completions, {card.most_completions} fit")
        self._ring = allocate(max(len(peers), 1) * 2 * RING_SLOTS * MESSAGE_BYTES)
        self._ring_region = card.register(self._ring)
        self._queue = card.make_queue(depth)
        self._poller = select.poll()
        self._poller.register(self._queue.fd, select.POLLIN)
        rings = self._ring.reshape(-1, 2, RING_SLOTS * MESSAGE_BYTES)
        self._first_packets = {peer: secrets.randbits(24) for peer in peers}
        for peer, ring in zip(peers, rings, strict=False):
            pair = card.make_pair(self._queue, SENDS, RECEIVES)
            link = self.links[peer] = Link(peer, pair, ring, self._ring_region.local_key)
            self._by_pair[pair.number] = link
            pair.expect(RECEIVES)

    def describe(self) -> NDArray[np.uint8]:
        """What each peer needs to know to connect. Shape [world_size, ADDRESS_BYTES]."""
        device = self._device
        rows = np.zeros((self._world_size, ADDRESS_BYTES), dtype=np.uint8)
        for peer, link in self.links.items():
            card = device.card
            address = Address(link.pair.number, self._first_packets[peer], card.lid, card.mtu, device.port.gid)
            ring = (link.ring_address, self._ring_region.remote_key)
            rows[peer] = pack_endpoint(Endpoint(device.binding, address, *ring, self.chunk_bytes))
        return rows

    def attach(self, described: NDArray[np.uint8]) -> None:
        """Connect to the peers, as they described themselves. Shape [world_size, ADDRESS_BYTES].

        Raises:
            TransportError: What a peer says cannot be, or it uses another binding.
        """
        for peer, link in self.links.items():
            theirs = unpack_endpoint(described[peer], peer)
            if theirs.binding != self._device.binding:
                raise TransportError(
                    f"verbs: rank {self._rank} uses {self._device.binding}, rank {peer} {theirs.binding}: all ranks "
                    "must name the same binding"
                )
            self.chunk_bytes = min(self.chunk_bytes, theirs.chunk_bytes)
            with translated(self._device.card):
                link.pair.connect(theirs.address, self._first_packets[peer], self._device.ack_timeout)
            link.attach(theirs.ring_address, theirs.ring_key)

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> VerbsTicket:
        """See `Wire.begin`."""
        return self._begin(exchange, Key(_LANES[purpose], sequence))

    def _begin(self, exchange: Exchange, key: Key) -> VerbsTicket:
        with self._lock, translated(self._device.card):
            if self._is_closed:
                raise TransportClosed("another thread closed the channel")
            ticket = self._tickets[key] = VerbsTicket(self, exchange, key)
            for peer, message in self._early.pop(key, {}).items():
                self._num_early[peer] -= 1
                ticket.hear(peer, message)
            ticket.advance()
        return ticket

    def forget(self, key: Key) -> None:
        """An exchange is over."""
        self._tickets.pop(key, None)

    def advance(self) -> None:
        """Handle what has arrived and go on with all exchanges, without blocking."""
        with self._lock, translated(self._device.card):
            if not self._is_closed:
                self._reap()
                for ticket in list(self._tickets.values()):
                    ticket.advance()

    def block(self, ticket: VerbsTicket, seconds: float) -> bool:
        """As `Ticket.block`. Sleeps until the card reports something."""
        deadline = time.monotonic() + seconds
        while not ticket.poll():
            now = time.monotonic()
            if now >= deadline:
                return False
            with self._lock, translated(self._device.card):
                if self._is_closed:
                    return False
                self._queue.arm()
                if self._reap():  # what came before the queue was armed
                    continue
                if now >= self._life_at:
                    self._life_at = now + _KEEP_ALIVE_S
                    self._show_life()
            most_s = _SOURCE_LOOK_S if any(each.waits_for_source for each in self._tickets.values()) else 1.0
            self._sleep(min(most_s, deadline - now, max(self._life_at - now, 0.001)))
        return True

    def _show_life(self) -> None:
        """Make the card find out whether the peers that somebody waits for are alive."""
        for peer in {peer for ticket in self._tickets.values() for peer in ticket.needed()}:
            self.links[peer].show_life()

    def _sleep(self, seconds: float) -> None:
        readable = self._poller.poll(max(seconds, 0) * 1000)
        with self._lock, translated(self._device.card):
            if readable and not self._is_closed:
                self._queue.acknowledge()

    def _reap(self) -> bool:
        """Handle all completions; true if there were any."""
        any_came = False
        while found := self._queue.poll(64):
            any_came = True
            for done in found:
                self._handle(done)
        return any_came

    def _handle(self, done: Completion) -> None:
        link = self._by_pair.get(done.pair)
        if link is None:
            return
        if done.work:
            link.complete(done)
        elif isinstance(received := link.receive(done), Message):
            self._take_message(link, received)
        elif received is not None:
            self._land(link, *received)
        if link.left is not None or link.broken is not None:
            self.troubled.add(link.peer)

    def _land(self, link: Link, number: int, size: int) -> None:
        place = self._places.pop(number, None)
        if place is None or place.peer != link.peer or place.chunk.size != size:
            raise TransportError(
                f"rank {link.peer} broke the protocol: {size} bytes to place {number}, which is not its"
            )
        link.num_granted -= 1
        place.ticket.arrive(place)

    def _take_message(self, link: Link, message: Message) -> None:
        if message.kind == LEAVING:
            link.left = message.payload.decode(errors="replace")
            return
        ticket = self._tickets.get(message.key)
        if ticket is None:
            waiting = self._early.setdefault(message.key, {})
            self._num_early[link.peer] = self._num_early.get(link.peer, 0) + 1
            if message.kind == GRANTS or link.peer in waiting or self._num_early[link.peer] > _MOST_WAITING:
                raise TransportError(f"rank {link.peer} broke the protocol: message for exchange {message.key}")
            waiting[link.peer] = message
        elif message.kind == GRANTS:
            ticket.take_grants(link.peer, message.grants)
        else:
            ticket.hear(link.peer, message)

    def grant(self, place: Place, address: int) -> Grant | None:
        """Find a place for a chunk, at its address if that is registered, or in the landing memory; None if full."""
        region = self._device.kept.find(address, place.chunk.size) if address else None
        if region is None:
            slot = self._landing_slots.take()
            if slot is None:
                return None
            place = replace(place, slot=slot)
            region, address = self._landing_slots.region, self._landing_slots.address(slot)
        while self._next_place in self._places:
            self._next_place = (self._next_place + 1) % 2**30
        number = self._next_place
        self._next_place = (number + 1) % 2**30
        self._places[number] = place
        self.links[place.peer].num_granted += 1
        return Grant(number, region.remote_key, address, place.chunk.size)

    @property
    def _landing_slots(self) -> Slots:
        if self._landing is None:
            self._landing = Slots(self._device.card, LANDING_SLOTS, self.chunk_bytes)
        return self._landing

    def landed(self, slot: int, size_bytes: int) -> NDArray[np.uint8]:
        """What arrived in a slot. Shape [size_bytes]."""
        return self._landing_slots.view(slot, size_bytes)

    def landing_source(self, slot: int, size_bytes: int) -> tuple[int, int, int]:
        """A slot, to write from: address, bytes, key."""
        return self._landing_slots.address(slot), size_bytes, self._landing_slots.region.local_key

    def free(self, slot: int) -> None:
        """Give back a slot."""
        self._landing_slots.give_back(slot)

    def stage(self, data: NDArray[np.uint8]) -> tuple[tuple[int, int, int], Callable[[], None]] | None:
        """Where to write bytes from, and what to call when they are delivered; None while all slots are taken.

        Memory that is kept registered is written from where it is.
        """
        address, size = data.ctypes.data, len(data)
        region = self._device.kept.find(address, size)
        if region is not None:
            return (address, size, region.local_key), lambda: None
        if self._staging is None:
            self._staging = Slots(self._device.card, STAGING_SLOTS, self.chunk_bytes)
        slots = self._staging
        slot = slots.take()
        if slot is None:
            return None
        slots.view(slot, size)[:] = data
        return (slots.address(slot), size, slots.region.local_key), lambda: slots.give_back(slot)

    def keep(self, memory: NDArray[np.uint8]) -> None:
        """Register memory that will be sent from, or received into, again and again: it is then never copied.

        It stays registered, and alive, until all channels made from one another are closed.

        Args:
            memory: Shape [bytes], contiguous.
        """
        with self._lock, translated(self._device.card):
            if self._is_closed:
                raise TransportClosed("another thread closed the channel")
            self._device.kept.add(memory)

    def note(self, step: Step, sequence: int, peer: int, chunk: Chunk) -> None:
        """Write into the trace, if there is one."""
        if self._device.trace is not None:
            self._device.trace.append(ChunkEvent(time.monotonic_ns(), step, sequence, peer, *chunk))

    def split(self, check_sizes: bool, timeout_s: float) -> VerbsWire:
        """See `Wire.split`. Ranks tell each other the new addresses over this channel."""
        del check_sizes  # this backend compares sizes in any case
        with self._lock:
            if self._is_closed:
                raise TransportClosed("another thread closed the channel")
            made = VerbsWire(self._device, self._rank, self._world_size, self.chunk_bytes)
        deadline = time.monotonic() + timeout_s
        try:
            made.attach(self._swap(made.describe(), deadline))
            self._swap(made.describe(), deadline)  # all have connected: nobody writes to a pair that is not
        except BaseException:
            made.abandon()
            raise
        return made

    def _swap(self, rows: NDArray[np.uint8], deadline: float) -> NDArray[np.uint8]:
        """Give row i to rank i. Shape [world_size, ADDRESS_BYTES]."""
        ones = np.ones(self._world_size, dtype=np.int64)
        exchange = plan_all_to_all(self._rank, self._world_size, torch.from_numpy(rows), ones, ones, None)
        ticket = self._begin(exchange, Key(_CHANNEL_LANE, self._num_told))
        self._num_told += 1
        while not ticket.block(0.25):
            if self._is_closed:
                raise TransportClosed("another thread closed the channel")
            if time.monotonic() > deadline:
                raise TransportTimeout(f"verbs: ranks {ticket.missing()} did not come to make a channel")
        return exchange.out.numpy()

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`. Tells the peers, and waits a moment until they have heard it."""
        self.leave("it closed the channel" if reason is None else str(reason))

    def leave(self, reason: str) -> None:
        """Tell the peers why this rank leaves, and close."""
        with self._lock:
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
            try:
                with translated(self._device.card):
                    message = write_leaving(reason)
                    for link in self.links.values():
                        if link.left is None:
                            link.leave(message)
                    self._linger()
            except TransportError:
                pass  # whoever waits gets the first error; this one is of no use to anybody
            finally:
                self._give_back()

    def let_be(self) -> None:
        """See `Leaving.let_be`. A child has the same open device, and its objects would destroy the connections."""
        keep_for_ever(self)

    def __del__(self) -> None:
        if hasattr(self, "_pid"):  # it was made, at least
            self.leave("it dropped the channel without closing it")

    def _linger(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while any(not (link.is_flushed or link.left) for link in self.links.values()):
            self._queue.arm()
            if self._reap():
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if self._poller.poll(left_s * 1000):
                self._queue.acknowledge()

    def abandon(self) -> None:
        """Close without a word; for a channel that was never made."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._give_back()

    def _give_back(self) -> None:
        self._tickets.clear()
        self._places.clear()
        with translated(self._device.card):
            for link in self.links.values():
                link.pair.close()
            for name in ("_queue", "_ring_region", "_landing", "_staging"):
                each = getattr(self, name, None)
                if each is not None:
                    each.close()
            self._device.leave()
