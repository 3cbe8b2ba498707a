"""The one fixed-size message of stage I: header, error text, lengths (paper, Algorithm 1, lines 6-10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ProtocolError
from .schema import MAX_SCHEMA_BYTES

Int64s = NDArray[np.int64]

MAGIC = 0x46726565_0000_0001  # "Free", then the protocol version
TEXT_BYTES = 512
_TEXT_WORDS = TEXT_BYTES // 8
_FIELDS = (
    "magic",
    "step",
    "epoch",
    "state",
    "batch_size",
    "capacity",
    "schema_digest",
    "schema_bytes",
    "options_digest",
    "seconds_step",
    "seconds_bits",
    "text_bytes",
)
_HEADER_WORDS = len(_FIELDS)
UIH, CANDIDATES, PAYLOAD = range(3)  # words of a sample: UIH length, number of candidates, payload bytes
_BASE_WORDS = 3  # gathered columns follow
MAX_BATCH_SIZE = 1 << 20  # of a rank: what one says decides how much memory all take for a message
_LARGEST = 1 << 48  # of a length, and of the bytes of a sample


class State(IntEnum):
    """What a rank brings to a step."""

    HAS_BATCH = 0
    EXHAUSTED = 1
    CLOSING = 2
    FAILED = 3


@dataclass
class LocalStep:
    """What one rank says in stage I.

    Attributes:
        step: Number of the global batch.
        epoch: Number of the epoch.
        state: What this rank brings.
        capacity: Samples that the message has room for. Agreed beforehand.
        batch_size: Samples in the local batch.
        schema_digest: Of this rank's columns; 0 without a batch.
        schema_bytes: Length of the encoded schema; 0 without a batch.
        options_digest: Of the options that must agree.
        seconds_step: Step measured last, -1 for none.
        seconds: Compute seconds of that step.
        text: Why the rank fails. Cut to 512 bytes.
        items: Values in each column. Shape [num_columns], int64.
        samples: UIH length, candidates, payload bytes, gathered columns. Shape [batch_size, 3 + num_gathered].
    """

    step: int
    epoch: int
    state: State
    capacity: int = 0
    batch_size: int = 0
    schema_digest: int = 0
    schema_bytes: int = 0
    options_digest: int = 0
    seconds_step: int = -1
    seconds: float = float("nan")
    text: str = ""
    items: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    samples: Int64s = field(default_factory=lambda: np.zeros((0, _BASE_WORDS), np.int64))


def cut_text(text: str) -> bytes:
    """Encode a text for the message, cut between characters."""
    return text.encode("utf-8", "replace")[:TEXT_BYTES].decode("utf-8", "ignore").encode()


def message_words(num_columns: int, capacity: int, num_gathered: int) -> int:
    """Length of the message, in int64 words."""
    return _HEADER_WORDS + _TEXT_WORDS + num_columns + capacity * (_BASE_WORDS + num_gathered)


def encode(local: LocalStep, num_columns: int, num_gathered: int) -> Tensor:
    """Write the message. Samples beyond the capacity are left out; the header tells that they are missing.

    Returns:
        Shape [message_words(...)], int64.
    """
    message = np.zeros(message_words(num_columns, local.capacity, num_gathered), np.int64)
    text = cut_text(local.text) if local.text else b""
    message[:_HEADER_WORDS] = (
        MAGIC,
        local.step,
        local.epoch,
        local.state,
        local.batch_size,
        local.capacity,
        local.schema_digest,
        local.schema_bytes,
        local.options_digest,
        local.seconds_step,
        np.float64(local.seconds).view(np.int64),
        len(text),
    )
    body = message[_HEADER_WORDS:]
    if text:
        body[:_TEXT_WORDS].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    if len(local.items):
        body[_TEXT_WORDS : _TEXT_WORDS + num_columns] = local.items
    if 0 < local.batch_size <= local.capacity:
        samples = body[_TEXT_WORDS + num_columns :].reshape(local.capacity, _BASE_WORDS + num_gathered)
        samples[: local.batch_size] = local.samples
    return torch.from_numpy(message)


_LIMITS: Sequence[tuple[str, int, int]] = (
    ("magic", MAGIC, MAGIC),
    ("state", 0, max(State)),
    ("batch_size", 0, MAX_BATCH_SIZE),
    ("text_bytes", 0, TEXT_BYTES),
    ("schema_bytes", 0, MAX_SCHEMA_BYTES),
)
_LOWEST, _HIGHEST = np.full(_HEADER_WORDS, -(2**63)), np.full(_HEADER_WORDS, 2**63 - 1)
for _name, _low, _high in _LIMITS:
    _LOWEST[_FIELDS.index(_name)], _HIGHEST[_FIELDS.index(_name)] = _low, _high
_AGREED = [_FIELDS.index(_name) for _name in ("step", "epoch", "options_digest")]


class WorldStep:
    """Stage I as every rank reads it: the messages of all ranks.

    Raises:
        ProtocolError: A message breaks the protocol; names the rank, the field and the value.
    """

    def __init__(self, gathered: Tensor, world_size: int, num_columns: int, num_gathered: int) -> None:
        self._words = words = gathered.numpy().reshape(world_size, -1)
        self.world_size = world_size
        self._check()
        body = words[:, _HEADER_WORDS + _TEXT_WORDS :]
        self.items = body[:, :num_columns]
        self._samples = body[:, num_columns:].reshape(world_size, -1, _BASE_WORDS + num_gathered)
        self.all_have_batches = not self.state.any()

    magic: Int64s
    step: Int64s
    epoch: Int64s
    state: Int64s
    batch_size: Int64s
    capacity: Int64s
    schema_digest: Int64s
    schema_bytes: Int64s
    options_digest: Int64s
    seconds_step: Int64s
    seconds_bits: Int64s
    text_bytes: Int64s

    def __getattr__(self, name: str) -> Int64s:
        """A field of the header, of all ranks. Shape [world_size]."""
        if name not in _FIELDS:
            raise AttributeError(name)
        values: Int64s = self._words[:, _FIELDS.index(name)]
        setattr(self, name, values)
        return values

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Compute seconds of the step that each rank measured last. Shape [world_size]."""
        return self.seconds_bits.copy().view(np.float64)

    def _check(self) -> None:
        header = self._words[:, :_HEADER_WORDS]
        if not ((header < _LOWEST) | (header > _HIGHEST)).any():
            return
        for name, low, high in _LIMITS:
            values: Int64s = getattr(self, name)
            wrong = np.flatnonzero((values < low) | (values > high))
            if len(wrong):
                rank = int(wrong[0])
                hint = "; do all ranks run the same version?" if name == "magic" else ""
                raise ProtocolError(
                    f"stage I: {name} of rank {rank} must be in [{low}, {high}], got {values[rank]}{hint}"
                )

    def text(self, rank: int) -> str:
        """What a rank says of its failure."""
        text = self._words[rank, _HEADER_WORDS : _HEADER_WORDS + _TEXT_WORDS].tobytes()
        return text[: self.text_bytes[rank]].decode("utf-8", "replace")

    def first(self, state: State) -> int | None:
        """Lowest rank in a state, if any is."""
        ranks = np.flatnonzero(self.state == state)
        return int(ranks[0]) if len(ranks) else None

    def first_difference(self, name: str, among: NDArray[np.bool_] | None = None) -> tuple[int, int] | None:
        """First two ranks that differ in a field, if any do: the lowest rank, and the first that differs from it."""
        values: Int64s = getattr(self, name)
        ranks = np.arange(self.world_size) if among is None else np.flatnonzero(among)
        differing = ranks[values[ranks] != values[ranks[0]]] if len(ranks) else ranks
        return (int(ranks[0]), int(differing[0])) if len(differing) else None

    def agrees(self) -> bool:
        """Whether all ranks are at one step of one epoch with the same options."""
        agreed = self._words[:, _AGREED]
        return bool((agreed == agreed[0]).all())

    @cached_property
    def origin(self) -> Int64s:
        """Rank that loaded each sample. Shape [N]."""
        return np.arange(self.world_size).repeat(self.batch_size)

    @cached_property
    def ends(self) -> Int64s:
        """Where the samples of each rank end among those of all. Shape [world_size]."""
        return self.batch_size.cumsum()

    @cached_property
    def samples(self) -> Int64s:
        """The samples of all ranks, by origin rank, then position. Shape [N, 3 + num_gathered].

        Raises:
            ProtocolError: A length is negative or too large.
        """
        width = self._samples.shape[1]
        present = np.arange(width) < self.batch_size[:, None]
        full = self._samples.reshape(self.world_size * width, self._samples.shape[2])
        samples = full if present.all() else full[present.reshape(-1)]
        told = samples[:, :_BASE_WORDS]
        if len(samples) and (told.min() < 0 or told.max() > _LARGEST):
            row = int(np.flatnonzero(((told < 0) | (told > _LARGEST)).any(1))[0])
            rank = int(np.searchsorted(np.cumsum(self.batch_size), row, side="right"))
            raise ProtocolError(f"stage I: rank {rank} sent lengths that cannot be: {told[row].tolist()}")
        return samples
