"""Closes the tables' channels when this process is about to end, so that peers need not wait for it (section 3.2)."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol


class Leaves(Protocol):
    """Whoever has channels that peers wait at."""

    def finish(self) -> None:
        """Do what peers may be at already, within seconds, and close them."""
        ...

    def leave(self) -> None:
        """Close them, without waiting for anybody."""
        ...


_live: weakref.WeakSet[Leaves] = weakref.WeakSet()
_pid = 0


def leave_at_exit(one: Leaves) -> None:
    """Call `one.leave()` when an exception ends this process, `one.finish()` when the interpreter begins to shut down.

    A process that ends may take a while, say for a balancer that tells its peers why; these cannot listen while they
    wait for rows. Call it at the first batch: what was registered last goes first. Where all goes well, peers may be at
    exchanges that threads of this process have yet to begin, of a batch that was prefetched and never needed; MPI takes
    none back.
    """
    global _pid
    _live.add(one)
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    previous = sys.excepthook

    def leave_first(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)  # which may tell peers why
        _leave()

    sys.excepthook = leave_first
    atexit.register(_finish)


def _leave() -> None:
    if os.getpid() == _pid:
        for one in list(_live):
            one.leave()


def _finish() -> None:
    if os.getpid() == _pid:
        for one in list(_live):
            one.finish()
