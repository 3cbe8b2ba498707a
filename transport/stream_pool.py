"""Torch's pool of streams, made before any stream waits for a peer (paper, section 3.3).

The first `torch.cuda.Stream()` of a process makes 32 streams of each priority, and holds the interpreter's lock
meanwhile. CUDA makes a stream when others have come to a certain point. If one of those waits for a peer, and a thread
of this process is to bring what it waits for, that thread waits for the lock, and nobody ever goes on.
"""

from __future__ import annotations

import torch

_PRIORITIES = 0, -1
_filled: set[int] = set()


def fill_pool(device: int) -> None:
    """Have torch make the streams of a device that it will ever hand out. For whoever is about to let streams wait."""
    if device not in _filled and torch.cuda.is_available():
        for priority in _PRIORITIES:
            torch.cuda.Stream(device, priority=priority)
        _filled.add(device)
