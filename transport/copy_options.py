"""How CUDA tensors travel between the GPUs of a host (paper, sections 3.3 and 5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Inside = Literal["peer", "segment", "staged"]
_SMALLEST_WINDOW_BYTES = 1 << 16


@dataclass(frozen=True)
class CopyOptions:
    """Choices for CUDA tensors between ranks of one host.

    Attributes:
        inside: How ranks of one host exchange: "peer" copies pieces of 1 MiB and more from one GPU's tensor to the
            other's, over NVLink where there is one, and smaller ones as "segment" does; "segment" copies through host
            memory that both GPUs registered; "staged" uses the backend that hosts use between each other.
        window_bytes: Most memory that a rank gives to what is on its way to it: shared host memory (/dev/shm) for
            "peer" and "segment", pinned host memory for "staged". The first CUDA tensor divides it among all channels
            that may move CUDA tensors at once (three, unless CUDA_DEVICE_MAX_CONNECTIONS is set), or among as many as
            get slots of 1 MiB; for any more channels there is as much again.

    Raises:
        ValueError: An unknown way, or too small a window.

    Example:
        >>> CopyOptions(window_bytes=1 << 26).inside
        'peer'
    """

    inside: Inside = "peer"
    window_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.inside not in get_args(Inside):
            raise ValueError(f"inside must be one of {', '.join(get_args(Inside))}, got {self.inside!r}")
        if not isinstance(self.window_bytes, int) or self.window_bytes < _SMALLEST_WINDOW_BYTES:
            raise ValueError(f"window_bytes must be at least {_SMALLEST_WINDOW_BYTES}, got {self.window_bytes!r}")
