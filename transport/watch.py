"""Deadlines of what only GPUs wait for: one thread a process looks, twice a second (paper, section 3.3).

A stream that waits for a peer has no deadline, and the host that could have one has gone on. The thread moves no data
and calls nothing but the `look` of whoever has something outstanding; it sleeps for good when nobody has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from .background import BackgroundThread, python_ends

_EVERY_S = 0.5


class Watch:
    """Calls functions twice a second until they say that nothing is outstanding."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._looks: dict[Callable[[], bool], bool] = {}  # and whether it was added since it was last called
        self._pid = 0
        self._ending = threading.Event()

    def add(self, look: Callable[[], bool]) -> None:
        """Call `look` from now on, until it returns False or the process ends. It must not raise."""
        if python_ends():
            return
        with self._changed:
            if self._pid != os.getpid():  # the first of this process; threads do not survive a fork
                self._pid, self._looks, self._ending = os.getpid(), {}, threading.Event()
                BackgroundThread("freescale deadlines", self._run, self._end, self._end).start()
            is_new = look not in self._looks
            self._looks[look] = True
            if is_new:
                self._changed.notify()

    def _end(self) -> None:
        self._ending.set()
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while not self._ending.is_set():
            with self._changed:
                while not (self._looks or self._ending.is_set()):
                    self._changed.wait()
            self._call_all()
            self._ending.wait(_EVERY_S)

    def _call_all(self) -> None:
        """In a function of its own: while the thread sleeps it keeps nobody alive who has nothing outstanding."""
        with self._changed:
            self._looks = dict.fromkeys(self._looks, False)
            looks = list(self._looks)
        done = [look for look in looks if not look()]
        with self._changed:
            for look in done:
                if not self._looks[look]:
                    del self._looks[look]


watch = Watch()
