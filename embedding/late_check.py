"""Ids on a GPU are compared with those that were prefetched, without anybody waiting for it (section 3.2).

A forward's ids leave a fingerprint on their way; a later forward looks whether it was that of the batch prefetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import EmbeddingError
from .host_ids import HostIds

_MAX_UNSEEN = 64


class LateCheck:
    """Fingerprints under way from a device.

    Args:
        features: Name of each slot.
        device: Where the tables are.
    """

    def __init__(self, features: Sequence[str], device: torch.device) -> None:
        self._features, self._device = features, device
        self._places = torch.ones(0, dtype=torch.int64, device=device)
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []
        self._under_way: deque[tuple[torch.cuda.Event, Tensor, list[bool], HostIds]] = deque()

    def add(self, given: HostIds, prefetched: HostIds) -> None:
        """Begin to compare a forward's ids, those on the device, with the batch that was prefetched for it."""
        if not any(each.is_cuda for each in given.tensors) or len(self._under_way) >= _MAX_UNSEEN:
            return
        longest = max(given.sizes)
        if longest > len(self._places):
            self._places = torch.arange(1, 2 * longest + 1, device=self._device)
        prints = [
            (ids * self._places[: len(ids)]).sum(0, keepdim=True) if ids.is_cuda else self._places.new_zeros(1)
            for ids in given.tensors
        ]
        host, event = self._free.pop() if self._free else self._make(len(prints))
        host.copy_(prints[0] if len(prints) == 1 else torch.cat(prints), non_blocking=True)
        event.record()
        compared = [ids.is_cuda for ids in given.tensors]
        self._under_way.append((event, host, compared, prefetched))

    def _make(self, count: int) -> tuple[Tensor, torch.cuda.Event]:
        """Where fingerprints arrive, and what tells that they have."""
        return torch.empty(count, dtype=torch.int64, pin_memory=True), torch.cuda.Event()

    def look(self) -> None:
        """Compare what has arrived.

        Raises:
            EmbeddingError: A forward got other ids than were prefetched for it.
        """
        while self._under_way and self._under_way[0][0].query():
            event, host, compared, prefetched = self._under_way.popleft()
            found = host.tolist()
            self._free.append((host, event))
            for slot, feature in enumerate(self._features):
                if compared[slot] and found[slot] != prefetched.fingerprints[slot]:
                    raise EmbeddingError(
                        f"forward must get the batches that were prefetched, in their order: feature '{feature}' had "
                        "other ids in a forward before, whose rows and updates were wrong"
                    )
