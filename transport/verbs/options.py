"""How to use the RDMA device: what `connect("verbs", rdma=...)` takes (paper, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from .binding import BINDINGS
from .messages import MESSAGE_BYTES
from .trace import ChunkEvent

_LARGEST_CHUNK = 2**30


@dataclass(frozen=True)
class RdmaOptions:
    """How to use the RDMA device. All ranks name the same binding; the rest is each host's own.

    Attributes:
        binding: The library: "ibverbs" (pip install ibverbs) or "pyverbs" (apt install python3-pyverbs).
        device: Name of the device, as `rdma link` lists it; None where there is only one.
        port: Of the device, from 1.
        gid_index: Which of the port's addresses to use; None for the first RoCEv2 one of IPv4 (0 on InfiniBand).
        chunk_bytes: Largest chunk. At least 4096; cut to what the port can send, and to the least of all ranks.
        ack_timeout: How long the card waits for a peer's card: 4.096 µs times 2 to this, tried 7 times. 1 to 31. With
            18, a dead host is noticed after some 8 s; with 14, after 0.5 s, which a busy network may exceed.
        trace: A list that what happens to each chunk is appended to; see `draw_trace`.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> RdmaOptions(binding="pyverbs", device="mlx5_0").port
        1
    """

    binding: str = "ibverbs"
    device: str | None = None
    port: int = 1
    gid_index: int | None = None
    chunk_bytes: int = 2**20
    ack_timeout: int = 18
    trace: list[ChunkEvent] | None = None

    def __post_init__(self) -> None:
        if self.binding not in BINDINGS:
            raise ValueError(f"binding must be one of {', '.join(BINDINGS)}, got {self.binding!r}")
        if not MESSAGE_BYTES <= self.chunk_bytes <= _LARGEST_CHUNK:
            raise ValueError(f"chunk_bytes must be {MESSAGE_BYTES} to {_LARGEST_CHUNK}, got {self.chunk_bytes}")
        if not 1 <= self.ack_timeout <= 31:
            raise ValueError(f"ack_timeout must be 1 to 31, got {self.ack_timeout}")
        if self.port < 1:
            raise ValueError(f"port must be at least 1, got {self.port}")
