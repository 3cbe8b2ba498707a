"""Index arrays on their way to the tables' device: one pinned copy for all of a plan (section 3.2).

The thread that makes plans collects arrays and then sends them at once, on a stream of its own. Whoever uses them has
its stream wait for that copy, not the host.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Upload:
    """Collects arrays; `send()` fills the tensors that `add` returned.

    On the CPU the tensors share the arrays' memory at once.

    Args:
        device: Where the tensors are needed.
        stream: Stream of the copy; None on the CPU.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device, self._stream = device, stream
        self._arrays: list[NDArray[np.int64]] = []
        self._tensors: list[Tensor] = []
        self.event: torch.cuda.Event | None = None
        self.storage: Tensor | None = None

    def add(self, array: NDArray[np.int64]) -> Tensor:
        """Return the tensor that will hold an array. Shape of `array`, int64."""
        array = np.ascontiguousarray(array, dtype=np.int64)
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        tensor = torch.empty(0, dtype=torch.int64, device=self._device)
        self._arrays.append(array)
        self._tensors.append(tensor)
        return tensor

    def send(self) -> None:
        """Copy all arrays to the device without waiting for it."""
        if not self._arrays:
            return
        sizes = [-(-len(array) // 2) * 2 for array in self._arrays]  # every array begins at 16 bytes
        packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        view, start = packed.numpy(), 0
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self.storage = torch.empty(len(packed), dtype=torch.int64, device=self._device)
            for array, tensor, size in zip(self._arrays, self._tensors, sizes, strict=True):
                view[start : start + len(array)] = array
                tensor.data = self.storage[start : start + len(array)]
                start += size
            self.storage.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        self._arrays, self._tensors = [], []

    def use(self) -> None:
        """Have the current stream wait for the copy, and keep its memory until that stream is done with it."""
        if self.event is not None and self.storage is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self.event)
            self.storage.record_stream(stream)
