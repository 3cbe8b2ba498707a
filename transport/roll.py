"""Who has come to which collective: counts in memory that the ranks of a host share (paper, section 3.3).

Neither MPI nor gloo tells whom a collective waits for. So every rank counts what it begins and completes on each
channel, where the others of its host can read it; whoever has waited too long looks who is behind. Nothing is sent for
it. Ranks of other hosts are not seen.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .errors import TransportError
from .segment import NAME_BYTES, Segment
from .windows_opening import host_key
from .wire import Purpose

_SLOTS = 128  # channels at once; later ones are not counted
_WORDS = 3
_BEGUN, _DONE, _LOOKED = range(_WORDS)
_PURPOSES: tuple[Purpose, ...] = ("sizes", "data")
_KEY_BYTES = 80
_SILENT_MS = 1000  # whoever waits looks every 250 ms
_AGAIN_S = 0.5
_WORD_BYTES = 8

Gather = Callable[[bytes, int], list[bytes]]
"""Gives everybody's bytes, of at most a size that all know, to everybody; collective."""


class Roll:
    """What the ranks of this host have counted. Made by `open_roll`.

    Args:
        segment: The memory; None where ranks cannot share any, so that only this rank's counts are known.
        members: Ranks of this host in order.
        rank: This rank.
    """

    def __init__(self, segment: Segment | None, members: Sequence[int], rank: int) -> None:
        self._segment, self._rank = segment, rank
        if segment is not None:  # or each connection would keep a file, and with it the memory
            weakref.finalize(self, segment.leave).atexit = False  # a rank that ends is there until its process is gone
        self._members = [rank] if segment is None else list(members)
        size = _bytes_for(len(self._members))
        memory: Any = bytearray(size) if segment is None else segment.view(segment.data_at, size)
        self.words = memoryview(memory).cast("q")
        self._free = list(range(_SLOTS - 1, 0, -1))  # slot 0 is the first channel's

    def reserve(self) -> int:
        """A slot for a channel, -1 when there is none left; rank 0's is the one that all use."""
        try:
            return self._free.pop()
        except IndexError:  # or another thread got it
            return -1

    def slot(self, told: str) -> int:
        """The slot that rank 0 told of; -1 for none, and for anything that is none of this roll."""
        return (
            int(told)
            if self._segment is not None and told.isascii() and told.isdecimal() and int(told) < _SLOTS
            else -1
        )

    def give_back(self, slot: int) -> None:
        """It was not needed."""
        if slot >= 0:
            self._free.append(slot)

    def columns(self, slot: int) -> dict[Purpose, Column]:
        """What this rank counts for a channel, from zero."""
        return {purpose: Column(self, slot, index) for index, purpose in enumerate(_PURPOSES)}

    def at(self, member: int, slot: int, index: int) -> int:
        """Where the words of a member are."""
        return ((member * _SLOTS + slot) * len(_PURPOSES) + index) * _WORDS

    def at_own(self, slot: int, index: int) -> int:
        """Where this rank's words are."""
        return self.at(self._members.index(self._rank), slot, index)

    def gone(self) -> list[int]:
        """Ranks of this host whose processes have ended."""
        if self._segment is None:
            return []
        return [rank for member, rank in enumerate(self._members) if self._segment.news(member) is not None]

    def missing(self, slot: int, index: int, number: int) -> list[int] | None:
        """Whom a collective waits for; None when that is not known.

        Ranks that have not begun it, or have ended; or else those that have begun it and have not looked for it since.
        A host that stands still for a while makes all ranks silent, this one too. So where only silence tells, looks
        twice, half a second apart.

        Args:
            slot: The channel's.
            index: Of the purpose.
            number: Of the collective, from 1.
        """
        absent, silent = self._find(slot, index, number)
        if silent and not absent:
            time.sleep(_AGAIN_S)
            absent, silent = self._find(slot, index, number)
        return absent or silent or None

    def _find(self, slot: int, index: int, number: int) -> tuple[list[int], list[int]]:
        """Ranks that are not there, and those that are not heard of."""
        now = int(1000 * time.monotonic())
        absent, silent = set(self.gone()), list[int]()
        for member, rank in enumerate(self._members):
            at = self.at(member, slot, index)
            begun, done, looked = self.words[at : at + _WORDS]
            if begun < number:
                absent.add(rank)
            elif done < number and now - looked > _SILENT_MS and rank != self._rank:
                silent.append(rank)
        return sorted(absent - {self._rank}), silent


class Column:
    """Counts of this rank for one purpose of a channel.

    Args:
        roll: Where they are.
        slot: The channel's; -1 for none, which counts for nobody.
        index: Of the purpose.
    """

    def __init__(self, roll: Roll, slot: int, index: int) -> None:
        self._roll, self._slot, self._index = roll, slot, index
        self._at = roll.at_own(slot, index) if slot >= 0 else 0
        self._words = roll.words if slot >= 0 else memoryview(bytearray(_WORDS * _WORD_BYTES)).cast("q")
        self._begun = self._done = 0
        for word in range(_WORDS):  # an earlier channel may have had the slot
            self._words[self._at + word] = 0

    def begin(self) -> int:
        """Count a collective that was begun; returns its number."""
        self._begun += 1
        self._words[self._at] = self._begun
        self._words[self._at + _DONE] = self._done  # an earlier channel may end what it began only now
        return self._begun

    def finish(self) -> None:
        """Count one that is complete."""
        self._done += 1
        self._words[self._at + _DONE] = self._done

    def look(self, now: float) -> None:
        """Note that this rank looks whether one is complete. `now` is the monotonic time."""
        self._words[self._at + _LOOKED] = int(1000 * now)

    def missing(self, number: int) -> list[int] | None:
        """See `Roll.missing`."""
        return self._roll.missing(self._slot, self._index, number) if self._slot >= 0 else None


def open_roll(gather: Gather, rank: int) -> Roll:
    """Share memory with the ranks of this host, where that is possible; collective over all ranks."""
    hosts = gather(host_key().encode(), _KEY_BYTES)
    members = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    member, num_members = members.index(rank), len(members)
    segment: Segment | None = None
    with suppress(TransportError):  # all of this host do without
        segment = Segment.create(num_members, 0, _bytes_for(num_members)) if member == 0 else None
    try:
        name = gather(b"" if segment is None else segment.name.encode(), NAME_BYTES)[members[0]]
        if name and member:
            with suppress(TransportError, OSError):
                segment = Segment.open(name.decode(errors="replace"), num_members, member, _bytes_for(num_members))
        have = gather(b"0" if segment is None else b"1", 1)
    finally:  # also when a rank does not come
        if member == 0 and segment is not None:
            segment.unlink()
    if segment is not None and any(have[other] != b"1" for other in members):
        segment.leave()
        segment = None
    return Roll(segment, members, rank)


def _bytes_for(num_members: int) -> int:
    return num_members * _SLOTS * len(_PURPOSES) * _WORDS * _WORD_BYTES
