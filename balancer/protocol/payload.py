"""Packs samples into one message a destination and unpacks what arrives (paper, Algorithm 1, lines 15-17).

A message holds the samples of one (source, destination) pair, column by column. A column is a row of sections: its
length levels as int64, then its values. Sections start at multiples of 8 bytes; sizes follow from what stages I and II
told, so nothing describes them on the wire. Samples that stay home are not in any message.

    message   | column 0: lengths, values, padding | column 1: counts, lengths, values, padding | … | slack |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.host_copy import gather_ranges
from ..batches.batch import Column, JaggedBatch
from ..errors import ProtocolError
from .schema import ColumnSchema, Schema

Int64s = NDArray[np.int64]

_ZEROS = torch.zeros(1 << 16, dtype=torch.uint8)  # what padding is copied from


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Section:
    """The bytes of one length level or of the values of one column.

    Attributes:
        data: The memory.
        offsets: First byte of each sample, and the end. Shape [batch_size + 1].
        width: Bytes of a sample where all samples have as many and they are few, else 0. Such samples are gathered
            row by row first: a range for each of them would cost more than its bytes.
    """

    data: torch.Tensor
    offsets: Int64s
    width: int

    def rows(self, samples: Int64s) -> torch.Tensor:
        """The bytes of samples of a section with a width. Shape [len(samples), width], uint8."""
        rows = self.data.view(-1).view(torch.uint8).view(-1, self.width)
        return rows.index_select(0, torch.from_numpy(samples))

    def ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the bytes of samples. Each of shape [len(samples)]."""
        starts = self.offsets[samples]
        return self.data.data_ptr() + starts, self.offsets[samples + 1] - starts


_NARROW_BYTES = 256


class Sections:
    """Where the bytes of each sample lie in a local batch.

    Attributes:
        batch: The batch.
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        self.batch = batch
        self._sections: list[Section] = []
        self._first: dict[str, int] = {}
        for column_schema in schema.columns:
            column = batch[column_schema.name]
            self._first[column_schema.name] = len(self._sections)
            items = np.arange(batch.batch_size + 1, dtype=np.int64)
            for depth, level in enumerate(column.levels):
                self._sections.append(Section(level, items * 8, 0 if depth else 8))
                items = _offsets(level.numpy())[items]
            width = column_schema.row_bytes if not column.levels and column_schema.row_bytes <= _NARROW_BYTES else 0
            self._sections.append(Section(column.values, items * column_schema.row_bytes, width))

    def __iter__(self) -> Iterator[Section]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def of(self, column: ColumnSchema) -> list[Section]:
        """The sections of one column."""
        first = self._first[column.name]
        return self._sections[first : first + column.num_levels + 1]

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        total = sum(
            (section.offsets for section in self._sections), start=np.zeros(self.batch.batch_size + 1, np.int64)
        )
        return np.diff(total)


def _num_padded(schema: Schema) -> int:
    """Sections that may end off a multiple of 8 bytes: values of narrow types."""
    return sum(column.row_bytes % 8 != 0 for column in schema.columns)


def message_bytes(schema: Schema, payload_bytes: Int64s, num_samples: Int64s) -> Int64s:
    """Size of messages, from what every rank knows after stage II. Shapes [n], int64.

    A sum over samples does not tell how much padding the sections need, so each message has room for the most.
    """
    padding = 8 * _num_padded(schema)
    return np.where(num_samples > 0, (payload_bytes + padding + 7) // 8 * 8, 0)


def pack(sections: Sections, owners: Int64s, rank: int, sizes: Int64s) -> torch.Tensor:
    """Write the messages to all ranks, one after the other.

    Args:
        sections: The local batch.
        owners: New owner of each local sample. Shape [batch_size].
        rank: This rank, to which nothing is sent.
        sizes: Bytes of the message to each rank, from `message_bytes`. Shape [world_size].

    Returns:
        Shape [sizes.sum()], uint8.
    """
    leaving = np.flatnonzero(owners != rank)
    leaving = leaving[np.argsort(owners[leaving], kind="stable")]
    destinations, first, counts = np.unique(owners[leaving], return_index=True, return_counts=True)
    if not len(leaving):
        return torch.empty(0, dtype=torch.uint8)
    entries = _Entries(sections, leaving, first, counts)
    slack = sizes[destinations] - entries.finish_sections()
    assert (slack >= 0).all(), "a message is larger than the protocol agreed"
    assert slack.max() <= len(_ZEROS), "a message has more slack than there are zeros"
    entries.addresses[entries.end - 1], entries.sizes[entries.end - 1] = _ZEROS.data_ptr(), slack
    kept = entries.sizes > 0
    return gather_ranges(entries.addresses[kept], entries.sizes[kept])


class _Entries:
    """The ranges that messages are copied from, in the order of the messages.

    A message has, for each section, one range for all its samples (sections with a width) or one a sample, and one for
    padding; at its end one for slack.
    """

    def __init__(self, sections: Sections, leaving: Int64s, first: Int64s, counts: Int64s) -> None:
        self._sections, self._leaving, self._first, self._counts = sections, leaving, first, counts
        wide = sum(section.width == 0 for section in sections)
        lengths = wide * counts + (len(sections) - wide) + len(sections) + 1
        self.end = np.cumsum(lengths)
        self._cursor = self.end - lengths
        self._message = np.repeat(np.arange(len(counts)), counts)
        self._place = np.arange(len(leaving)) - first[self._message]  # of a sample in its message
        self.addresses = np.full(int(self.end[-1]), _ZEROS.data_ptr(), np.int64)
        self.sizes = np.zeros(int(self.end[-1]), np.int64)
        self._alive: list[torch.Tensor] = []

    def finish_sections(self) -> Int64s:
        """Fill in all sections with their padding; bytes of each message so far."""
        written = np.zeros(len(self._counts), np.int64)
        for section in self._sections:
            filled = self._add_rows(section) if section.width else self._add_ranges(section)
            padding = -filled % 8
            self.sizes[self._cursor] = padding
            self._cursor += 1
            written += filled + padding
        return written

    def _add_rows(self, section: Section) -> Int64s:
        rows = section.rows(self._leaving)
        self._alive.append(rows)
        filled = self._counts * section.width
        self.addresses[self._cursor] = rows.data_ptr() + self._first * section.width
        self.sizes[self._cursor] = filled
        self._cursor += 1
        return filled

    def _add_ranges(self, section: Section) -> Int64s:
        addresses, lengths = section.ranges(self._leaving)
        slots = self._cursor[self._message] + self._place
        self.addresses[slots], self.sizes[slots] = addresses, lengths
        self._cursor += self._counts
        return np.add.reduceat(lengths, self._first)


class Arrivals:
    """Walks the sections of what arrived, for all sources at once, with the samples that stayed home in their place."""

    def __init__(self, received: torch.Tensor, sizes: Int64s, num_samples: Int64s, rank: int) -> None:
        ends = np.cumsum(sizes)
        self._received = received
        self._cursor = received.data_ptr() + ends - sizes  # next unread byte from each source
        self._end = received.data_ptr() + ends
        self._num_samples = num_samples
        self._rank = rank

    def read_column(self, column: ColumnSchema, sections: list[Section], staying: Int64s) -> Column:
        """Read the sections of one column, with the samples that stayed home from the local ones."""
        counts = self._num_samples  # entries of the next section from each source
        levels: list[torch.Tensor] = []
        for section in sections[:-1]:
            levels.append(self._read(column.name, counts, 8, section, staying).view(torch.int64))
            counts = self._sums(column.name, levels[-1].numpy(), counts)
        values = self._read(column.name, counts, column.row_bytes, sections[-1], staying)
        return Column(values.view(column.torch_dtype).view(int(counts.sum()), *column.shape), tuple(levels))

    def _read(self, name: str, counts: Int64s, entry_bytes: int, section: Section, staying: Int64s) -> torch.Tensor:
        """Take that many entries from each source, and the home samples as the part of this rank."""
        counts = counts.copy()
        counts[self._rank] = 0
        too_many = counts > np.maximum(self._end - self._cursor, 0) // max(entry_bytes, 1)
        if entry_bytes and too_many.any():
            source = int(np.flatnonzero(too_many)[0])
            raise ProtocolError(f"stage III: column {name!r} of rank {source} is longer than the message that holds it")
        start, sizes = self._cursor.copy(), counts * entry_bytes
        self._cursor += (sizes + 7) // 8 * 8
        if section.width:
            rows = section.rows(staying)
            home = np.array([rows.data_ptr()]), np.array([rows.numel()])
        else:
            home = section.ranges(staying)
        before, after = slice(None, self._rank), slice(self._rank + 1, None)
        addresses = np.concatenate([start[before], home[0], start[after]])
        lengths = np.concatenate([sizes[before], home[1], sizes[after]])
        kept = lengths > 0
        return gather_ranges(addresses[kept], lengths[kept])

    def _sums(self, name: str, lengths: Int64s, counts: Int64s) -> Int64s:
        """Sum of the lengths from each source: entries of its next section."""
        if lengths.min(initial=0) < 0 or lengths.sum(dtype=np.float64) > 2.0**62:
            raise ProtocolError(f"stage III: the lengths of column {name!r} in a message cannot be")
        return np.diff(_offsets(lengths)[_offsets(counts)])


def unpack(
    received: torch.Tensor,
    sizes: Int64s,
    num_samples: Int64s,
    sections: Sections,
    staying: Int64s,
    schema: Schema,
    rank: int,
) -> JaggedBatch:
    """Put what arrived and what stayed home together, in global order.

    Args:
        received: The messages of all ranks, one after the other. Shape [sizes.sum()], uint8.
        sizes: Bytes from each rank; 0 from this one. Shape [world_size].
        num_samples: Samples from each rank; those that stayed home from this one. Shape [world_size].
        sections: The local batch, which the home samples are copied from.
        staying: Positions of the samples that stay home, ascending.
        schema: The columns.
        rank: This rank.

    Returns:
        A batch that owns its memory.
    """
    arrivals = Arrivals(received, sizes, num_samples, rank)
    columns = {column.name: arrivals.read_column(column, sections.of(column), staying) for column in schema.columns}
    return JaggedBatch(columns, int(num_samples.sum()))
