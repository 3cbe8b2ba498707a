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
_ONE = np.ones(1, np.int64).tobytes()
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
        at: Address of the bytes of each sample: its head, then what it has in each section. Shape [1 + sections,
            batch_size], int64.
        sizes: As many bytes it has there. Shape [1 + sections, batch_size], int64.
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        self.batch, self.layout = batch, schema.layout
        layout, columns, size = schema.layout, batch.columns, batch.batch_size
        entries = [_ONE * size, *[bytes_of(columns[c.name].levels[0]) for c in layout.jagged]]
        for column, j in layout.nested:
            starts = _offsets(np.frombuffer(entries[1 + j], np.int64))
            ends = _offsets(numbers_of(columns[column.name].levels[1]))[starts]
            entries.append((ends[1:] - ends[:-1]).tobytes())
        self._counts: Int64s = np.frombuffer(b"".join(entries), np.int64).reshape(layout.num_rows, size)
        self.heads: Int64s = np.empty((size, layout.head_bytes // 8), np.int64)
        if layout.has_gaps:
            self.heads.fill(0)
        self.heads[:, : len(layout.counted)] = self._counts[1:].T
        for column, field in layout.narrow:
            if field:
                records = self.heads.view(layout.record)
                records[field][:, 0] = np.frombuffer(bytes_of(columns[column.name].values), column.item)
        begins = [_begin(s.column.name, columns[s.column.name], s.is_inner) for s in layout.sections]
        self._begins = np.array([address_of(self.heads), *begins], np.int64)
        counts = self._counts if layout.is_direct else take_rows(self._counts, layout.part_rows)
        self.sizes: Int64s = counts * layout.part_bytes
        self.at: Int64s = _accumulate(self.sizes, axis=1)
        self.at += self._begins.reshape(-1, 1) - self.sizes

    @property
    def items(self) -> Int64s:
        """Values in each column. Shape [num_columns]."""
        items: Int64s = _sum(self._counts, axis=1)[self.layout.column_rows]
        return items

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        payload: Int64s = _sum(self.sizes)
        return payload

    def fingerprint(self) -> int:
        """A checksum that tells this batch from most others: all heads, and the first bytes of what varies."""
        checksum = zlib.crc32(self.heads.data)
        sizes = np.minimum(_sum(self.sizes, axis=1), _FINGERPRINT_BYTES // max(len(self.sizes) - 1, 1))
        first = map(bytes_at, self._begins[1:].tolist(), sizes[1:].tolist())
        return zlib.crc32(b"".join(first), checksum)


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
    padded = (payload_bytes + (schema.layout.padding_bytes + 7)) & -8
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
    at, filled, counts = sections.at, sections.sizes, num_samples
    if sections.layout.padding_bytes:
        peers = num_samples.nonzero()[0]
        peers = peers[peers != rank]
        counts = num_samples.copy()
        counts[peers] += 1
        owners, at, filled = _with_padding(owners, at, filled, peers)
    # A message has a range a part and sample: its parts one after the other, and samples within them as they are here.
    keys = np.empty(at.shape, np.min_scalar_type(len(num_samples)))  # small ones are sorted by counting
    keys[:] = owners
    order = keys.reshape(-1).argsort(kind="stable")
    if staying:
        home = len(at) * int(_sum(counts[:rank]))
        order = np.concatenate([order[:home], order[home + len(at) * staying :]])
    lengths = filled.reshape(-1)[order]
    if sections.layout.padding_bytes:
        _pad(lengths, counts[peers], len(at), sizes[peers])
    return gather_ranges(at.reshape(-1)[order], lengths)


def _with_padding(owners: Int64s, at: Int64s, sizes: Int64s, peers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Add a last sample for each peer, which is copied from zeros and has no bytes as yet."""
    zeros, none = np.empty((2, len(at), len(peers)), np.int64)
    zeros.fill(_ZEROS_AT)
    none.fill(0)
    return (
        np.concatenate([owners, peers]),
        np.concatenate([at, zeros], axis=1),
        np.concatenate([sizes, none], axis=1),
    )


def _pad(lengths: Int64s, counts: Int64s, num_parts: int, sizes: Int64s) -> None:
    """Have each part of a message end at a multiple of 8 bytes, and its last one where the message ends.

    Args:
        lengths: Bytes of each range, where the last one of each part is of zeros and is set here.
        counts: Ranges of a part of each message. Shape [messages].
        num_parts: Parts of each message.
        sizes: Bytes of each message. Shape [messages].
    """
    widths = counts.repeat(num_parts)
    ends = _accumulate(widths)
    # Of one dimension, this would let go of the interpreter lock.
    totals = np.add.reduceat(lengths.reshape(1, -1), ends - widths, axis=1).reshape(-1, num_parts)
    padding = -totals % 8
    padding[:, -1] += sizes - _sum(totals + padding, axis=1)
    # Negative numbers are huge ones without a sign.
    most = _most(padding.view(np.uint64), axis=None)
    assert most <= _NUM_ZEROS, f"messages have {padding} bytes left, beyond 0 to {_NUM_ZEROS}"
    lengths[ends - 1] = padding.reshape(-1)


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
    entries[0] = num_samples
    entries[1:] = _sums(counted, _accumulate(num_samples))
    counts = entries[1:] if layout.is_direct else take_rows(entries, layout.section_rows)
    # NumPy's empty arrays may have a stride of 0, with which a tensor has no view of its bytes.
    rows = map(torch.from_numpy, counted) if len(heads) else [torch.empty(0, dtype=torch.int64) for _ in counted]
    levels: Levels = {c.name: (row,) for c, row in zip(layout.jagged, rows, strict=False)}
    columns = _dense_columns(heads, layout) if layout.narrow else {}
    if layout.sections:
        starts += address_of(received)
        read = 8 * heads.shape[1] * num_samples
        home = take_columns(sections.at, staying)[1:], take_columns(sections.sizes, staying)[1:]
        at, num_bytes = _find(counts, starts + read, sizes - read, home, layout, rank)
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
    padded = (sizes + 7) & -8
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
