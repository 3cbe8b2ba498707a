"""Packs samples into one message a destination and unpacks what arrives (paper, Algorithm 1, lines 15-17).

A message holds the samples of one (source, destination) pair. First their heads, one record of fixed size a sample: its
lengths in each jagged column (of nested ones the outer length and the sum of the inner ones), and its values in each
narrow dense column. Then section by section what varies: the inner lengths of nested columns, then the values of jagged
and of wide dense columns. Heads and sections start at multiples of 8 bytes. Sizes follow from what stage I told and
from the heads, so nothing describes them on the wire. Samples that stay home are not in any message.

    message   | heads | inner lengths of column a | … | values of column a | values of column b | … | slack |

All sections are worked out together, as rows of arrays: calls, not bytes, are what a busy trainer feels of this.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.host_copy import gather_parts, gather_ranges
from ..batches.batch import Column, JaggedBatch
from ..errors import ProtocolError
from .quiet import address_of, bytes_at, bytes_of, count_to, numbers_of, take_columns, take_rows
from .schema import ColumnSchema, Layout, Schema

Int64s = NDArray[np.int64]
Levels = dict[str, tuple[torch.Tensor, ...]]

# What padding is copied from. NumPy's, since the first zeros of torch would take 5 ms of everybody's import.
_ZEROS = torch.from_numpy(np.zeros(1 << 16, np.uint8))
_ZEROS_AT, _NUM_ZEROS = _ZEROS.data_ptr(), _ZEROS.shape[0]
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_MOST_ENTRIES = 2**62
_FINGERPRINT_BYTES = 4096  # of all sections: for a checksum of more than 5,120 the interpreter lock is let go
# Without the methods' Python wrappers.
_sum, _most, _any, _accumulate = np.add.reduce, np.maximum.reduce, np.logical_or.reduce, np.add.accumulate


class Sections:
    """Where the bytes of each sample lie in a local batch.

    Attributes:
        batch: The batch.
        layout: How they lie in a message.
        heads: One record a sample. Shape [batch_size, head_bytes / 8], int64.
        items: Values in each column. Shape [num_columns], int64.
        sizes: Bytes of each sample in each section. Shape [sections, batch_size], int64.
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        self.batch, self.layout = batch, schema.layout
        layout, columns, size = schema.layout, batch.columns, batch.batch_size
        counts = np.empty((layout.num_rows, size), np.int64)  # entries of each sample
        lengths = b"".join([bytes_of(columns[c.name].levels[0]) for c in layout.jagged])
        counts[: len(layout.jagged)] = np.frombuffer(lengths, np.int64).reshape(len(layout.jagged), size)
        for row, (column, j) in zip(counts[len(layout.jagged) : -1], layout.nested, strict=True):
            ends = _offsets(numbers_of(columns[column.name].levels[1]))[_offsets(counts[j])]
            np.subtract(ends[1:], ends[:-1], out=row)
        counts[-1] = 1
        self.heads: Int64s = np.empty((size, layout.head_bytes // 8), np.int64)
        if layout.has_gaps:
            self.heads.fill(0)
        self.heads[:, : len(layout.counted)] = counts[:-1].T
        for column, field in layout.narrow:
            if field:
                records = self.heads.view(layout.record)
                records[field][:, 0] = np.frombuffer(bytes_of(columns[column.name].values), column.item)
        self.items: Int64s = _sum(counts, axis=1)[layout.column_rows]
        self._at = [_begin(s.column.name, columns[s.column.name], s.is_inner) for s in layout.sections]
        self.sizes: Int64s = take_rows(counts, layout.section_rows) * layout.entry_bytes
        self._starts = _accumulate(self.sizes, axis=1)
        self._starts += np.array(self._at, np.int64).reshape(-1, 1) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        payload: Int64s = _sum(self.sizes) + 8 * self.heads.shape[1]
        return payload

    def fingerprint(self) -> int:
        """A checksum that tells this batch from most others: all heads, and the first bytes of what varies."""
        checksum = zlib.crc32(self.heads.data)
        sizes = np.minimum(_sum(self.sizes, axis=1), _FINGERPRINT_BYTES // max(len(self), 1))
        return zlib.crc32(b"".join(map(bytes_at, self._at, sizes.tolist())), checksum)

    def ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the bytes of samples. Each of shape [sections, len(samples)]."""
        return take_columns(self._starts, samples), take_columns(self.sizes, samples)


def _begin(name: str, column: Column, is_inner: bool) -> int:
    """Where the values of a column begin, or its inner lengths."""
    tensor = column.levels[1] if is_inner else column.values
    at = tensor.data_ptr()
    if not at and tensor.numel():
        raise ValueError(
            f"column {name!r} is of type {type(tensor).__name__}, which wraps other tensors and has no memory of its "
            "own: give the tensor that it wraps"
        )
    return at or _ZEROS_AT


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.empty(len(lengths) + 1, np.int64)
    offsets[0] = 0
    _accumulate(lengths, out=offsets[1:])
    return offsets


def message_bytes(schema: Schema, payload_bytes: Int64s, num_samples: Int64s) -> Int64s:
    """Size of messages, from what every rank knows after stage II. Shapes [n], int64.

    A sum over samples does not tell how much padding the sections need, so each message has room for the most.
    """
    padded = (payload_bytes + (schema.layout.padding_bytes + 7)) // 8 * 8
    return padded * (num_samples > 0)


def pack(sections: Sections, owners: Int64s, rank: int, num_samples: Int64s, sizes: Int64s) -> torch.Tensor:
    """Write the messages to all ranks, one after the other.

    Args:
        sections: The local batch.
        owners: New owner of each local sample. Shape [batch_size].
        rank: This rank, to which nothing is sent.
        num_samples: Samples for each rank, those that stay home among them. Shape [world_size].
        sizes: Bytes of the message to each rank, from `message_bytes`. Shape [world_size].

    Returns:
        Shape [sizes.sum()], uint8.
    """
    staying = int(num_samples[rank])
    if staying == len(owners):
        return _NOTHING
    leaving = owners.argsort(kind="stable")
    if staying:
        home = int(_sum(num_samples[:rank]))
        leaving = np.concatenate([leaving[:home], leaving[home + staying :]])
    peers = num_samples.nonzero()[0]
    peers = peers[peers != rank]
    counts = num_samples[peers]
    first = _accumulate(counts) - counts  # of the samples as they are ordered now, those of each peer
    # A message is copied from one range for its heads and one a sample and section. Where sections are padded, one more
    # for each of them and one for what is left of the message.
    padded = 1 if sections.layout.padding_bytes else 0
    widths = counts + padded
    ends = _accumulate(widths * len(sections) + 1 + padded)
    start = ends - widths * len(sections) - padded  # behind the heads
    addresses, lengths = ranges = np.empty((2, int(ends[-1])), np.int64)
    heads = take_rows(sections.heads, leaving)
    head_bytes = 8 * heads.shape[1]
    addresses[start - 1] = first * head_bytes + address_of(heads)
    lengths[start - 1] = written = counts * head_bytes
    section = count_to(len(sections)).reshape(-1, 1)
    slots = section * widths.repeat(counts) + ((start - first).repeat(counts) + count_to(len(leaving)))
    at, filled = sections.ranges(leaving)
    addresses[slots], lengths[slots] = at, filled
    if padded:
        totals = np.add.reduceat(filled, first, axis=1)
        padding = -totals % 8
        _fill_with_zeros(ranges, section * widths + (start + counts), padding)
        _fill_with_zeros(ranges, ends - 1, sizes[peers] - written - _sum(totals + padding))
    return gather_ranges(addresses, lengths)


def _fill_with_zeros(ranges: Int64s, slots: Int64s, sizes: Int64s) -> None:
    """Have some of the ranges copied from zeros."""
    # Negative numbers are huge ones without a sign.
    most = _most(sizes.view(np.uint64), axis=None)
    assert most <= _NUM_ZEROS, f"a message has {sizes} bytes left, beyond 0 to {_NUM_ZEROS}"
    addresses, lengths = ranges
    addresses[slots], lengths[slots] = _ZEROS_AT, sizes


def unpack(
    received: NDArray[np.uint8],
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
    layout, starts = schema.layout, _accumulate(sizes) - sizes
    heads = _join_heads(received, sizes, starts, num_samples, take_rows(sections.heads, staying), rank)
    counted = heads[:, : len(layout.counted)].T.copy()
    _check(counted, layout.counted)
    entries = np.empty((layout.num_rows, len(sizes)), np.int64)  # of each row of the table, from each source
    entries[:-1] = _sums(counted, _accumulate(num_samples))
    entries[-1] = num_samples
    counts = take_rows(entries, layout.section_rows)
    # NumPy's empty arrays may have a stride of 0, with which a tensor has no view of its bytes.
    rows = map(torch.from_numpy, counted) if len(heads) else [torch.empty(0, dtype=torch.int64) for _ in counted]
    levels: Levels = {c.name: (row,) for c, row in zip(layout.jagged, rows, strict=False)}
    columns = _dense_columns(heads, layout) if layout.narrow else {}
    if layout.sections:
        starts += address_of(received)
        read = 8 * heads.shape[1] * num_samples
        at, num_bytes = _find(counts, starts + read, sizes - read, sections.ranges(staying), layout, rank)
        flats = gather_parts(at, num_bytes, layout.section_dtypes)
        _add_inner(levels, flats, counted, layout)
        for section, flat, count in zip(layout.sections, flats, counts, strict=True):
            column = section.column
            if not section.is_inner:
                values = flat.view(int(_sum(count)), *column.shape) if column.shape else flat
                columns[column.name] = Column(values, levels[column.name]) if column.num_levels else Column(values)
    return JaggedBatch.of_checked({name: columns[name] for name in schema.names}, len(heads))


def _join_heads(
    received: NDArray[np.uint8], sizes: Int64s, starts: Int64s, num_samples: Int64s, home: Int64s, rank: int
) -> Int64s:
    """The heads of all samples of this rank, `home` being those of the ones that stayed. Shape [total, words]."""
    width = home.shape[1]
    arrived = num_samples.copy()
    arrived[rank] = 0
    before = _accumulate(arrived) - arrived
    total = int(before[-1] + arrived[-1])
    if not total:
        return home
    if _any(short := (8 * width * arrived > sizes)):
        raise ProtocolError(f"stage III: the heads of rank {int(short.argmax())} are longer than their message")
    first = starts // 8 - before * width  # word where the head of sample 0 would be
    words = first.repeat(arrived) + count_to(total) * width
    heads = received.view(np.int64)[words.reshape(-1, 1) + count_to(width)]
    return np.concatenate([heads[: before[rank]], home, heads[before[rank] :]])


def _check(lengths: Int64s, columns: Sequence[ColumnSchema]) -> None:
    """Refuse lengths that are negative, or so large that their sums overflow. Shape [columns, n]."""
    if not lengths.size:
        return
    unsigned, most = lengths.view(np.uint64), _MOST_ENTRIES // lengths.shape[1]  # negative ones are huge without sign
    if _most(unsigned, axis=None) > most:
        name = columns[int((unsigned > most).any(axis=1).argmax())].name
        raise ProtocolError(f"stage III: the lengths of column {name!r} in a message cannot be")


def _sums(lengths: Int64s, last: Int64s) -> Int64s:
    """Sums over consecutive groups that end before `last`. Shapes [columns, n], [groups] to [columns, groups]."""
    ends = np.empty((len(lengths), lengths.shape[1] + 1), np.int64)
    ends[:, 0] = 0
    _accumulate(lengths, axis=1, out=ends[:, 1:])
    upto = take_columns(ends, last)
    upto[:, 1:] -= upto[:, :-1].copy()
    return upto


def _find(
    counts: Int64s, starts: Int64s, room: Int64s, home: tuple[Int64s, Int64s], layout: Layout, rank: int
) -> tuple[Int64s, Int64s]:
    """Find the sections in the messages of all sources, with the samples that stayed home in their place.

    Args:
        counts: Entries of each section from each source; what it says of this rank is not used. Shape
            [sections, world_size].
        starts: Address of the first section from each source. Shape [world_size].
        room: Bytes from there to the end of the message. Shape [world_size].
        home: Addresses and sizes of this rank's own samples. Each of shape [sections, n].
        layout: The sections.
        rank: This rank.

    Returns:
        Address and size of the bytes of each section. Each of shape [sections, ranges].

    Raises:
        ProtocolError: A message ends before.
    """
    # Never more than one over the room of any message, so that no sum overflows.
    entries = np.minimum(counts, room // np.maximum(layout.entry_bytes, 1) + 1)
    entries[:, rank] = 0
    sizes = entries * layout.entry_bytes
    padded = (sizes + 7) // 8 * 8
    before = _accumulate(padded) - padded
    over = before + sizes > room
    over[:, rank] = False
    if _any(over, axis=None):
        section, source = (int(index[0]) for index in over.nonzero())
        name = layout.section_names[section]
        raise ProtocolError(f"stage III: {name} of rank {source} is longer than the message that holds it")
    before += starts
    return (
        np.concatenate([before[:, :rank], home[0], before[:, rank + 1 :]], axis=1),
        np.concatenate([sizes[:, :rank], home[1], sizes[:, rank + 1 :]], axis=1),
    )


def _add_inner(levels: Levels, flats: list[torch.Tensor], counted: Int64s, layout: Layout) -> None:
    """Add the inner lengths to the levels of nested columns, if they add up to what the heads say of each sample."""
    for (column, j), lengths, total in zip(layout.nested, flats, counted[len(layout.jagged) :], strict=False):
        inner = numbers_of(lengths)
        _check(inner.reshape(1, -1), [column])
        if _any(_offsets(inner)[_accumulate(counted[j])] != _accumulate(total)):
            raise ProtocolError(f"stage III: the lengths of column {column.name!r} in a message do not add up")
        levels[column.name] = (*levels[column.name], lengths)


def _dense_columns(heads: Int64s, layout: Layout) -> dict[str, Column]:
    """The narrow dense columns."""
    columns: dict[str, Column] = {}
    records = heads.view(layout.record) if layout.record.names and len(heads) else None
    for column, field in layout.narrow:
        if records is None or not field:  # NumPy's empty arrays are of no use, see `unpack`
            columns[column.name] = Column(
                torch.empty(len(heads), *column.shape, dtype=column.torch_dtype, device="cpu")
            )
            continue
        flat = torch.from_numpy(records[field].copy().reshape(-1).view(column.numpy_dtype or np.uint8))
        values = flat if column.numpy_dtype is not None else flat.view(column.torch_dtype)
        columns[column.name] = Column(values.view(len(heads), *column.shape) if column.shape else values)
    return columns
