"""Keeps children and endings of a process from disturbing its peers (paper, section 3.3)."""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from typing import Protocol


class Leaving(Protocol):
    """What has connections to peers."""

    def leave(self, reason: str) -> None:
        """Tell the peers and close."""


class _Open:
    """The channels of this process."""

    def __init__(self) -> None:
        self._channels: weakref.WeakSet[Leaving] = weakref.WeakSet()
        self._pid = 0

    def add(self, channel: Leaving) -> None:
        if not self._pid:
            os.register_at_fork(after_in_child=self._keep_for_ever)
            atexit.register(self._leave)
        self._pid = os.getpid()
        self._channels.add(channel)

    def _keep_for_ever(self) -> None:
        """A child has the same open device, and would destroy its parent's connections with its own objects."""
        for channel in self._channels:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def _leave(self) -> None:
        if os.getpid() == self._pid:
            for channel in list(self._channels):
                channel.leave("its process ended")


_open = _Open()


def guard_against_forks(channel: Leaving) -> None:
    """Make sure that a forked child leaves the channel alone, and that peers hear of it when the process ends."""
    _open.add(channel)
