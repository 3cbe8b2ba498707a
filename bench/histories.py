"""Reads histories, their lengths and ids, out of Parquet columns of any nesting (data of the paper, section 2.1)."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .arguments import file_and_column
from .roles import infer_roles

Ints = NDArray[np.int64]
_ROWS_AT_ONCE = 1024
_NAMED_ID = re.compile(r"(^|[^a-z])ids?'$")


@dataclass
class Histories:
    """Rows of a column, from the first on.

    Attributes:
        title: File and column, for people.
        lengths: Innermost values of each row. Shape [num_rows].
        ids: Innermost values of the first `num_rows_with_ids` rows, one row after the other; equal ids are equal
            numbers. Empty where the column has no ids.
        num_rows_with_ids: Rows whose ids were kept.
        remarks: What a reader has to know of how the column was read.
    """

    title: str
    lengths: Ints
    ids: Ints
    num_rows_with_ids: int = 0
    remarks: list[str] = field(default_factory=list)

    def ids_of(self, rows: Ints, max_length: int | None = None) -> Ints:
        """Ids of some rows, one after the other; of a longer history the last `max_length`."""
        ends = self.lengths[: self.num_rows_with_ids].cumsum()[rows]
        counts = self.lengths[rows] if max_length is None else np.minimum(self.lengths[rows], max_length)
        starts = np.repeat(ends - counts - (counts.cumsum() - counts), counts)
        return self.ids[starts + np.arange(len(starts))]


def read_histories(
    source: str | Sequence[str], most_rows: int, most_ids: int, most_items: int | None = None
) -> Histories:
    """Read a column's histories.

    Args:
        source: `path.parquet:column`; the path may be a folder or have wildcards, the column may be `outer.inner` for a
            field of a struct, within lists too. Without a column, the one that looks like a history is taken. Several
            of them are read one after the other; the column may be named once.
        most_rows: Rows to read at most.
        most_ids: Ids to keep at most; further rows give lengths only.
        most_items: Stop reading after so many items; None: read on.

    Raises:
        ValueError: No such file or column, not readable, or no lists, text or lengths in it; says what there is.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "data.parquet"
        >>> pq.write_table(pa.table({"uih": [[[1, 2], [3]], []]}), path)
        >>> found = read_histories(f"{path}:uih", 10, 10)
        >>> found.lengths.tolist(), found.ids.tolist()
        ([3, 0], [1, 2, 3])
    """
    paths, column = _files([source] if isinstance(source, str) else source)
    remarks = []
    if not column:
        column = _guessed(paths[0])
        remarks.append(f"No column was named; {column!r} looks like the history. Another: {paths[0]}:column.")
    reader = _Reader(column, most_rows, most_ids, most_items)
    try:
        for path in paths:
            reader.read(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    title = f"{Path(paths[0]).name}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}, column {column}"
    found = reader.found(title)
    found.remarks = remarks + found.remarks
    return found


def _files(sources: Sequence[str]) -> tuple[list[str], str]:
    """Divide sources into files and the column of all."""
    found = [file_and_column(source) for source in sources]
    columns = dict.fromkeys(column for _, column in found if column)
    if len(columns) > 1:
        raise ValueError(f"one column is read of all files, got {' and '.join(map(repr, columns))}")
    paths: list[str] = []
    for path, _ in found:
        inside = (
            sorted(str(p) for p in Path(path).rglob("*.parquet")) if Path(path).is_dir() else sorted(glob.glob(path))
        )
        if Path(path).is_dir() and not inside:
            raise ValueError(f"folder {path} has no file that ends with .parquet")
        if not inside or not Path(inside[0]).is_file():
            raise ValueError(f"no file {path!r}; give path.parquet:column")
        paths += inside
    return paths, next(iter(columns), "")


def _guessed(path: str) -> str:
    try:
        return infer_roles(path).uih
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


class _Reader:
    """Takes in record batches until there are enough rows."""

    def __init__(self, column: str, most_rows: int, most_ids: int, most_items: int | None) -> None:
        self._column, self._most_rows, self._most_ids, self._most_items = column, most_rows, most_ids, most_items
        self._num_items, self._stopped = 0, False
        self._lengths: list[Ints] = []
        self._ids: list[pa.Array] = []
        self._num_rows = self._num_rows_with_ids = self._nulls = 0
        self._what = ""
        self._has_ids = True

    def read(self, path: str) -> None:
        with pq.ParquetFile(path) as file:
            top, inner = _resolve(file.schema_arrow, self._column, path)
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[top]):
                missing = self._most_rows - self._num_rows
                if missing <= 0 or self._stopped:
                    return
                self._take(batch.column(batch.schema.get_field_index(top.split(".")[0]))[:missing], inner, path)

    def _take(self, array: pa.Array, inner: list[str], path: str) -> None:
        lengths, leaf, nulls = _innermost(array, inner, f"{path}: column {self._column!r}")
        self._nulls += nulls
        self._num_rows += len(array)
        self._has_ids = self._has_ids and leaf is not None and (_is_id(leaf.type))
        if lengths is None:  # no list: text, or lengths themselves
            lengths, self._what = _flat_lengths(leaf, f"{path}: column {self._column!r}")
            self._has_ids = False
        self._lengths.append(lengths)
        self._num_items += int(lengths.sum())
        self._stopped = self._most_items is not None and self._num_items >= self._most_items
        if self._has_ids and self._most_ids > 0:
            ends = lengths.cumsum()
            fitting = int(np.searchsorted(ends, self._most_ids, side="right"))
            kept = int(ends[fitting - 1]) if fitting else 0
            self._ids.append(leaf[:kept])
            self._num_rows_with_ids += fitting
            # rows with ids are the first ones, without gaps
            self._most_ids = self._most_ids - kept if fitting == len(lengths) else 0

    def found(self, title: str) -> Histories:
        if self._num_rows == 0:
            raise ValueError(f"{title}: there are no rows")
        lengths = np.concatenate(self._lengths)
        if lengths.min() < 0:
            raise ValueError(f"{title}: lengths must not be negative, got {lengths.min()}")
        ids = _numbers(self._ids) if self._has_ids and self._ids else np.zeros(0, dtype=np.int64)
        remarks = [self._what] if self._what else []
        if not self._has_ids and not self._what:
            remarks.append("The lists hold no ids (integers or text), so collisions are not known.")
        if self._stopped:
            remarks.append(f"Reading stopped after {self._num_rows:,} rows: they hold {self._num_items:,} items.")
        if self._nulls:
            remarks.append(f"{self._nulls:,} nulls are taken for empty lists.")
        return Histories(title, lengths, ids, self._num_rows_with_ids if len(ids) else 0, remarks)


def _resolve(schema: pa.Schema, column: str, path: str) -> tuple[str, list[str]]:
    """Find the top-level column, and the fields to follow inside of it."""
    if column in schema.names:
        return column, []
    top, *inner = column.split(".")
    if top not in schema.names or not inner:
        there = ", ".join(f"{f.name} ({f.type})" for f in schema)
        raise ValueError(f"{path} has no column {column!r}; it has {there}")
    return top, inner


def _innermost(array: pa.Array, inner: list[str], where: str) -> tuple[Ints | None, pa.Array, int]:
    """Follow lists and structs down. Returns lengths by row (None without a list), the leaf and the number of nulls."""
    lengths: Ints | None = None
    inner, nulls = list(inner), 0
    while True:
        kind = array.type
        if pa.types.is_struct(kind):
            names = [kind.field(i).name for i in range(kind.num_fields)]
            if not inner or inner[0] not in names:
                said = f"no field {inner[0]!r}" if inner else "fields, of which one must be named"
                raise ValueError(f"{where} has {said}: {', '.join(names)} (write column.field)")
            array = pc.struct_field(array, inner.pop(0))
        elif _is_list(kind):
            nulls += array.null_count
            counts = np.asarray(pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64()))
            lengths = counts if lengths is None else _sums(counts, lengths)
            array = array.flatten()
        elif inner:
            raise ValueError(f"{where} has no field {inner[0]!r}: it holds {kind} there")
        else:
            return lengths, array, nulls


def _sums(counts: Ints, lengths: Ints) -> Ints:
    """Add up consecutive counts, so many for each row."""
    total = np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])
    ends = lengths.cumsum()
    sums: Ints = total[ends] - total[ends - lengths]
    return sums


def _flat_lengths(leaf: pa.Array, where: str) -> tuple[Ints, str]:
    kind = leaf.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        lengths, what = (
            pc.binary_length(leaf),
            "Lengths are bytes of text, not ids, so collisions are not known.",
        )
    elif pa.types.is_integer(kind):
        if _NAMED_ID.search(where.lower()):
            raise ValueError(
                f"{where} holds one number a row, by its name an id: name a column of lists, or of lengths"
            )
        lengths, what = leaf, "The numbers are taken for lengths, so collisions are not known."
    else:
        raise ValueError(f"{where} must hold lists, text or integer lengths, it holds {kind}")
    return np.asarray(pc.fill_null(lengths.cast(pa.int64()), 0)), what


def _is_list(kind: pa.DataType) -> bool:
    tests = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(bool(getattr(pa.types, test)(kind)) for test in tests if hasattr(pa.types, test))


def _is_id(kind: pa.DataType) -> bool:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
    return bool(pa.types.is_integer(kind) or text or pa.types.is_dictionary(kind))


def _numbers(leaves: list[pa.Array]) -> Ints:
    """Give equal ids equal numbers; integers of other widths, and other kinds of text, may come from other files."""
    if all(pa.types.is_integer(leaf.type) for leaf in leaves):
        return np.concatenate([_plain(leaf) for leaf in leaves])
    kinds = list(dict.fromkeys(leaf.type for leaf in leaves))
    if len(kinds) > 1:
        leaves = [leaf.dictionary_decode() if pa.types.is_dictionary(leaf.type) else leaf for leaf in leaves]
        if any(pa.types.is_integer(leaf.type) for leaf in leaves):
            raise ValueError(f"ids have to be all text or all integers, files have {' and '.join(map(str, kinds))}")
        leaves = [leaf.cast(pa.large_binary()) for leaf in leaves]
    chunked = pa.chunked_array(leaves).dictionary_encode().unify_dictionaries()
    return np.concatenate([_plain(chunk.indices) for chunk in chunked.chunks])


def _plain(array: pa.Array) -> Ints:
    """Integers of any width as int64, bit for bit; a null becomes -1."""
    if array.null_count:
        array = pc.fill_null(array.cast(pa.int64(), safe=False), -1)
    return np.asarray(array).astype(np.int64, copy=False)


def batches_of_rows(num_rows: int, size: int, most: int, seed: int | None) -> Iterator[Ints]:
    """Rows of consecutive batches, at most so many: in order, or shuffled with a seed. None if rows are too few."""
    order = np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)
    for index in range(min(most, num_rows // size)):
        yield order[index * size : (index + 1) * size]
