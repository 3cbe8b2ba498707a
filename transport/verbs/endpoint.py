"""What a rank tells a peer, over another transport, so that it can connect (paper, section 3.3)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import TransportError
from .binding import BINDINGS, Address
from .messages import MESSAGE_BYTES

ADDRESS_BYTES = 64
_VERSION = 1
_PACKED = struct.Struct("<IIIIII16sQII")


@dataclass(frozen=True)
class Endpoint:
    """One end of a connection.

    Attributes:
        binding: Name of the library.
        address: Of the queue pair.
        ring_address: Where the peer writes its messages.
        ring_key: For that.
        chunk_bytes: Largest chunk that this rank can handle.
    """

    binding: str
    address: Address
    ring_address: int
    ring_key: int
    chunk_bytes: int


def pack_endpoint(end: Endpoint) -> NDArray[np.uint8]:
    """Write it into ADDRESS_BYTES bytes."""
    address, binding = end.address, BINDINGS.index(end.binding)
    packed = _PACKED.pack(
        _VERSION,
        binding,
        address.number,
        address.first_packet,
        address.lid,
        address.mtu,
        address.gid,
        end.ring_address,
        end.ring_key,
        end.chunk_bytes,
    )
    return np.frombuffer(packed.ljust(ADDRESS_BYTES, b"\0"), dtype=np.uint8)


def unpack_endpoint(packed: NDArray[np.uint8], peer: int) -> Endpoint:
    """Read what a peer told.

    Raises:
        TransportError: It cannot be, or comes from another version.
    """
    version, binding, number, packet, lid, mtu, gid, ring, key, chunk_bytes = _PACKED.unpack(
        packed[: _PACKED.size].tobytes()
    )
    if version != _VERSION or binding >= len(BINDINGS):
        raise TransportError(f"verbs: rank {peer} runs another version of freescale: endpoint version {version}")
    if chunk_bytes < MESSAGE_BYTES:
        raise TransportError(f"verbs: rank {peer} wants chunks of {chunk_bytes} bytes")
    address = Address(number, packet, lid, mtu, gid)
    address.check()
    return Endpoint(BINDINGS[binding], address, ring, key, chunk_bytes)
