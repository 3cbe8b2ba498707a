"""A training loop around prioritized embeddings: looks ahead, copies on its own stream, never waits (section 3.2)."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from .embedding_batch import Batch, Feed

_AHEAD = 4  # batches whose ids are on their way while one is trained on: the id plane works on several at once


class PrioritizedLoop:
    """Trains a model whose tables prefetch. Ids stay in host memory, where the tables read them.

    Args:
        model: Takes a batch, gives its loss twice.
        tables: The prefetching collection in it.
        optimizer: Of the dense part.
        feed: Where batches come from, in pinned memory.
        device: Where to train.
    """

    def __init__(
        self, model: nn.Module, tables: Any, optimizer: torch.optim.Optimizer, feed: Feed, device: torch.device
    ) -> None:
        self.model, self.tables = model, tables
        self._optimizer, self._feed, self._device = optimizer, feed, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: deque[tuple[Batch, torch.cuda.Event | None]] = deque()

    def step(self) -> Tensor:
        """See `Trainer.step`."""
        while len(self._ahead) <= _AHEAD:
            batch = next(self._feed)
            self.tables.prefetch(batch.ids)
            self._ahead.append(self._copy(batch))
        batch, copied = self._ahead.popleft()
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            batch.starts.record_stream(stream)
            batch.labels.record_stream(stream)
        self._optimizer.zero_grad()
        loss, detached = self.model(batch)
        loss.backward()
        self._optimizer.step()
        assert isinstance(detached, Tensor)
        return detached

    def close(self) -> None:
        """See `Trainer.close`."""
        self.tables.close()

    def _copy(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Copy a batch to the device beside the model; returns it with the event after which it is there."""
        if self._copies is None:
            return batch, None
        with torch.cuda.stream(self._copies):
            starts = batch.starts.to(self._device, non_blocking=True)
            labels = batch.labels.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Batch(batch.ids, starts, labels, batch.longest), event
