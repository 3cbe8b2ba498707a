"""A rank's connection to one peer: messages both ways, with room kept for each (paper, section 3.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import TransportError
from .binding import Completion, Pair
from .messages import CREDIT, DATA, LEFT, MESSAGE, MESSAGE_BYTES, Message, count_on, make_tag, read_message, split_tag

RING_SLOTS = 8
WINDOW = 8  # chunks of one peer that may be granted and not yet arrived
RECEIVES = RING_SLOTS + WINDOW + 4  # messages, chunks, credits and one LEFT can be under way at once
SENDS = 32
_SENDS_FOR_DATA = SENDS - RING_SLOTS - 6  # the others are for messages, credits, a sign of life


class Link:
    """A reliable connection and two rings of messages: the peer writes one here, this rank the other one there.

    Each side says how much it has read (CREDIT), so that nothing is overwritten and no write finds the peer without
    room.

    Args:
        peer: Its rank.
        pair: The connection.
        memory: Shape [2, RING_SLOTS * MESSAGE_BYTES]: the ring that the peer writes, and this rank's copy of the one
            there.
        local_key: Of that memory.

    Attributes:
        left: Why the peer has left, once it has.
        broken: Why it cannot be reached, once it cannot.
        num_granted: Chunks that the peer has a place for here and that have not arrived.
    """

    def __init__(self, peer: int, pair: Pair, memory: NDArray[np.uint8], local_key: int) -> None:
        self.peer, self.pair = peer, pair
        self.left: str | None = None
        self.broken: str | None = None
        self.num_granted = 0
        self._was_flushed = False
        self._incoming, self._outgoing = memory
        self._outgoing_address, self._local_key = self._outgoing.ctypes.data, local_key
        self._remote_address = self._remote_key = 0
        self._num_sent = self._num_read_there = 0
        self._num_read = self._num_told = 0
        self._waiting: deque[bytes] = deque()
        self._works: dict[int, Callable[[], None] | None] = {}
        self._next_work = 1

    @property
    def ring_address(self) -> int:
        """Where the peer writes its messages."""
        return int(self._incoming.ctypes.data)

    def attach(self, remote_address: int, remote_key: int) -> None:
        """Learn where the ring is at the peer. Everything before only prepared."""
        self._remote_address, self._remote_key = remote_address, remote_key

    @property
    def num_under_way(self) -> int:
        """Writes that the peer's card has not acknowledged."""
        return len(self._works)

    @property
    def is_flushed(self) -> bool:
        """Whether all messages are delivered, or never will be."""
        return bool(self.broken) or not (self._works or self._waiting)

    def has_room_for_data(self) -> bool:
        """Whether a chunk may be written now."""
        return len(self._works) < _SENDS_FOR_DATA and not self.broken

    def write_data(
        self, source: tuple[int, int, int], address: int, key: int, tag: int, done: Callable[[], None]
    ) -> None:
        """Write a chunk to where the peer granted it; calls `done` when it is delivered."""
        self._write(source, address, key, make_tag(DATA, tag), done)

    def send(self, message: bytes) -> int:
        """Send a message, now or when the peer has room. Returns its number, for `has_sent`."""
        self._waiting.append(message)
        number = self._num_sent + len(self._waiting)
        self._send_waiting()
        return number

    def has_sent(self, number: int) -> bool:
        """Whether a message is on its way, whatever this rank does next."""
        return self._num_sent >= number

    def leave(self, message: bytes) -> None:
        """Send a last message ahead of all that wait, or without its text where the peer has no room."""
        if self.broken or not self._remote_key:
            return
        self._waiting.clear()
        if self._num_sent - self._num_read_there < RING_SLOTS and len(self._works) < SENDS:
            self.send(message)
        elif len(self._works) < SENDS:
            self._write((0, 0, 0), 0, 0, make_tag(LEFT, 0), None)

    def show_life(self) -> None:
        """Write nothing at all: only a peer whose process lives acknowledges it."""
        if not (self._works or self.broken or self.left):
            self._write((0, 0, 0), self._remote_address, self._remote_key, None, None)

    def complete(self, done: Completion) -> None:
        """Take note that a write of this rank's is delivered, or failed."""
        call = self._works.pop(done.work, None)
        if done.failure:
            self._break(done.failure)
            return
        if call is not None:
            call()
        self._send_waiting()
        self._tell()

    def receive(self, done: Completion) -> tuple[int, int] | Message | None:
        """Take note of a write of the peer's: a chunk (the number of its place, and its bytes), or a message."""
        if done.failure:
            self._break(done.failure)
            return None
        if not self.broken:
            self.pair.expect(1)
        kind, number = split_tag(done.tag)
        if kind == DATA:
            return number, done.size
        if kind == MESSAGE:
            return self._read(number, done.size)
        if kind == LEFT:
            self.left = self.left or "it gave no reason"
            return None
        read = count_on(self._num_read_there, number)
        if read > self._num_sent:
            raise TransportError(f"rank {self.peer} says it read {read} messages, of {self._num_sent}")
        self._num_read_there = read
        self._send_waiting()
        return None

    def _read(self, slot: int, size: int) -> Message:
        if slot != self._num_read % RING_SLOTS or size > MESSAGE_BYTES:
            raise TransportError(f"rank {self.peer} wrote a message of {size} bytes to slot {slot}, out of turn")
        message = read_message(self._incoming[slot * MESSAGE_BYTES :][:size], self.peer)
        self._num_read += 1
        self._tell()
        return message

    def _tell(self) -> None:
        if self._num_read - self._num_told >= RING_SLOTS // 2 and len(self._works) < SENDS - 2 and not self.broken:
            self._num_told = self._num_read
            self._write((0, 0, 0), 0, 0, make_tag(CREDIT, self._num_read), None)

    def _break(self, failure: str) -> None:
        if self.broken is None or self._was_flushed:  # what fails first may be reported last
            self.broken = f"rank {self.peer} cannot be reached: {failure}"
            self._was_flushed = "FLUSH" in failure

    def _send_waiting(self) -> None:
        while self._waiting and self._num_sent - self._num_read_there < RING_SLOTS and not self.broken:
            if len(self._works) >= SENDS - 4:
                return
            message = self._waiting.popleft()
            slot = self._num_sent % RING_SLOTS
            begin = slot * MESSAGE_BYTES
            self._outgoing[begin : begin + len(message)] = np.frombuffer(message, dtype=np.uint8)
            source = (self._outgoing_address + begin, len(message), self._local_key)
            self._num_sent += 1
            self._write(source, self._remote_address + begin, self._remote_key, make_tag(MESSAGE, slot), None)

    def _write(
        self,
        source: tuple[int, int, int],
        address: int,
        key: int,
        tag: int | None,
        done: Callable[[], None] | None,
    ) -> None:
        work = self._next_work
        self._next_work += 1
        self._works[work] = done
        self.pair.write(work, source, address, key, tag)
