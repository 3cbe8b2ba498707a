"""What all ranks must agree on about the columns of a batch, and how they tell each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..batches.batch import Column, JaggedBatch
from ..errors import ProtocolError

Int64s = NDArray[np.int64]

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

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        """The element type as NumPy knows it; None for those that only torch has."""
        try:
            return np.dtype(self.dtype)
        except TypeError:
            return None

    @cached_property
    def item(self) -> np.dtype[Any]:
        """One value as an item of NumPy's that has no meaning, so that a column of values is one of items."""
        return np.dtype((np.void, self.row_bytes))

    def __str__(self) -> str:
        kind = ("dense", "jagged", "nested jagged")[self.num_levels]
        return f"{kind} {self.dtype}{list(self.shape) or ''}"


@dataclass(frozen=True)
class Section:
    """Bytes of a message that a sample has more or less of.

    Attributes:
        column: Whose they are.
        is_inner: Whether they are its inner lengths; else its values.
        entry_bytes: Size of a length, or of a value.
    """

    column: ColumnSchema
    is_inner: bool
    entry_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """What a message consists of, from the columns alone.

    How many entries samples have is counted in a table with a row of ones (heads, dense columns), one for each jagged
    column (its outer lengths), and one for each nested column (its inner lengths, added up).

    Attributes:
        head_bytes: Size of a head, a multiple of 8.
        jagged: Columns with lengths.
        nested: Columns with inner lengths, each with its number among the jagged ones.
        counted: The column of each row of the table but the first. A head begins with its sample's entries of these.
        num_rows: Rows of the table.
        length_words: Word of the head that has the outer length of each of `jagged`, by name.
        narrow: Dense columns in the head, with their field of `record`; "" for those without a byte.
        record: A head as an item of NumPy's, in which each narrow column is a field without a meaning.
        has_gaps: Whether bytes of a head are of no column.
        sections: What follows the heads: inner lengths first, then values.
        section_names: What errors call each section.
        section_dtypes: What the bytes of each section are.
        part_rows: Row of the table that counts the entries of each part of a message: the heads, each section. Shape
            [1 + len(sections)], int64.
        part_bytes: Size of an entry of each part. Shape [1 + len(sections), 1], int64.
        is_direct: Whether row and part are the same for all: there is neither a nested nor a wide dense column.
        section_rows: `part_rows` of the sections.
        entry_bytes: `part_bytes` of the sections.
        column_rows: Row of the table that counts the values of each column of the schema, int64.
        padding_bytes: The most padding that the sections of a message can need.
    """

    head_bytes: int
    jagged: tuple[ColumnSchema, ...]
    nested: tuple[tuple[ColumnSchema, int], ...]
    counted: tuple[ColumnSchema, ...]
    num_rows: int
    length_words: dict[str, int]
    narrow: tuple[tuple[ColumnSchema, str], ...]
    record: np.dtype[np.void]
    has_gaps: bool
    sections: tuple[Section, ...]
    section_names: tuple[str, ...]
    section_dtypes: tuple[torch.dtype, ...]
    part_rows: Int64s
    part_bytes: Int64s
    is_direct: bool
    section_rows: Int64s
    entry_bytes: Int64s
    column_rows: Int64s
    padding_bytes: int

    @classmethod
    def of(cls, columns: tuple[ColumnSchema, ...]) -> Layout:
        """Lay out the heads, then the sections."""
        jagged = tuple(column for column in columns if column.num_levels)
        nested = tuple((column, j) for j, column in enumerate(jagged) if column.num_levels == 2)
        counted = (*jagged, *(column for column, _ in nested))
        narrow: list[tuple[ColumnSchema, str]] = []
        places: dict[str, int] = {}  # of the fields
        end = 8 * len(counted)
        for column in columns:
            if not column.num_levels and column.row_bytes <= _NARROW_BYTES:
                field = f"narrow {len(narrow)}" if column.row_bytes else ""
                narrow.append((column, field))
                if field:
                    places[field] = end
                end += (column.row_bytes + 7) // 8 * 8
        rows = {column.name: row for row, column in enumerate(counted, 1)}  # of nested columns the inner one
        value_rows = [rows.get(column.name, 0) for column in columns]
        in_head = {column.name for column, _ in narrow}
        bodies = [(c, row) for c, row in zip(columns, value_rows, strict=True) if c.name not in in_head]
        sections = [Section(column, True, 8) for column, _ in nested]
        sections += [Section(column, False, column.row_bytes) for column, _ in bodies]
        part_rows = np.array([0, *(1 + j for _, j in nested), *(row for _, row in bodies)], np.int64)
        part_bytes = np.array([end, *(section.entry_bytes for section in sections)], np.int64).reshape(-1, 1)
        return cls(
            end,
            jagged,
            nested,
            counted,
            len(counted) + 1,
            {column.name: j for j, column in enumerate(jagged)},
            tuple(narrow),
            np.dtype(
                {
                    "names": list(places),
                    "formats": [column.item for column, field in narrow if field],
                    "offsets": list(places.values()),
                    "itemsize": end,
                }
            ),
            any(column.row_bytes % 8 for column, _ in narrow),
            tuple(sections),
            tuple(f"column {section.column.name!r}" for section in sections),
            tuple(torch.int64 if section.is_inner else section.column.torch_dtype for section in sections),
            part_rows,
            part_bytes,
            part_rows.tolist() == list(range(len(counted) + 1)),
            part_rows[1:],
            part_bytes[1:],
            np.array(value_rows, np.int64),
            8 * sum(section.entry_bytes % 8 != 0 for section in sections),
        )


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
    def names(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def layout(self) -> Layout:
        """How the bytes of samples with these columns lie in a message."""
        return Layout.of(self.columns)

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
                raise ProtocolError(f"a peer described an impossible column: {column!r}")
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
