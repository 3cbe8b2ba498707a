"""Index arrays on their way to the tables' device: one pinned copy for all of a plan (section 3.2).

The thread that makes plans collects arrays and then sends them at once, on a stream of its own. Whoever uses them has
its stream wait for that copy, not the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Taker = Callable[[Sequence[Tensor]], None]
_PADDING = np.zeros(1, dtype=np.int64)


class Upload:
    """Collects arrays and sends them together.

    On the CPU nothing is sent: tensors share the arrays' memory at once.

    Args:
        device: Where the tensors are needed.
        stream: Stream of the copy; None on the CPU.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device, self._stream = device, stream
        self._arrays: list[NDArray[np.int64]] = []
        self._takers: list[tuple[int, Taker]] = []
        self.event: torch.cuda.Event | None = None
        self.storage: Tensor | None = None
        self._users: list[int] = []  # streams

    def add(self, arrays: Sequence[NDArray[np.int64]], take: Taker) -> None:
        """Have arrays sent.

        Args:
            arrays: Of one dimension, int64, contiguous.
            take: Gets the tensors, in the arrays' order; on the CPU at once, else in `send`.
        """
        if self._device.type == "cpu":
            take([torch.from_numpy(array) for array in arrays])
            return
        self._arrays += arrays
        self._takers.append((len(arrays), take))

    def send(self) -> None:
        """Copy all arrays to the device without waiting for it."""
        if not self._arrays:
            return
        padded = [part for array in self._arrays for part in (array, _PADDING[: len(array) % 2])]  # to 16 bytes each
        sizes = [len(part) for part in padded]
        packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        np.concatenate(padded, out=packed.numpy())
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self.storage = torch.empty(len(packed), dtype=torch.int64, device=self._device)
            self.storage.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        # One call for all views: each would give another thread the interpreter.
        tensors, start = self.storage.split(sizes)[::2], 0
        for count, take in self._takers:
            take(tensors[start : start + count])
            start += count
        self._arrays, self._takers = [], []

    def use(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream wait for the copy, and keep its memory until that stream is done with it.

        Args:
            stream: None: the current one.
        """
        if self.event is None or self.storage is None:
            return
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream in self._users:
            return  # it has waited; and what it does later is after what it did
        self._users.append(stream.cuda_stream)
        stream.wait_event(self.event)
        self.storage.record_stream(stream)
