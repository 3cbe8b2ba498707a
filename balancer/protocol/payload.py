"""Packs samples into one message a destination and unpacks what arrives (paper, Algorithm 1, lines 15-17).

A message holds the samples of one (source, destination) pair. First their heads, one record of fixed size a sample: its
outermost length in each jagged column, and its values in each narrow dense column. Then section by section what varies:
the inner lengths of nested columns, then the values of jagged and of wide dense columns. Heads and sections start at
multiples of 8 bytes. Sizes follow from what stages I and II told, so nothing describes them on the wire. Samples that
stay home are not in any message.

    message   | heads | inner lengths of column a | … | values of column a | values of column b | … | slack |
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
from .schema import Schema

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_ZEROS = torch.zeros(1 << 16, dtype=torch.uint8, device="cpu")  # what padding is copied from


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Section:
    """Bytes of a local batch that a sample has more or less of.

    Attributes:
        address: First byte.
        offsets: First byte of each sample, and the end. Shape [batch_size + 1].
    """

    address: int
    offsets: Int64s

    def ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the bytes of samples. Each of shape [len(samples)]."""
        starts = self.offsets[samples]
        return self.address + starts, self.offsets[samples + 1] - starts


class Sections:
    """Where the bytes of each sample lie in a local batch.

    Attributes:
        batch: The batch.
        heads: One record a sample. Shape [batch_size, head_bytes], uint8.
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        self.batch = batch
        layout = schema.layout
        self.heads: Bytes = np.zeros((batch.batch_size, layout.head_bytes), np.uint8)
        for column, start, size in layout.heads:
            if size and batch.batch_size:
                outer = batch[column.name].levels[0] if column.num_levels else batch[column.name].values
                self.heads[:, start : start + size] = _rows(outer, size)
        samples = np.arange(batch.batch_size + 1, dtype=np.int64)
        self._sections: list[Section] = []
        ends: dict[str, Int64s] = {}  # first value of each sample, and the end
        for column in layout.nested:
            counts, lengths = batch[column.name].levels
            first = _offsets(counts.numpy())
            self._sections.append(Section(lengths.data_ptr(), first * 8))
            ends[column.name] = _offsets(lengths.numpy())[first]
        for column in layout.bodies:
            values, levels = batch[column.name].values, batch[column.name].levels
            if column.num_levels == 1:
                ends[column.name] = _offsets(levels[0].numpy())
            self._sections.append(Section(values.data_ptr(), ends.get(column.name, samples) * column.row_bytes))

    def __iter__(self) -> Iterator[Section]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        total = np.full(self.batch.batch_size, self.heads.shape[1], np.int64)
        for section in self._sections:
            total += np.diff(section.offsets)
        return total


def _rows(values: torch.Tensor, size: int) -> Bytes:
    """A tensor's memory as rows of bytes."""
    rows: Bytes = values.view(-1).view(torch.uint8).view(-1, size).numpy()
    return rows


def message_bytes(schema: Schema, payload_bytes: Int64s, num_samples: Int64s) -> Int64s:
    """Size of messages, from what every rank knows after stage II. Shapes [n], int64.

    A sum over samples does not tell how much padding the sections need, so each message has room for the most.
    """
    padding = schema.layout.padding_bytes
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
    if not len(leaving):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    leaving = leaving[np.argsort(owners[leaving], kind="stable")]
    to = owners[leaving]
    first = np.flatnonzero(np.concatenate([[True], to[1:] != to[:-1]]))
    counts = np.diff(first, append=len(to))
    # A message is copied from one range for its heads, one a sample and one for padding a section, and one for slack.
    ends = np.cumsum(1 + len(sections) * (counts + 1) + 1)
    cursor = np.concatenate([[0], ends[:-1]])
    addresses = np.full(int(ends[-1]), _ZEROS.data_ptr(), np.int64)
    lengths = np.zeros(int(ends[-1]), np.int64)
    heads = sections.heads[leaving]
    addresses[cursor] = heads.ctypes.data + first * heads.shape[1]
    lengths[cursor] = written = counts * heads.shape[1]
    cursor += 1
    place = np.arange(len(to)) - np.repeat(first, counts)  # of a sample in its message
    for section in sections:
        slots = np.repeat(cursor, counts) + place
        addresses[slots], filled = section.ranges(leaving)
        lengths[slots] = filled
        total = np.add.reduceat(filled, first)
        cursor += counts
        lengths[cursor] = padding = -total % 8
        cursor += 1
        written = written + total + padding
    lengths[cursor] = slack = sizes[to[first]] - written
    assert slack.min() >= 0, "a message is larger than the protocol agreed"
    assert slack.max() <= len(_ZEROS), "a message has more slack than there are zeros"
    kept = lengths > 0
    return gather_ranges(addresses[kept], lengths[kept])


class Arrivals:
    """Reads what arrived from all sources at once, with the samples that stayed home in their place."""

    def __init__(self, received: torch.Tensor, sizes: Int64s, rank: int) -> None:
        ends = np.cumsum(sizes)
        self._received = received
        self._cursor = received.data_ptr() + ends - sizes  # next unread byte from each source
        self._end = received.data_ptr() + ends
        self._rank = rank

    def read(self, what: str, counts: Int64s, entry_bytes: int, home: tuple[Int64s, Int64s]) -> torch.Tensor:
        """Take some entries from each source, and the home ranges as the part of this rank.

        Args:
            what: Named in errors.
            counts: Entries from each source; what it says of this rank is not used. Shape [world_size].
            entry_bytes: Size of an entry.
            home: Addresses and sizes of this rank's own.

        Raises:
            ProtocolError: A message ends before.
        """
        counts = counts.copy()
        counts[self._rank] = 0
        too_many = counts > np.maximum(self._end - self._cursor, 0) // max(entry_bytes, 1)
        if entry_bytes and too_many.any():
            source = int(np.flatnonzero(too_many)[0])
            raise ProtocolError(f"stage III: {what} of rank {source} is longer than the message that holds it")
        start, sizes = self._cursor.copy(), counts * entry_bytes
        self._cursor += (sizes + 7) // 8 * 8
        before, after = slice(None, self._rank), slice(self._rank + 1, None)
        addresses = np.concatenate([start[before], home[0], start[after]])
        lengths = np.concatenate([sizes[before], home[1], sizes[after]])
        kept = lengths > 0
        return gather_ranges(addresses[kept], lengths[kept])


def _sums(name: str, lengths: torch.Tensor, counts: Int64s) -> Int64s:
    """Sum of the lengths from each source, of which there are `counts`."""
    values: Int64s = lengths.numpy()
    if values.min(initial=0) < 0 or values.sum(dtype=np.float64) > 2.0**62:
        raise ProtocolError(f"stage III: the lengths of column {name!r} in a message cannot be")
    return np.diff(_offsets(values)[_offsets(counts)])


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

    Raises:
        ProtocolError: The lengths in a message cannot be.
    """
    layout, total = schema.layout, int(num_samples.sum())
    arrivals = Arrivals(received, sizes, rank)
    own = sections.heads[staying]
    home = np.array([own.ctypes.data]), np.array([own.nbytes])
    heads = arrivals.read("the heads", num_samples, layout.head_bytes, home).view(total, layout.head_bytes)
    levels: dict[str, tuple[torch.Tensor, ...]] = {}
    values: dict[str, torch.Tensor] = {}
    counts: dict[str, Int64s] = {}  # entries of each column's next section, from each source
    for column, start, size in layout.heads:
        part = heads[:, start : start + size].contiguous().view(-1)
        if column.num_levels:
            levels[column.name] = (part.view(torch.int64),)
            counts[column.name] = _sums(column.name, levels[column.name][0], num_samples)
        else:
            values[column.name] = part.view(column.torch_dtype).view(total, *column.shape)
    remaining = iter(sections)
    for column in layout.nested:
        home, name = next(remaining).ranges(staying), column.name
        inner = arrivals.read(f"column {name!r}", counts[name], 8, home).view(torch.int64)
        levels[name] = (*levels[name], inner)
        counts[name] = _sums(name, inner, counts[name])
    for column in layout.bodies:
        home, name = next(remaining).ranges(staying), column.name
        entries = counts.get(name, num_samples)
        body = arrivals.read(f"column {name!r}", entries, column.row_bytes, home).view(column.torch_dtype)
        values[name] = body.view(int(entries.sum()), *column.shape)
    columns = {c.name: Column(values[c.name], levels.get(c.name, ())) for c in schema.columns}
    return JaggedBatch.of_checked(columns, total)
