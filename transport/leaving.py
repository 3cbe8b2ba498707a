"""Ends of processes: channels are left while Python is whole, and forked children let them be (paper, section 3.3)."""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol


class Leaving(Protocol):
    """What has connections to peers, or threads of a library's own."""

    def leave(self, reason: str) -> None:
        """Tell the peers and close, within seconds: the process ends."""

    def let_be(self) -> None:
        """In a forked child: make sure that what belongs to the parent is never given back, by `keep_for_ever`."""


class _Process:
    """The channels of this process. The module is imported before anything that uses channels, and so leaves last."""

    def __init__(self) -> None:
        self._channels: weakref.WeakSet[Leaving] = weakref.WeakSet()
        self._at_first: list[Callable[[], None]] = []
        self._at_last: list[Callable[[], None]] = []
        os.register_at_fork(after_in_child=self._begin_as_child)
        atexit.register(self._leave)

    def add(self, channel: Leaving) -> None:
        self._channels.add(channel)

    def add_first(self, leave: Callable[[], None]) -> None:
        self._at_first.append(leave)

    def add_last(self, leave: Callable[[], None]) -> None:
        self._at_last.append(leave)

    def _begin_as_child(self) -> None:
        for channel in self._channels:
            channel.let_be()
        self._channels = weakref.WeakSet()

    def _leave(self) -> None:
        with ExitStack() as steps:  # the last first; one that is interrupted keeps none of the others from being taken
            for leave in self._at_last:
                steps.callback(leave)
            for channel in list(self._channels):
                steps.callback(channel.leave, "its process ended")
            for leave in reversed(self._at_first):
                steps.callback(leave)


_process = _Process()


def leave_in_time(channel: Leaving) -> None:
    """Have a channel left when this process ends, and let be by children that are forked from now on."""
    _process.add(channel)


def leave_first(leave: Callable[[], None]) -> None:
    """Call `leave` when this process ends, before channels are left. Forks call it too."""
    _process.add_first(leave)


def leave_last(leave: Callable[[], None]) -> None:
    """Call `leave` when this process ends, after all channels have been left. It need not return. Forks call it too."""
    _process.add_last(leave)


def keep_for_ever(*things: object) -> None:
    """Never free these, not even when Python ends."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
