"""The one fixed-size message of stage I: header, error text, lengths (paper, Algorithm 1, lines 6-10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ProtocolError
from .quiet import count_to
from .schema import MAX_SCHEMA_BYTES

Int64s = NDArray[np.int64]

MAGIC = 0x46726565_0000_0003  # "Free", then the protocol version
TEXT_BYTES = 512
_TEXT_WORDS = TEXT_BYTES // 8
_FIELDS = (
    "magic",
    "step",
    "epoch",
    "options_digest",
    "schema_digest",
    "reads_candidates",
    "state",
    "batch_size",
    "capacity",
    "schema_bytes",
    "seconds_step",
    "seconds_bits",
    "text_bytes",
)
_HEADER = Struct("=11qdq")  # of these, seconds_bits being those of a float64
_ALIKE = slice(1, 6)  # fields in which ranks rarely differ: some must not, others need a closer look then
_HEADER_WORDS = len(_FIELDS)
_WORD_OF = {name: word for word, name in enumerate(_FIELDS)}
_STATE, _BATCH_SIZE, _READS = _WORD_OF["state"], _WORD_OF["batch_size"], _WORD_OF["reads_candidates"]
_SECONDS_STEP = _WORD_OF["seconds_step"]
UIH, CANDIDATES, PAYLOAD = range(3)  # words of a sample: UIH length, number of candidates, payload bytes
_BASE_WORDS = 3  # gathered columns follow
MAX_BATCH_SIZE = 1 << 20  # of a rank: what one says decides how much memory all take for a message
_LARGEST = 1 << 48  # of a length, and of the bytes of a sample
_least, _most = np.minimum.reduce, np.maximum.reduce  # without the methods' Python wrappers


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
        reads_candidates: Whether the partitioner wants the lengths of candidates, which stage II gathers.
        seconds_step: Step measured last, -1 for none.
        seconds: Compute seconds of that step.
        text: Why the rank fails. Cut to 512 bytes.
        items: Values in each column, if there are any. Shape [num_columns], int64.
        samples: UIH length, candidates, payload bytes, gathered columns; needed for the samples that there are. Shape
            [batch_size, 3 + num_gathered].
    """

    step: int
    epoch: int
    state: State
    capacity: int = 0
    batch_size: int = 0
    schema_digest: int = 0
    schema_bytes: int = 0
    options_digest: int = 0
    reads_candidates: bool = False
    seconds_step: int = -1
    seconds: float = float("nan")
    text: str = ""
    items: Int64s | None = None
    samples: Int64s | None = None


def cut_text(text: str) -> bytes:
    """Encode a text for the message, cut between characters."""
    return text.encode("utf-8", "replace")[:TEXT_BYTES].decode("utf-8", "ignore").encode()


def message_words(num_columns: int, capacity: int, num_gathered: int) -> int:
    """Length of the message, in int64 words."""
    return _HEADER_WORDS + _TEXT_WORDS + num_columns + capacity * (_BASE_WORDS + num_gathered)


def encode(local: LocalStep, num_columns: int, num_gathered: int) -> Tensor:
    """Write the message into new memory. Shape [message_words(...)], int64."""
    message = np.empty(message_words(num_columns, local.capacity, num_gathered), np.int64)
    write(message, local, num_columns)
    return torch.from_numpy(message)


def write(message: Int64s, local: LocalStep, num_columns: int) -> None:
    """Write the message. Samples beyond the capacity are left out; the header tells that they are missing.

    Args:
        message: Overwritten. Shape [message_words(...)].
        local: What to say.
        num_columns: Columns of the schema that ranks have agreed on.
    """
    message.fill(0)
    text = cut_text(local.text) if local.text else b""
    _HEADER.pack_into(
        message.data,
        0,
        MAGIC,
        local.step,
        local.epoch,
        local.options_digest,
        local.schema_digest,
        local.reads_candidates,
        local.state,
        local.batch_size,
        local.capacity,
        local.schema_bytes,
        local.seconds_step,
        local.seconds,
        len(text),
    )
    body = message[_HEADER_WORDS:]
    if text:
        body[:_TEXT_WORDS].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    if local.items is not None:
        body[_TEXT_WORDS : _TEXT_WORDS + num_columns] = local.items
    if 0 < local.batch_size <= local.capacity and local.samples is not None:
        start = _TEXT_WORDS + num_columns
        body[start : start + local.samples.size] = local.samples.reshape(-1)


_LIMITS: Sequence[tuple[str, int, int]] = (
    ("magic", MAGIC, MAGIC),
    ("state", 0, max(State)),
    ("reads_candidates", 0, 1),
    ("batch_size", 0, MAX_BATCH_SIZE),
    ("text_bytes", 0, TEXT_BYTES),
    ("schema_bytes", 0, MAX_SCHEMA_BYTES),
)
_WORD_LIMITS = [(_WORD_OF[name], low, high) for name, low, high in _LIMITS]


class WorldStep:
    """Stage I as every rank reads it: the messages of all ranks.

    Attributes:
        items: Values in each column. Shape [world_size, num_columns].
        all_have_batches: No rank brings anything else.
        are_alike: All ranks are at one step of one epoch with the same options, columns and kind of partitioner.
        largest_batch: Samples of the rank with the most.
        somebody_reads_candidates: Some rank's partitioner wants the lengths of candidates.
        somebody_measured: Some rank has measured a step.
        origin: Rank that loaded each sample. Shape [N].

    The fields of the headers are attributes too, each of shape [world_size].

    Raises:
        ProtocolError: A message breaks the protocol; names the rank, the field and the value.
    """

    def __init__(self, gathered: Tensor | Int64s, world_size: int, num_columns: int, num_gathered: int) -> None:
        words = gathered.numpy() if isinstance(gathered, Tensor) else gathered
        self._words = words = words.reshape(world_size, -1)
        self.world_size = world_size
        # Those that each step reads; the others when they are asked for.
        self.state, self.batch_size = words[:, _STATE], words[:, _BATCH_SIZE]
        header = words[:, :_HEADER_WORDS]
        least, most = _least(header).tolist(), _most(header).tolist()
        for word, low, high in _WORD_LIMITS:
            if least[word] < low or most[word] > high:
                self._refuse()
        body = words[:, _HEADER_WORDS + _TEXT_WORDS :]
        self.items = body[:, :num_columns]
        self._samples = body[:, num_columns:].reshape(world_size, -1, _BASE_WORDS + num_gathered)
        self.all_have_batches = most[_STATE] == State.HAS_BATCH
        self.are_alike: bool = least[_ALIKE] == most[_ALIKE]
        self._smallest_batch, self.largest_batch = least[_BATCH_SIZE], most[_BATCH_SIZE]
        self.somebody_reads_candidates, self.somebody_measured = most[_READS] > 0, most[_SECONDS_STEP] >= 0
        self.origin = count_to(world_size).repeat(self.batch_size)
        self._told: Int64s | None = None

    def __getattr__(self, name: str) -> Int64s:
        if name not in _WORD_OF:
            raise AttributeError(f"a message has no field {name!r}")
        field: Int64s = self._words[:, _WORD_OF[name]]
        return field

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Compute seconds of the step that each rank measured last. Shape [world_size]."""
        seconds: NDArray[np.float64] = self.seconds_bits.copy().view(np.float64)
        return seconds

    def _refuse(self) -> None:
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

    @property
    def samples(self) -> Int64s:
        """The samples of all ranks, by origin rank, then position. Shape [N, 3 + num_gathered].

        Raises:
            ProtocolError: A length is negative or too large.
        """
        if self._told is not None:
            return self._told
        width = self._samples.shape[1]
        samples = self._samples.reshape(self.world_size * width, self._samples.shape[2])
        if self._smallest_batch < width:
            present = count_to(width) < self.batch_size[:, None]
            samples = samples[present.reshape(-1)]
        told = samples[:, :_BASE_WORDS]
        if len(samples) and _most(told.view(np.uint64), axis=None) > _LARGEST:  # without a sign, negative is large
            row = int(np.flatnonzero(((told < 0) | (told > _LARGEST)).any(1))[0])
            rank = int(np.searchsorted(np.cumsum(self.batch_size), row, side="right"))
            raise ProtocolError(f"stage I: rank {rank} sent lengths that cannot be: {told[row].tolist()}")
        self._told = samples
        return samples
