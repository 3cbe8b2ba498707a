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

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.host_copy import gather_parts, gather_ranges
from ..batches.batch import Column, JaggedBatch
from ..errors import ProtocolError
from .quiet import count_to, take_columns, take_rows, zeros
from .schema import ColumnSchema, Layout, Schema

Int64s = NDArray[np.int64]
Levels = dict[str, tuple[torch.Tensor, ...]]

# What padding is copied from. NumPy's, since the first zeros of torch would take 5 ms of everybody's import.
_ZEROS = torch.from_numpy(np.zeros(1 << 16, np.uint8))
_ZEROS_AT, _NUM_ZEROS = _ZEROS.data_ptr(), _ZEROS.shape[0]
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_FIRST = np.zeros(1, np.int64)
_MOST_ENTRIES = 2**62
_FINGERPRINT_BYTES = 2048  # of each section
# As `ctypes.string_at`, without its Python wrapper.
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
# Without the methods' Python wrappers.
_sum, _most, _any, _accumulate = np.add.reduce, np.maximum.reduce, np.logical_or.reduce, np.add.accumulate


class Sections:
    """Where the bytes of each sample lie in a local batch.

    Attributes:
        batch: The batch.
        heads: One record a sample. Shape [batch_size, head_bytes / 8], int64.
        items: Values in each column. Shape [num_columns], int64.
        sizes: Bytes of each sample in each section. Shape [sections, batch_size], int64.
        scraps: What is of no use any more; see `Outcome`.
    """

    def __init__(self, batch: JaggedBatch, schema: Schema) -> None:
        self.batch = batch
        layout, columns, size = schema.layout, batch.columns, batch.batch_size
        counts = np.empty((layout.num_rows, size), np.int64)  # entries of each sample
        lengths = [columns[column.name].levels[0].numpy() for column in layout.jagged]
        inner = [columns[column.name].levels[1].numpy() for column, _ in layout.nested]
        self.scraps: list[object] = [lengths, inner]
        for row, each in zip(counts, lengths, strict=False):
            row[:] = each
        for row, (_, j), each in zip(counts[len(lengths) : -1], layout.nested, inner, strict=True):
            ends = _offsets(each)[_offsets(counts[j])]
            np.subtract(ends[1:], ends[:-1], out=row)
        counts[-1] = 1
        self.heads: Int64s = zeros(size, layout.head_bytes // 8)
        self.heads[:, : len(layout.counted)] = counts[:-1].T
        for column, start in layout.narrow:
            if column.row_bytes and size:
                flat = _flat(columns[column.name].values, column)
                _items(self.heads, column, start)[:] = flat.view(column.item)
                self.scraps.append(flat)
        self.items: Int64s = _sum(counts, axis=1)[layout.column_rows]
        at = [
            (columns[s.column.name].levels[1] if s.is_inner else columns[s.column.name].values).data_ptr() or _ZEROS_AT
            for s in layout.sections
        ]
        self.sizes: Int64s = take_rows(counts, layout.section_rows) * layout.entry_bytes
        self._starts = _accumulate(self.sizes, axis=1)
        self._starts += np.array(at, np.int64).reshape(-1, 1) - self.sizes
        self._at = at

    def __len__(self) -> int:
        return len(self.sizes)

    def payload_bytes(self) -> Int64s:
        """Bytes that move when a sample moves. Shape [batch_size]."""
        payload: Int64s = _sum(self.sizes) + 8 * self.heads.shape[1]
        return payload

    def fingerprint(self) -> int:
        """A checksum that tells this batch from most others: all heads, and the first bytes of what varies."""
        checksum = zlib.crc32(self.heads.data)
        sizes = np.minimum(_sum(self.sizes, axis=1), _FINGERPRINT_BYTES)
        for address, size in zip(self._at, sizes.tolist(), strict=True):
            checksum = zlib.crc32(_bytes_at(address, size), checksum)
        return checksum

    def ranges(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Address and size of the bytes of samples. Each of shape [sections, len(samples)]."""
        return take_columns(self._starts, samples), take_columns(self.sizes, samples)


def _offsets(lengths: Int64s) -> Int64s:
    offsets = zeros(len(lengths) + 1)
    _accumulate(lengths, out=offsets[1:])
    return offsets


def _flat(values: torch.Tensor, column: ColumnSchema) -> NDArray[Any]:
    """A tensor's memory as an array of one dimension."""
    flat: NDArray[Any] = values.numpy() if column.numpy_dtype is not None else values.view(-1).view(torch.uint8).numpy()
    return flat if flat.ndim == 1 else flat.reshape(-1)


def _items(heads: Int64s, column: ColumnSchema, start: int) -> NDArray[np.void]:
    """Where the values of a narrow column are in heads. Shape [len(heads)]."""
    return np.ndarray(len(heads), column.item, heads, start, (8 * heads.shape[1],))


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
        return _NOTHING
    to = owners[leaving]
    order = to.argsort(kind="stable")
    leaving, to = leaving[order], to[order]
    # Of each peer's samples, where in this order the first one is.
    first = np.concatenate([_FIRST, (to[1:] != to[:-1]).nonzero()[0] + 1])
    peers = to[first]
    counts = np.concatenate([first[1:], [len(to)]]) - first
    # A message is copied from one range for its heads, one a sample and one for padding a section, and one for slack.
    widths = counts + 1
    ends = _accumulate(widths * len(sections) + 2)
    start = ends - widths * len(sections) - 1  # behind the heads
    addresses = np.empty(int(ends[-1]), np.int64)
    addresses.fill(_ZEROS_AT)
    lengths = zeros(int(ends[-1]))
    heads = take_rows(sections.heads, leaving)
    head_bytes = 8 * heads.shape[1]
    addresses[start - 1] = first * head_bytes + heads.__array_interface__["data"][0]
    written = counts * head_bytes
    lengths[start - 1] = written
    section = count_to(len(sections)).reshape(-1, 1)
    slots = section * widths.repeat(counts) + ((start - first).repeat(counts) + count_to(len(leaving)))
    addresses[slots], filled = sections.ranges(leaving)
    lengths[slots] = filled
    totals = np.add.reduceat(filled, first, axis=1)
    padding = -totals % 8
    lengths[section * widths + (start + counts)] = padding
    slack = sizes[peers] - written - _sum(totals + padding)
    lengths[ends - 1] = slack
    # Negative numbers are huge ones without a sign.
    assert _most(slack.view(np.uint64)) <= _NUM_ZEROS, f"a message has {slack} bytes left, beyond 0 to {_NUM_ZEROS}"
    return gather_ranges(addresses, lengths)


def unpack(
    received: torch.Tensor,
    sizes: Int64s,
    num_samples: Int64s,
    sections: Sections,
    staying: Int64s,
    schema: Schema,
    rank: int,
    scraps: list[object] | None = None,
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
        scraps: Gets what is of no use any more; see `Outcome`.

    Returns:
        A batch that owns its memory.

    Raises:
        ProtocolError: The lengths in a message cannot be.
    """
    layout, scraps = schema.layout, [] if scraps is None else scraps
    words = received.numpy()
    scraps.append(words)
    heads = _join_heads(words, sizes, num_samples, take_rows(sections.heads, staying), rank)
    counted = heads[:, : len(layout.counted)].T.copy()
    _check(counted, layout.counted)
    entries = np.empty((layout.num_rows, len(sizes)), np.int64)  # of each row of the table, from each source
    entries[:-1] = _sums(counted, _accumulate(num_samples))
    entries[-1] = num_samples
    counts = take_rows(entries, layout.section_rows)
    # NumPy's empty arrays may have a stride of 0, with which a tensor has no view of its bytes.
    rows = map(torch.from_numpy, counted) if len(heads) else [torch.empty(0, dtype=torch.int64) for _ in counted]
    levels: Levels = {c.name: (row,) for c, row in zip(layout.jagged, rows, strict=False)}
    columns = _dense_columns(heads, layout)
    if layout.sections:
        starts = _accumulate(sizes) - sizes + (received.data_ptr() or _ZEROS_AT)
        read = 8 * heads.shape[1] * num_samples
        at, num_bytes = _find(counts, starts + read, sizes - read, sections.ranges(staying), layout, rank)
        flats = gather_parts(at, num_bytes, layout.section_dtypes)
        scraps.append(_add_inner(levels, flats, counted, layout))
        for section, flat, count in zip(layout.sections, flats, _sum(counts, axis=1).tolist(), strict=True):
            if not section.is_inner:
                values = _as_values(flat, section.column, count)
                columns[section.column.name] = Column(values, levels.get(section.column.name, ()))
    return JaggedBatch.of_checked({name: columns[name] for name in schema.names}, len(heads))


def _join_heads(received: NDArray[np.uint8], sizes: Int64s, num_samples: Int64s, home: Int64s, rank: int) -> Int64s:
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
    first = (_accumulate(sizes) - sizes) // 8 - before * width  # word where the head of sample 0 would be
    starts = first.repeat(arrived) + count_to(total) * width
    heads = received.view(np.int64)[starts.reshape(-1, 1) + count_to(width)]
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
    ends = zeros(len(lengths), lengths.shape[1] + 1)
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


def _add_inner(levels: Levels, flats: list[torch.Tensor], counted: Int64s, layout: Layout) -> list[Int64s]:
    """Add the inner lengths to the levels of nested columns, if they add up to what the heads say of each sample.

    Returns:
        Them as arrays.
    """
    inners = [lengths.numpy() for lengths in flats[: len(layout.nested)]]
    rows = zip(layout.nested, flats, inners, counted[len(layout.jagged) :], strict=False)
    for (column, j), lengths, inner, total in rows:
        _check(inner[None], [column])
        if not np.array_equal(_offsets(inner)[_accumulate(counted[j])], _accumulate(total)):
            raise ProtocolError(f"stage III: the lengths of column {column.name!r} in a message do not add up")
        levels[column.name] = (*levels[column.name], lengths)
    return inners


def _dense_columns(heads: Int64s, layout: Layout) -> dict[str, Column]:
    """The narrow dense columns."""
    columns: dict[str, Column] = {}
    for column, start in layout.narrow:
        if column.row_bytes and len(heads):
            part = torch.from_numpy(_items(heads, column, start).copy().view(column.numpy_dtype or np.uint8))
        else:  # not by NumPy either
            part = torch.empty(0, dtype=column.torch_dtype, device="cpu")
        columns[column.name] = Column(_as_values(part, column, len(heads)))
    return columns


def _as_values(flat: torch.Tensor, column: ColumnSchema, count: int) -> torch.Tensor:
    """Give a flat buffer, of bytes or of the column's elements, the column's dtype and shape."""
    if flat.dtype != column.torch_dtype:
        flat = flat.view(column.torch_dtype)
    return flat.view(count, *column.shape) if column.shape else flat
