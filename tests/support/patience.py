"""Ranks wait long for what surely comes, on any machine, and make gloo give up soon what never does."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from freescale.transport import Transport
from freescale.transport.lane import HostTransport
from freescale.transport.process_group import GlooWire

PATIENCE_S = 60.0


def wait_until(comes: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not comes():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s until {what}"
        time.sleep(0.005)


def is_still(pid: int, states: str = "T") -> bool:
    """All threads of a process are stopped; with "TZX", or it has ended."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # the process, or a thread, ends
        return "X" in states and not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] in states for stat in stats)


def is_over_gloo(lane: Transport) -> bool:
    return isinstance(lane, HostTransport) and isinstance(lane._wire, GlooWire)


def hurry_gloo(lane: Transport, seconds: float) -> None:
    """Have gloo, if this is a channel over it, give up an exchange after so many seconds.

    Until then it keeps a process from ending; the deadline that it was made with is for connecting.
    """
    if isinstance(lane, HostTransport) and isinstance(lane._wire, GlooWire):
        for group in lane._wire._groups.values():
            group._set_default_timeout(timedelta(seconds=seconds))  # type: ignore[attr-defined]  # a ProcessGroupGloo
