"""Streams that do nothing: what a copy engine enqueues is noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from freescale.transport.cuda_streams import HANDLE_BYTES
from freescale.transport.exchange import Exchange


class NotedStreams:
    """See `Streams`. All memory is one allocation, of this process.

    Attributes:
        copies: Target, source and bytes of each copy.
        streams: Which stream each of them is in.
        num_flags: How many flags were to be written or waited for.
    """

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.streams: list[int] = []
        self.num_flags = 0

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def use(self) -> None: ...

    def rest(self) -> None: ...

    def adopt(self, exchange: Exchange, sends: bool = True) -> None: ...

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        self.copies.append((target, source, size))
        self.streams.append(stream)

    def wait(self, stream: int, address: int, count: int) -> None:
        self.num_flags += 1

    def write(self, stream: int, address: int, count: int) -> None:
        self.num_flags += 1

    def joined(self, flags: Sequence[tuple[int, int]] = (), sends: bool = True) -> Callable[[], object]:
        return lambda: None

    def identify(self, address: int) -> tuple[object, int]:
        return "all", 0

    def export(self, base: int) -> bytes:
        return bytes(HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        return 0

    def register(self, address: int, size: int) -> int:
        return address

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)
