"""Threads beside the trainer, and their end before that of Python (paper, section 3.3).

An interpreter that ends does not wait for such threads. One that then comes back from an operation of torch, or frees a
tensor, asks for the interpreter's lock and is ended instead: `pthread_exit` unwinds C++ that allows no exceptions, and
the process ends with SIGABRT. So every thread of this package is started here, and has ended before Python begins to.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from .leaving import leave_first, leave_last

_PATIENCE_S = 2.0  # for threads that were asked
_LONGEST_S = 8.0  # for what they are in to fail, or to be computed
_EXIT_CODE = 1


class BackgroundThread(threading.Thread):
    """A thread that does not keep Python from ending, but that has ended before.

    Args:
        name: Its name.
        work: What it does.
        ask: Called when the process ends: let the thread end after what it has to do.
        cut: Called if it has not, seconds later: let what it waits for fail. Neither `ask` nor `cut` waits or raises.
            All three are forgotten when `work` is over.
    """

    def __init__(
        self, name: str, work: Callable[[], object], ask: Callable[[], object], cut: Callable[[], object]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self.ask, self.cut = work, ask, cut

    def start(self) -> None:
        """See `threading.Thread.start`."""
        for thread in list(_started):
            if not (thread is self or thread.is_alive()):
                _started.discard(thread)
        try:
            super().start()
        finally:  # also where a signal interrupts it
            _started.add(self)

    def run(self) -> None:
        """See `threading.Thread.run`."""
        try:
            self._work()
        finally:
            self._work = self.ask = self.cut = _do_nothing


def python_ends() -> bool:
    """Whether Python has begun to end: from 3.12 on it starts no threads any more.

    It first waits for threads that are no daemons, which may go on for long after the main thread.
    """
    waited_for = (thread for thread in threading.enumerate() if not thread.daemon)
    return not any(thread.is_alive() for thread in (threading.main_thread(), *waited_for))


def _do_nothing() -> None:
    pass


_started: set[BackgroundThread] = set()  # strong: a thread frees what it had at its very end


def end_threads() -> None:
    """Have all threads end, within ten seconds. Forked children have none."""
    for step, seconds in enumerate((_PATIENCE_S, _LONGEST_S)):
        for thread in _running():
            (thread.ask, thread.cut)[step]()
        deadline = time.monotonic() + seconds
        for thread in _running():
            thread.join(max(0.0, deadline - time.monotonic()))


def exit_if_any_is_left() -> None:
    """End the process at once, with status 1, if a thread is still at work: it would end it with SIGABRT."""
    if names := [thread.name for thread in _running()]:
        try:
            print(  # noqa: T201
                f"freescale: the process ends with exit status {_EXIT_CODE}, without waiting longer for its threads: "
                f"{', '.join(names)}",
                file=sys.stderr,
            )
        finally:  # also where nobody reads it
            exit_at_once(_EXIT_CODE)


def exit_at_once(status: int) -> None:
    """End the process without ending Python; what was logged and printed is written, where there is a reader."""
    try:
        logging.shutdown()
        flush_output()
    finally:
        os._exit(status)


def flush_output() -> None:
    """Write what was printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _running() -> list[BackgroundThread]:
    return [thread for thread in list(_started) if thread.is_alive()]


leave_first(end_threads)
leave_last(exit_if_any_is_left)
