"""Gloo gives up soon what is under way; until then it keeps a process from ending. Channels are made with patience."""

from __future__ import annotations

from datetime import timedelta

from freescale.transport import Transport
from freescale.transport.lane import HostTransport
from freescale.transport.process_group import GlooWire


def is_over_gloo(lane: Transport) -> bool:
    return isinstance(lane, HostTransport) and isinstance(lane._wire, GlooWire)


def hurry_gloo(lane: Transport, seconds: float) -> None:
    """Have gloo, if this is a channel over it, give up an exchange after so many seconds."""
    if isinstance(lane, HostTransport) and isinstance(lane._wire, GlooWire):
        for group in lane._wire._groups.values():
            group._set_default_timeout(timedelta(seconds=seconds))  # type: ignore[attr-defined]  # a ProcessGroupGloo
