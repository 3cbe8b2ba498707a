"""What all ranks must agree on about the columns of a batch, and how they tell each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from ..batches.batch import Column, JaggedBatch
from ..errors import ProtocolError

MAX_SCHEMA_BYTES = 1 << 24
_NARROW_BYTES = 256  # a dense value up to this size goes into the head: a range of its own would cost more


@dataclass(frozen=True)
class ColumnSchema:
    """Name, element type, shape of one value, and number of length levels of a column."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_levels: int

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch knows it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or self.dtype.startswith("q"):  # quantized types are no plain numbers
            raise ProtocolError(f"column {self.name!r} has element type {self.dtype!r}, which this torch does not know")
        return dtype

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one value."""
        size = self.torch_dtype.itemsize
        for n in self.shape:
            size *= n
        return size

    def __str__(self) -> str:
        kind = ("dense", "jagged", "nested jagged")[self.num_levels]
        return f"{kind} {self.dtype}{list(self.shape) or ''}"


@dataclass(frozen=True)
class Layout:
    """What a message consists of, from the columns alone.

    Attributes:
        heads: Columns that have a part in the head, with its first byte and its size.
        head_bytes: Size of a head, a multiple of 8.
        nested: Columns with inner lengths.
        bodies: Columns with values outside the head.
        padding_bytes: The most padding that the sections of a message can need.
    """

    heads: tuple[tuple[ColumnSchema, int, int], ...]
    head_bytes: int
    nested: tuple[ColumnSchema, ...]
    bodies: tuple[ColumnSchema, ...]
    padding_bytes: int


@dataclass(frozen=True)
class Schema:
    """The columns of a batch, in order.

    Attributes:
        columns: What ranks must agree on.
        type_description: How an adapter describes the user's batch type, for ranks that never see a batch. None for
            types that only their own class can describe. Ranks need not agree on it.
    """

    columns: tuple[ColumnSchema, ...]
    type_description: str | None = None

    @classmethod
    def of(cls, batch: JaggedBatch, type_description: str | None = None) -> Schema:
        """Read the schema of a batch."""
        columns = []
        for name in batch.names:
            values = batch[name].values
            dtype = str(values.dtype).removeprefix("torch.")
            columns.append(ColumnSchema(name, dtype, tuple(values.shape[1:]), len(batch[name].levels)))
        return cls(tuple(columns), type_description)

    @cached_property
    def layout(self) -> Layout:
        """How the bytes of samples with these columns lie in a message."""
        heads: list[tuple[ColumnSchema, int, int]] = []
        bodies: list[ColumnSchema] = []
        end = 0
        for column in self.columns:
            narrow = not column.num_levels and column.row_bytes <= _NARROW_BYTES
            if column.num_levels or narrow:
                size = 8 if column.num_levels else column.row_bytes
                heads.append((column, end, size))
                end += (size + 7) // 8 * 8
            if not narrow:
                bodies.append(column)
        nested = tuple(column for column in self.columns if column.num_levels == 2)
        padding = 8 * sum(column.row_bytes % 8 != 0 for column in bodies)
        return Layout(tuple(heads), end, nested, tuple(bodies), padding)

    @cached_property
    def digest(self) -> int:
        """A number that differs when columns differ. Fits int64."""
        text = json.dumps([asdict(column) for column in self.columns])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

    def empty_batch(self) -> JaggedBatch:
        """A batch of no samples with these columns."""
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        columns = {
            c.name: Column(torch.empty(0, *c.shape, dtype=c.torch_dtype, device="cpu"), (none,) * c.num_levels)
            for c in self.columns
        }
        return JaggedBatch(columns, 0)

    def to_bytes(self) -> bytes:
        """Encode for peers: JSON, at most `MAX_SCHEMA_BYTES`.

        Raises:
            ValueError: The batch has too many columns to describe in that space.
        """
        columns = [[c.name, c.dtype, list(c.shape), c.num_levels] for c in self.columns]
        encoded = json.dumps({"columns": columns, "type": self.type_description}).encode()
        if len(encoded) > MAX_SCHEMA_BYTES:
            raise ValueError(f"the description of the columns must fit {MAX_SCHEMA_BYTES} bytes, got {len(encoded)}")
        return encoded

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Schema:
        """Decode what a peer sent.

        Raises:
            ProtocolError: The bytes do not describe columns.
        """
        try:
            fields = json.loads(encoded)
            columns = tuple(
                ColumnSchema(str(name), str(dtype), tuple(int(n) for n in shape), int(levels))
                for name, dtype, shape, levels in fields["columns"]
            )
            description = fields["type"]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"a peer sent a description of its columns that cannot be read: {error}") from error
        for column in columns:
            possible = column.num_levels in (0, 1, 2) and all(0 <= n < 1 << 31 for n in column.shape)
            if not possible or len(column.shape) > 64 or column.row_bytes > 1 << 40:
                raise ProtocolError(f"a peer described an impossible column: {column}")
        if len({column.name for column in columns}) != len(columns):
            raise ProtocolError("a peer described two columns of one name")
        return cls(columns, description if isinstance(description, str) else None)


def describe_difference(rank: int, ours: Schema, peer: int, theirs: Schema) -> str:
    """Name the first column in which two ranks differ, with both sides."""
    mine = {c.name: c for c in ours.columns}
    other = {c.name: c for c in theirs.columns}
    for name in [*mine, *other]:
        if name not in other or name not in mine or mine[name] != other[name]:
            here, there = mine.get(name, "missing"), other.get(name, "missing")
            return f"column {name!r} is {here} on rank {rank} and {there} on rank {peer}"
    return f"columns are ordered {list(mine)} on rank {rank} and {list(other)} on rank {peer}"
