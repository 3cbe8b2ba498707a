"""Packs samples into one message a destination and unpacks what arrives (paper, Algorithm 1, lines 15-17).

A message holds the samples of one (source, destination) pair, column by column. A column is a row of sections: its
length levels as int64, then its values. Sections start at multiples of 8 bytes; sizes follow from what stages I and II
told, so nothing describes them on the wire. Samples that stay home are not in any message.

    message   | column 0: lengths, values, padding | column 1: counts, lengths, values, padding | … | slack |
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.host_copy import gather_ranges
from .batch import Column, JaggedBatch
from .errors import ProtocolError
from .schema import ColumnSchema, Schema

Int64s = NDArray[np.int64]

_ZEROS = torch.zeros(1 << 16, dtype=torch.uint8)  # what padding is copied from


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class Sections:
    """Where the bytes of each sample lie in a local batch.

    Attributes:
        addresses: Host address of each section's first byte. Shape [num_sections].
        offsets: First byte of each sample within each section, and the end. Shape [num_sections, batch_size + 1].
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        addresses: list[int] = []
        offsets: list[Int64s] = []
        self._alive = batch
        for column_schema in schema.columns:
            column = batch[column_schema.name]
            items = np.arange(batch.batch_size + 1, dtype=np.int64)
            for level in column.levels:
                addresses.append(level.data_ptr())
                offsets.append(items * 8)
                items = _offsets(level.numpy())[items]
            addresses.append(column.values.data_ptr())
            offsets.append(items * column_schema.row_bytes)
        self.addresses = np.array(addresses, np.int64)
        self.offsets = np.array(offsets, np.int64).reshape(len(addresses), batch.batch_size + 1)

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        return np.diff(self.offsets, axis=1).sum(axis=0)

    def ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the bytes of samples. Each of shape [num_sections, len(samples)]."""
        starts = self.offsets[:, samples]
        return self.addresses[:, None] + starts, self.offsets[:, samples + 1] - starts


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
    to = owners[leaving]
    addresses, lengths = sections.ranges(leaving)
    num_sections = len(addresses)
    # bytes of each (section, destination), to see what padding brings it to a multiple of 8
    filled = np.zeros((num_sections, len(sizes)), np.int64)
    for section in range(num_sections):
        filled[section] = np.bincount(to, weights=lengths[section], minlength=len(sizes)).astype(np.int64)
    padding = -filled % 8
    slack = sizes - (filled + padding).sum(axis=0)
    assert (slack >= 0).all(), "a message is larger than the protocol agreed"
    assert slack.max(initial=0) <= len(_ZEROS), "a message has more slack than there are zeros"
    # order everything by destination, then section; within a section samples come first, its padding after them
    destinations = np.arange(len(sizes))
    keys = [np.arange(num_sections)[:, None] + to * (num_sections + 1)]
    keys.append(np.arange(num_sections)[:, None] + destinations * (num_sections + 1))
    keys.append((num_sections + destinations * (num_sections + 1))[None])
    zeros = np.full(padding.size + len(sizes), _ZEROS.data_ptr(), np.int64)
    all_addresses = np.concatenate([addresses.ravel(), zeros])
    all_sizes = np.concatenate([lengths.ravel(), padding.ravel(), slack])
    order = np.argsort(np.concatenate([key.ravel() for key in keys]), kind="stable")
    order = order[all_sizes[order] > 0]
    return gather_ranges(all_addresses[order], all_sizes[order])


class Arrivals:
    """Walks the sections of what arrived, for all sources at once, with the samples that stayed home in their place."""

    def __init__(self, received: torch.Tensor, sizes: Int64s, num_samples: Int64s, rank: int) -> None:
        ends = np.cumsum(sizes)
        self._received = received
        self._cursor = received.data_ptr() + ends - sizes  # next unread byte from each source
        self._end = received.data_ptr() + ends
        self._num_samples = num_samples
        self._rank = rank

    def read_column(self, column: ColumnSchema, home: list[tuple[Int64s, Int64s]]) -> Column:
        """Read the sections of one column; `home` has the home samples' ranges of each of them."""
        counts = self._num_samples  # entries of the next section from each source
        levels: list[torch.Tensor] = []
        for ranges in home[:-1]:
            levels.append(self._read(column.name, counts, 8, ranges).view(torch.int64))
            counts = self._sums(column.name, levels[-1].numpy(), counts)
        values = self._read(column.name, counts, column.row_bytes, home[-1])
        return Column(values.view(column.torch_dtype).view(int(counts.sum()), *column.shape), tuple(levels))

    def _read(self, name: str, counts: Int64s, entry_bytes: int, home: tuple[Int64s, Int64s]) -> torch.Tensor:
        """Take that many entries from each source, and the home ranges as the part of this rank."""
        counts = counts.copy()
        counts[self._rank] = 0
        too_many = counts > np.maximum(self._end - self._cursor, 0) // max(entry_bytes, 1)
        if entry_bytes and too_many.any():
            source = int(np.flatnonzero(too_many)[0])
            raise ProtocolError(f"stage III: column {name!r} of rank {source} is longer than the message that holds it")
        start, sizes = self._cursor.copy(), counts * entry_bytes
        self._cursor += (sizes + 7) // 8 * 8
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
    addresses, lengths = sections.ranges(staying)
    columns: dict[str, Column] = {}
    section = 0
    for column in schema.columns:
        home = [(addresses[s], lengths[s]) for s in range(section, section + column.num_levels + 1)]
        columns[column.name] = arrivals.read_column(column, home)
        section += column.num_levels + 1
    return JaggedBatch(columns, int(num_samples.sum()))
