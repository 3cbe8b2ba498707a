"""CUDA events, and torch's objects for streams, that serve again: to make them takes longer than what they are for.

(Paper, section 3.3.) An event that is recorded anew changes nothing for streams that were told to wait for it before,
so it may serve the next exchange as soon as everybody has been told.
"""

from __future__ import annotations

import torch

_MOST = 64
_free: dict[int, list[torch.cuda.Event]] = {}
_known: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: int) -> torch.cuda.Stream:
    """The current stream of a device."""
    key = device, torch._C._cuda_getCurrentRawStream(device)
    stream = _known.get(key)
    if stream is None:
        if len(_known) >= _MOST:
            _known.clear()
        stream = _known[key] = torch.cuda.current_stream(device)
    return stream


def free_events(device: int) -> list[torch.cuda.Event]:
    """Events of a device that nobody uses. To give one back, append it, when all who wait for it have been told."""
    free = _free.get(device)
    return _free.setdefault(device, []) if free is None else free


def record(device: int, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that comes when a stream of a device has done what it was given so far."""
    try:
        event = _free[device].pop()
    except (KeyError, IndexError):  # another thread may have been faster
        event = torch.cuda.Event()
    event.record(stream)
    return event
