"""A bounded ring of pinned slots between a GPU and a thread, with the flags that order them (paper, section 6.3).

To pin memory CUDA waits for all streams of the process, which may wait for peers that pin memory themselves. So the
first channel makes slots for later ones too (see `windows_opening.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cuda_streams import RECEIVE, SEND, Streams, most_channels
from .places import take_place
from .rounds import HEADER_BYTES
from .slots import has_reached, low
from .stream_pool import fill_pool

DEPTH = 4
_LARGEST_CHUNK_BYTES = 4 << 20
_SPARED_CHUNK_BYTES = 1 << 20  # smaller ones are not made for the sake of later channels
_FILLED, _SENT, _ARRIVED, _EMPTIED = range(4)
_WORDS_A_LINE = 16

_Kind = tuple[int, int, int, int]
_idle: dict[_Kind, list[PinnedSlots]] = {}
_taking = threading.Lock()


class PinnedSlots:
    """DEPTH slots for what leaves the GPU and as many for what comes to it.

    A round has a number, which only grows; its slots are that number modulo DEPTH. Four counts go with it: the GPU has
    filled so many, the thread has sent so many, so many have arrived, and the GPU has emptied so many.

    Attributes:
        chunk_bytes: Most bytes for a rank in a slot.
        count: Rounds enqueued so far.
    """

    def __init__(self, key: _Kind, streams: Streams, chunk_bytes: int, first: int) -> None:
        self._key, self.streams, self.chunk_bytes, self.count = key, streams, chunk_bytes, first
        self._first = first
        self._slot_bytes = (chunk_bytes + HEADER_BYTES) * key[1]
        self._outgoing, self._incoming = (streams.pinned(DEPTH * self._slot_bytes) for _ in range(2))
        self._flags = streams.pinned(4 * 4 * _WORDS_A_LINE)
        self._words: NDArray[np.uint32] = self._flags.numpy().view(np.uint32)
        for flag in range(4):
            self._set(flag, first)

    # ---- for whoever enqueues --------------------------------------------------------------------------------------

    def next(self) -> int:
        """The number of the next round."""
        number, self.count = self.count, self.count + 1
        return number

    def outgoing_address(self, number: int) -> int:
        """Where the GPU puts a round."""
        return self._outgoing.data_ptr() + number % DEPTH * self._slot_bytes

    def incoming_address(self, number: int) -> int:
        """Where the GPU takes a round from."""
        return self._incoming.data_ptr() + number % DEPTH * self._slot_bytes

    def fill_when_free(self, number: int) -> None:
        """Let the sending stream wait until the slot's last round was sent."""
        needed = number + 1 - DEPTH
        if needed > self._first and not self._shows(_SENT, needed):
            self.streams.wait(SEND, self._address(_SENT), needed)

    def say_filled(self, number: int) -> None:
        """Let the sending stream say that the slot is full."""
        self.streams.write(SEND, self._address(_FILLED), number + 1)

    def empty_when_arrived(self, number: int) -> None:
        """Let the receiving stream wait until the round is here."""
        self.streams.wait(RECEIVE, self._address(_ARRIVED), number + 1)

    def say_emptied(self, number: int) -> None:
        """Let the receiving stream say that the slot is free."""
        self.streams.write(RECEIVE, self._address(_EMPTIED), number + 1)

    # ---- for the thread, without a CUDA call -----------------------------------------------------------------------

    def is_ready(self, number: int) -> bool:
        """Whether the GPU has filled the round's slot, and emptied the one that it will arrive in."""
        needed = number + 1 - DEPTH
        return self._shows(_FILLED, number + 1) and (needed <= self._first or self._shows(_EMPTIED, needed))

    def outgoing(self, number: int, size: int) -> Tensor:
        """What a round sends. Shape [size], uint8."""
        return self._outgoing.narrow(0, number % DEPTH * self._slot_bytes, size)

    def incoming(self, number: int, size: int) -> Tensor:
        """Where a round arrives. Shape [size], uint8."""
        return self._incoming.narrow(0, number % DEPTH * self._slot_bytes, size)

    def say_passed_on(self, number: int) -> None:
        """Say that a round was sent and that what the others sent is here."""
        self._set(_SENT, number + 1)
        self._set(_ARRIVED, number + 1)

    def let_go(self) -> None:
        """Let the streams pass all waits; what they copy after that is worthless."""
        self._set(_SENT, self.count)
        self._set(_ARRIVED, self.count)

    def are_empty(self) -> bool:
        """Whether the GPU is through with all rounds."""
        return self._shows(_FILLED, self.count) and self._shows(_EMPTIED, self.count)

    def put_away(self) -> None:
        """Keep them for a later channel."""
        self.streams.rest()
        _idle.setdefault(self._key, []).append(self)

    def _shows(self, flag: int, count: int) -> bool:
        return has_reached(int(self._words[flag * _WORDS_A_LINE]), count)

    def _set(self, flag: int, count: int) -> None:
        self._words[flag * _WORDS_A_LINE] = low(count)

    def _address(self, flag: int) -> int:
        return self._flags.data_ptr() + flag * _WORDS_A_LINE * 4


def channels_within(world_size: int, window_bytes: int) -> int:
    """For how many channels the first one makes slots: for all that may be in use at once, if a window holds them.

    Example:
        >>> [channels_within(n, 256 << 20) for n in (2, 8, 16, 64)] if most_channels() == 3 else [3, 3, 2, 1]
        [3, 3, 2, 1]
    """
    return max(1, min(most_channels(), window_bytes // (2 * DEPTH * world_size * _SPARED_CHUNK_BYTES)))


def slots_for(
    device: int,
    world_size: int,
    window_bytes: int,
    num_channels: int,
    make_streams: Callable[[int], Streams],
    first: int,
    timeout_s: float = math.inf,
) -> PinnedSlots:
    """Take slots that a closed channel left, or make some for so many channels, of at most `window_bytes` in all.

    All ranks must give the same `num_channels`, as the size of a slot comes from it.
    """
    key = (device, world_size, window_bytes, num_channels)
    with _taking:  # else a second channel would make its own, while the first one's streams may wait already
        free = _idle.setdefault(key, [])
        fill_pool(device)
        if not free:
            chunk = min(_LARGEST_CHUNK_BYTES, window_bytes // (2 * DEPTH * world_size * num_channels) - HEADER_BYTES)
            chunk = max(chunk, 1 << 10) // 512 * 512
            made = [PinnedSlots(key, make_streams(device), chunk, first) for _ in range(num_channels)]
            free.extend(made)
        slots = free.pop()
        try:
            take_place(slots.streams, timeout_s)
        except BaseException:
            free.append(slots)
            raise
        return slots


def empty_rows(size: int) -> Tensor:
    """Host memory for a round that has headers alone. Shape [size], uint8."""
    return torch.zeros(size, dtype=torch.uint8, device="cpu")
