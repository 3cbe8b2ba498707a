"""The messages that ranks write into each other's memory, and the tags that announce a write (paper, section 3.3).

tag, 32 bits:  kind (2 bits) | number (30 bits)
  DATA     number of the grant that the chunk answers
  MESSAGE  slot of the ring of messages that was written
  CREDIT   how many messages of that ring the writer has read, modulo 2**30; carries no bytes
  LEFT     the writer has left; carries no bytes (used where the ring has no room for the reason)

message:  header, then
  RECORD   what the sender is about to exchange with the receiver; a piece that is small enough follows
  GRANTS   places in the sender's memory for the next chunks of an exchange
  LEAVING  why the sender has left, in UTF-8
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import TransportError

DATA, MESSAGE, CREDIT, LEFT = range(4)
RECORD, GRANTS, LEAVING = range(1, 4)
MESSAGE_BYTES = 4096
_NUMBER_MASK = 2**30 - 1
_HEADER = struct.Struct("<IIqI4x5q")  # kind, lane, sequence, bytes or grants that follow, a record
_GRANT = struct.Struct("<IIQQ")  # tag, key, address, bytes
PAYLOAD_BYTES = MESSAGE_BYTES - _HEADER.size
GRANTS_PER_MESSAGE = PAYLOAD_BYTES // _GRANT.size
_NO_RECORD = (0, 0, 0, 0, 0)


class Key(NamedTuple):
    """Names an exchange on both sides.

    Attributes:
        lane: 0 for data, 1 for sizes, 2 for what ranks tell each other to make a channel.
        sequence: Counts the exchanges of that lane. 64 bits.
    """

    lane: int
    sequence: int


class Grant(NamedTuple):
    """A place in the receiver's memory for one chunk."""

    tag: int
    remote_key: int
    address: int
    size: int


class Message(NamedTuple):
    """A message as it was read, of a peer that is trusted with nothing: sizes are compared before they are used."""

    kind: int
    key: Key
    record: NDArray[np.int64]
    payload: bytes
    grants: list[Grant]


def make_tag(kind: int, number: int) -> int:
    """Put kind and number together; of the number only the last 30 bits are kept."""
    return kind << 30 | number & _NUMBER_MASK


def split_tag(tag: int) -> tuple[int, int]:
    """Kind and number."""
    return tag >> 30, tag & _NUMBER_MASK


def count_on(known: int, number: int) -> int:
    """The count, not below `known`, whose last 30 bits are `number`."""
    return known + (number - known & _NUMBER_MASK)


def write_record(key: Key, record: NDArray[np.int64], payload: bytes | NDArray[np.uint8]) -> bytes:
    """A message that says what this rank is about to exchange with the receiver."""
    return _HEADER.pack(RECORD, *key, len(payload), *record.tolist()) + bytes(payload)


def write_grants(key: Key, grants: list[Grant]) -> bytes:
    """A message that gives places to the next chunks of an exchange."""
    return _HEADER.pack(GRANTS, *key, len(grants), *_NO_RECORD) + b"".join(_GRANT.pack(*grant) for grant in grants)


def write_leaving(reason: str) -> bytes:
    """A message that says why this rank has left."""
    text = reason.encode()[:PAYLOAD_BYTES]
    return _HEADER.pack(LEAVING, 0, 0, len(text), *_NO_RECORD) + text


def read_message(memory: NDArray[np.uint8], peer: int) -> Message:
    """Read a message out of its slot.

    Raises:
        TransportError: It is none.
    """
    if len(memory) < _HEADER.size:
        raise TransportError(f"rank {peer} sent a message that is none: {len(memory)} bytes")
    kind, lane, sequence, count, *record = _HEADER.unpack(memory[: _HEADER.size].tobytes())
    size = count * (_GRANT.size if kind == GRANTS else 1)
    if kind not in (RECORD, GRANTS, LEAVING) or size > len(memory) - _HEADER.size:
        raise TransportError(f"rank {peer} sent a message that is none: kind {kind}, {count} entries")
    body = memory[_HEADER.size : _HEADER.size + size].tobytes()
    grants = [Grant(*each) for each in _GRANT.iter_unpack(body)] if kind == GRANTS else []
    return Message(kind, Key(lane, sequence), np.array(record, dtype=np.int64), body, grants)
