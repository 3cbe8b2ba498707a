"""Registered memory: what a wire makes for itself, in slots, and what callers keep registered (paper, section 3.3)."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from .binding import Card, Region


def allocate(size_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed pages that a forked child does not get.

    A child that shared them would make the kernel give the parent a copy at its next write, while the card goes on with
    the old page.
    """
    pages = mmap.mmap(-1, max(size_bytes, 1))
    pages.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(pages, dtype=np.uint8)[:size_bytes]


class Slots:
    """Equal pieces of one registered region, taken and given back.

    Attributes:
        slot_bytes: Bytes of each.
        region: What they are part of.
    """

    def __init__(self, card: Card, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._memory = allocate(num_slots * slot_bytes)
        self._address = self._memory.ctypes.data
        self.region = card.register(self._memory)
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self) -> int | None:
        """Take a slot; None when all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Let others take the slot."""
        self._free.append(slot)

    def address(self, slot: int) -> int:
        """Where the slot begins."""
        return self._address + slot * self.slot_bytes

    def view(self, slot: int, size_bytes: int) -> NDArray[np.uint8]:
        """The first bytes of a slot. Shape [size_bytes]."""
        begin = slot * self.slot_bytes
        return self._memory[begin : begin + size_bytes]

    def close(self) -> None:
        """Unregister all."""
        self.region.close()


class Kept:
    """Memory of callers that stays registered, so that chunks go straight from and to it."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._lock = threading.Lock()
        self._entries: list[tuple[int, int, Region, NDArray[np.uint8]]] = []  # by address

    def add(self, memory: NDArray[np.uint8]) -> None:
        """Register memory, and keep it alive. Nothing happens if it is part of what is registered already."""
        begin = memory.ctypes.data
        if self.find(begin, memory.nbytes) is not None:
            return
        entry = (begin, begin + memory.nbytes, self._card.register(memory), memory)
        with self._lock:
            self._entries = sorted([*self._entries, entry], key=lambda each: each[0])

    def find(self, address: int, size_bytes: int) -> Region | None:
        """The registered region that all these bytes are in, if there is one."""
        entries = self._entries
        index = bisect_right(entries, address, key=lambda each: each[0]) - 1
        if index >= 0 and address + size_bytes <= entries[index][1]:
            return entries[index][2]
        return None

    def close(self) -> None:
        """Unregister all."""
        with self._lock:
            entries, self._entries = self._entries, []
        for entry in entries:
            entry[2].close()
