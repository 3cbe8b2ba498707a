"""What a rank that fails leaves for peers who find its connections closed: who it was, and why (section 3.3)."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any

from .errors import TransportError

_TEXT_BYTES = 512


class LastWords:
    """A place in the store of a process group for the first failure of any rank.

    Gloo tells peers of a failed rank no more than that a connection is gone. So an exception that nobody catches is
    written down before the process ends. What a rank was told by others is no failure of its own.

    Args:
        store: Shared by the ranks.
        key: Where; the same on all ranks.
        rank: This rank.
    """

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        _speakers.add(self)
        _watch_interpreter()

    def say(self, error: BaseException) -> None:
        """Write down a failure of this rank."""
        self.write(f"rank {self._rank} failed: {type(error).__name__}: {error}")

    def write(self, text: str) -> None:
        """Write it down unless another rank was first. The store may be gone by now."""
        with suppress(Exception):
            self._store.compare_set(self._key, "", text.encode()[:_TEXT_BYTES].decode(errors="ignore"))

    def heard(self) -> str | None:
        """What a rank has said, if any has and the store is still there."""
        with suppress(Exception):
            if self._store.check([self._key]):
                said: bytes = self._store.get(self._key)
                return said[:_TEXT_BYTES].decode(errors="replace")
        return None


_speakers: weakref.WeakSet[LastWords] = weakref.WeakSet()
_pid = 0


def _watch_interpreter() -> None:
    global _pid
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    previous = sys.excepthook

    def speak(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == _pid and not isinstance(error, TransportError):
            for speaker in list(_speakers):
                speaker.say(error)
        previous(kind, error, trace)

    sys.excepthook = speak
