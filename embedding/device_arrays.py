"""Index arrays on their way to the tables' device: one pinned copy for all of a plan (section 3.2).

The thread that makes plans collects arrays and then sends them at once, on a stream of its own. Whoever uses them has
its stream wait for that copy, not the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
        self._arrays: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self.event: torch.cuda.Event | None = None
        self.storage: Tensor | None = None

    def add(self, array: Tensor) -> Tensor:
        """Return the tensor that will hold an array, int64 in host memory. Shape of `array`."""
        if self._device.type == "cpu":
            return array
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
        _pack(self._arrays, packed)
        start = 0
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self.storage = torch.empty(len(packed), dtype=torch.int64, device=self._device)
            for array, tensor, size in zip(self._arrays, self._tensors, sizes, strict=True):
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


def _pack(arrays: Sequence[Tensor], out: Tensor) -> None:
    """Put arrays one after the other, each of odd length with one more number behind it, in one call."""
    pad = torch.zeros(1, dtype=torch.int64)
    pieces = [piece for array in arrays for piece in ((array, pad) if len(array) % 2 else (array,))]
    torch.cat(pieces, out=out)
