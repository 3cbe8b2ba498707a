"""Packs samples into one message a destination and unpacks what arrives (paper, Algorithm 1, lines 15-17).

A message holds the samples of one (source, destination) pair. First their heads, one record of fixed size a sample: its
outermost length in each jagged column, and its values in each narrow dense column. Then section by section what varies:
the inner lengths of nested columns, then the values of jagged and of wide dense columns. Heads and sections start at
multiples of 8 bytes. Sizes follow from what stages I and II told, so nothing describes them on the wire. Samples that
stay home are not in any message.

    message   | heads | inner lengths of column a | … | values of column a | values of column b | … | slack |

All sections are worked out together, as rows of arrays: calls, not bytes, are what a busy trainer feels of this.
"""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.host_copy import gather_parts, gather_ranges
from ..batches.batch import Column, JaggedBatch
from ..errors import ProtocolError
from .schema import ColumnSchema, Layout, Schema

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_ZEROS = torch.zeros(1 << 16, dtype=torch.uint8, device="cpu")  # what padding is copied from
_ZEROS_AT = _ZEROS.data_ptr()
_MOST_ENTRIES = 2**62
_FINGERPRINT_BYTES = 2048  # of each section


class Sections:
    """Where the bytes of each sample lie in a local batch.

    Attributes:
        batch: The batch.
        heads: One record a sample. Shape [batch_size, head_bytes], uint8.
        items: Values in each column. Shape [num_columns], int64.
        addresses: First byte of each section in memory. Shape [sections, 1], int64.
        offsets: First byte of each sample in each section, and the end. Shape [sections, batch_size + 1], int64.
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        self.batch = batch
        layout, columns, size = schema.layout, batch.columns, batch.batch_size
        ends = np.zeros((layout.num_rows, size + 1), np.int64)  # first entry of each sample, and the end
        outer = ends[: len(layout.jagged)]
        for row, jagged in zip(outer, layout.jagged, strict=True):
            row[1:] = columns[jagged.name].levels[0].numpy()
        words = np.zeros((size, layout.head_bytes // 8), np.int64)
        words[:, layout.jagged_words] = outer[:, 1:].T
        self.heads: Bytes = words.view(np.uint8).reshape(size, layout.head_bytes)
        self._heads_at = int(words.ctypes.data)
        for column, start in layout.narrow:
            if column.row_bytes and size:
                self.heads[:, start : start + column.row_bytes] = _rows(columns[column.name].values, column)
        outer.cumsum(axis=1, out=outer)
        for row, (nested, j) in zip(ends[len(outer) : -1], layout.nested, strict=True):
            row[:] = _offsets(columns[nested.name].levels[1].numpy())[outer[j]]
        ends[-1] = np.arange(size + 1)
        self.items: Int64s = ends[layout.column_rows, -1]
        self.offsets: Int64s = ends[layout.section_rows] * layout.entry_bytes
        at = [
            (columns[s.column.name].levels[1] if s.is_inner else columns[s.column.name].values).data_ptr() or _ZEROS_AT
            for s in layout.sections
        ]
        self.addresses: Int64s = np.array(at, np.int64).reshape(-1, 1)

    def __len__(self) -> int:
        return len(self.addresses)

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        ends = self.offsets.sum(axis=0)
        payload: Int64s = ends[1:] - ends[:-1] + self.heads.shape[1]
        return payload

    def fingerprint(self) -> int:
        """A checksum that tells this batch from most others: all heads, and the first bytes of what varies."""
        checksum = zlib.crc32(self.heads.tobytes())
        sizes = np.minimum(self.offsets[:, -1], _FINGERPRINT_BYTES)
        for address, size in zip(self.addresses[:, 0].tolist(), sizes.tolist(), strict=True):
            checksum = zlib.crc32(ctypes.string_at(address, size), checksum)
        return checksum

    def ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the bytes of samples. Each of shape [sections, len(samples)]."""
        starts = self.offsets[:, samples]
        return starts + self.addresses, self.offsets[:, samples + 1] - starts

    def head_ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the heads of samples. Each of shape [len(samples)]."""
        head_bytes = self.heads.shape[1]
        return samples * head_bytes + self._heads_at, np.full(len(samples), head_bytes)


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets


def _rows(values: torch.Tensor, column: ColumnSchema) -> Bytes:
    """A tensor's memory as rows of bytes."""
    if column.numpy_dtype is None:
        rows: Bytes = values.view(-1).view(torch.uint8).view(-1, column.row_bytes).numpy()
        return rows
    return values.numpy().reshape(-1).view(np.uint8).reshape(-1, column.row_bytes)


def message_bytes(schema: Schema, payload_bytes: Int64s, num_samples: Int64s) -> Int64s:
    """Size of messages, from what every rank knows after stage II. Shapes [n], int64.

    A sum over samples does not tell how much padding the sections need, so each message has room for the most.
    """
    padded = (payload_bytes + (schema.layout.padding_bytes + 7)) // 8 * 8
    return padded * (num_samples > 0)


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
    leaving = (owners != rank).nonzero()[0]
    if not len(leaving):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    to = owners[leaving]
    leaving = leaving[to.argsort(kind="stable")]
    counts = np.bincount(to, minlength=len(sizes))
    peers = counts.nonzero()[0]
    counts = counts[peers]
    first = counts.cumsum() - counts
    # A message is copied from one range for its heads, one a sample and one for padding a section, and one for slack.
    widths = counts + 1
    ends = (widths * len(sections) + 2).cumsum()
    start = ends - widths * len(sections) - 1  # behind the heads
    addresses = np.full(int(ends[-1]), _ZEROS_AT, np.int64)
    lengths = np.zeros(int(ends[-1]), np.int64)
    heads = sections.heads[leaving]
    addresses[start - 1] = first * heads.shape[1] + int(heads.ctypes.data)
    written = counts * heads.shape[1]
    lengths[start - 1] = written
    section = np.arange(len(sections)).reshape(-1, 1)
    slots = section * widths.repeat(counts) + ((start - first).repeat(counts) + np.arange(len(leaving)))
    addresses[slots], filled = sections.ranges(leaving)
    lengths[slots] = filled
    totals = np.add.reduceat(filled, first, axis=1)
    padding = -totals % 8
    lengths[section * widths + (start + counts)] = padding
    slack = sizes[peers] - written - (totals + padding).sum(axis=0)
    lengths[ends - 1] = slack
    assert slack.min() >= 0, "a message is larger than the protocol agreed"
    assert slack.max() <= len(_ZEROS), "a message has more slack than there are zeros"
    return gather_ranges(addresses, lengths)


class Arrivals:
    """Reads what arrived from all sources at once, with the samples that stayed home in their place."""

    def __init__(self, received: torch.Tensor, sizes: Int64s, rank: int) -> None:
        self._room = sizes  # unread bytes from each source
        self._cursor = sizes.cumsum() - sizes + (received.data_ptr() or _ZEROS_AT)
        self._rank = rank

    def read(
        self, names: list[str], counts: Int64s, entry_bytes: Int64s, home: tuple[Int64s, Int64s]
    ) -> tuple[Int64s, Int64s]:
        """Take some sections from each source, with the home ranges as the part of this rank.

        Args:
            names: Of the sections, for errors.
            counts: Entries of each section from each source; what it says of this rank is not used. Shape
                [sections, world_size].
            entry_bytes: Size of an entry of each section. Shape [sections, 1].
            home: Addresses and sizes of this rank's own. Each of shape [sections, n].

        Returns:
            Address and size of the bytes of each section. Each of shape [sections, ranges].

        Raises:
            ProtocolError: A message ends before.
        """
        rank = self._rank
        # Never more than one over the room of any message, so that no sum overflows.
        entries = np.minimum(counts, self._room // np.maximum(entry_bytes, 1) + 1)
        entries[:, rank] = 0
        sizes = entries * entry_bytes
        padded = (sizes + 7) // 8 * 8
        ends = padded.cumsum(axis=0)
        before = ends - padded
        over = before + sizes > self._room
        if over.any():
            section, source = (int(index[0]) for index in over.nonzero())
            raise ProtocolError(
                f"stage III: {names[section]} of rank {source} is longer than the message that holds it"
            )
        before += self._cursor
        self._cursor = self._cursor + ends[-1]
        self._room = self._room - ends[-1]
        return (
            np.concatenate([before[:, :rank], home[0], before[:, rank + 1 :]], axis=1),
            np.concatenate([sizes[:, :rank], home[1], sizes[:, rank + 1 :]], axis=1),
        )


def _checked(lengths: Int64s, columns: list[ColumnSchema]) -> None:
    """Refuse lengths that are negative, or so large that their sums overflow. Shape [columns, n]."""
    if not lengths.size:
        return
    if lengths.min() < 0 or lengths.max() > _MOST_ENTRIES // lengths.shape[1]:
        wrong = (lengths < 0) | (lengths > _MOST_ENTRIES // lengths.shape[1])
        name = columns[int(wrong.any(axis=1).argmax())].name
        raise ProtocolError(f"stage III: the lengths of column {name!r} in a message cannot be")


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
    home_at, home_bytes = sections.head_ranges(staying)
    head_bytes = np.array([[layout.head_bytes]])
    at, lengths = arrivals.read(["the heads"], num_samples[None], head_bytes, (home_at[None], home_bytes[None]))
    words = gather_ranges(at[0], lengths[0], torch.int64).numpy().reshape(total, layout.head_bytes // 8)
    outer = np.ascontiguousarray(words[:, layout.jagged_words].T)
    _checked(outer, list(layout.jagged))
    sums = np.empty((layout.num_rows, len(sizes)), np.int64)  # entries from each source
    last = num_samples.cumsum()
    sums[: len(outer)] = _sums(outer, last)
    sums[-1] = num_samples
    home = sections.ranges(staying)
    levels: dict[str, tuple[torch.Tensor, ...]] = {
        column.name: (torch.from_numpy(row),) for column, row in zip(layout.jagged, outer, strict=True)
    }
    num_inner = len(layout.nested)
    if num_inner:
        _unpack_inner(arrivals, layout, sums, (home[0][:num_inner], home[1][:num_inner]), levels)
    columns = _unpack_heads(words, layout)
    columns |= _unpack_bodies(arrivals, layout, sums, (home[0][num_inner:], home[1][num_inner:]), levels)
    return JaggedBatch.of_checked({column.name: columns[column.name] for column in schema.columns}, total)


def _sums(lengths: Int64s, last: Int64s) -> Int64s:
    """Sums over consecutive groups that end before `last`. Shapes [columns, n], [groups] to [columns, groups]."""
    ends = np.zeros((len(lengths), lengths.shape[1] + 1), np.int64)
    lengths.cumsum(axis=1, out=ends[:, 1:])
    upto = ends[:, last]
    upto[:, 1:] -= upto[:, :-1].copy()
    return upto


def _unpack_inner(
    arrivals: Arrivals,
    layout: Layout,
    sums: Int64s,
    home: tuple[Int64s, Int64s],
    levels: dict[str, tuple[torch.Tensor, ...]],
) -> None:
    """Add the inner lengths to the levels of nested columns, and their sums to the table."""
    num_inner = len(layout.nested)
    names = [f"column {column.name!r}" for column, _ in layout.nested]
    counts = sums[layout.section_rows[:num_inner]]
    at, sizes = arrivals.read(names, counts, layout.entry_bytes[:num_inner], home)
    gathered = gather_parts(at, sizes, [torch.int64] * num_inner)
    for k, ((column, j), lengths) in enumerate(zip(layout.nested, gathered, strict=True)):
        inner = lengths.numpy()[None]
        _checked(inner, [column])
        sums[len(layout.jagged) + k] = _sums(inner, sums[j].cumsum())
        levels[column.name] = (*levels[column.name], lengths)


def _unpack_heads(words: Int64s, layout: Layout) -> dict[str, Column]:
    """The narrow dense columns."""
    heads = words.view(np.uint8).reshape(len(words), layout.head_bytes)
    columns: dict[str, Column] = {}
    for column, start in layout.narrow:
        part = np.ascontiguousarray(heads[:, start : start + column.row_bytes]).reshape(-1)
        columns[column.name] = Column(_as_values(torch.from_numpy(part), column, len(words)))
    return columns


def _as_values(flat: torch.Tensor, column: ColumnSchema, count: int) -> torch.Tensor:
    """Give a flat buffer, of bytes or of the column's elements, the column's dtype and shape."""
    if flat.dtype != column.torch_dtype:
        flat = flat.view(column.torch_dtype)
    return flat.view(count, *column.shape) if column.shape else flat


def _unpack_bodies(
    arrivals: Arrivals,
    layout: Layout,
    sums: Int64s,
    home: tuple[Int64s, Int64s],
    levels: dict[str, tuple[torch.Tensor, ...]],
) -> dict[str, Column]:
    """The columns that have a section for their values."""
    num_inner = len(layout.nested)
    bodies = layout.sections[num_inner:]
    if not bodies:
        return {}
    counts = sums[layout.section_rows[num_inner:]]
    names = [f"column {section.column.name!r}" for section in bodies]
    at, sizes = arrivals.read(names, counts, layout.entry_bytes[num_inner:], home)
    flats = gather_parts(at, sizes, [section.column.torch_dtype for section in bodies])
    return {
        section.column.name: Column(_as_values(flat, section.column, count), levels.get(section.column.name, ()))
        for section, flat, count in zip(bodies, flats, counts.sum(axis=1).tolist(), strict=True)
    }
