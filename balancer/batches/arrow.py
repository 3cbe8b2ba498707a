"""Arrow arrays to columns and back, without a copy where the layout allows (paper, section 2.1: data as it is stored).

Columns made here may alias Arrow's memory, which is immutable: read them, do not write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .column import MAX_DEPTH, Column, as_bytes
from .select import concat_samples

FillValue = bool | int | float | None

_DTYPES: dict[Any, torch.dtype] = {
    pa.int8(): torch.int8,
    pa.int16(): torch.int16,
    pa.int32(): torch.int32,
    pa.int64(): torch.int64,
    pa.uint8(): torch.uint8,
    pa.uint16(): torch.uint16,
    pa.uint32(): torch.uint32,
    pa.uint64(): torch.uint64,
    pa.float16(): torch.float16,
    pa.float32(): torch.float32,
    pa.float64(): torch.float64,
}
_TYPES = {dtype: kind for kind, dtype in _DTYPES.items()}


class _NullFound(Exception):
    """A null where none is allowed; `row` counts in the array that the handler looks at."""

    def __init__(self, row: int, what: str) -> None:
        self.row = row
        self.what = what


def column_from_arrow(name: str, data: Any, fill_value: FillValue = None) -> Column:
    """Make a column of an Arrow Array or ChunkedArray.

    Args:
        name: Names the column in errors.
        data: Primitive, bool, date and time types (as int64), list, large_list, list_view, fixed_size_list, string and
            binary (as lists of uint8), at most two levels of lists; dictionaries are decoded.
        fill_value: What a null number becomes; a null list becomes an empty one. None: nulls are errors.

    Raises:
        ValueError: A null, naming its row; a type that is no column; a fill value that does not fit the type.
    """
    _refuse_type(name, data.type)
    columns, start = [], 0
    try:
        for chunk in _chunks(data):
            columns.append(_column(name, chunk, fill_value))
            start += len(chunk)
    except _NullFound as null:
        raise ValueError(
            f"column {name!r} has {null.what} at row {start + null.row}; give fill_value= to replace nulls "
            f"(numbers by it, lists by empty ones)"
        ) from None
    except pa.ArrowNotImplementedError as error:
        raise _wrong_type(name, data.type) from error
    return concat_samples(columns)


def _refuse_type(name: str, kind: Any) -> None:
    """Refuse what is no column before its arrays are touched: of some types not even an empty one is made safely."""
    if isinstance(kind, pa.BaseExtensionType):
        _refuse_type(name, kind.storage_type)
    elif pa.types.is_dictionary(kind) or pa.types.is_fixed_size_list(kind) or _is_list(kind):
        _refuse_type(name, kind.value_type)
    elif pa.types.is_temporal(kind):
        if pa.types.is_interval(kind):
            raise _wrong_type(name, kind)
    elif not (_is_text(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_boolean(kind) or kind in _DTYPES):
        raise _wrong_type(name, kind)


def _chunks(data: Any) -> list[Any]:
    """At least one array, which may be empty."""
    chunks: list[Any] = data.chunks if isinstance(data, pa.ChunkedArray) else [data]
    return chunks or [pa.nulls(0, data.type)]


def _column(name: str, array: Any, fill: FillValue) -> Column:
    kind = array.type
    _refuse_damage(name, array)
    if isinstance(kind, pa.BaseExtensionType):
        return _extension(name, array, fill)
    if pa.types.is_dictionary(kind):
        return _column(name, array.dictionary_decode(), fill)
    if pa.types.is_fixed_size_list(kind):
        return _fixed_size_list(name, array, fill)
    if _is_list(kind):
        return _list(name, array, fill)
    if _is_text(kind):
        return _text(name, array, fill)
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return _primitive(name, array, torch.uint8, fill, width=kind.byte_width)
    if pa.types.is_boolean(kind):
        return _boolean(name, array, fill)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return _primitive(
            name, array.cast(pa.int64() if kind.bit_width == 64 else pa.int32()).cast(pa.int64()), torch.int64, fill
        )
    if kind in _DTYPES:
        return _primitive(name, array, _DTYPES[kind], fill)
    raise _wrong_type(name, kind)


def _wrong_type(name: str, kind: Any) -> ValueError:
    return ValueError(f"column {name!r} is of Arrow type {kind}; {_what_to_do(kind)}")


def _refuse_damage(name: str, array: Any) -> None:
    """Refuse offsets that lead out of the buffers: Arrow itself follows them. In full where they come in any order."""
    kind = array.type
    views = ("is_list_view", "is_large_list_view", "is_string_view", "is_binary_view")
    anyhow = pa.types.is_dictionary(kind) or any(getattr(pa.types, check)(kind) for check in views)
    try:
        array.validate(full=anyhow)
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name!r} is no valid Arrow data: {error}") from error


def _what_to_do(kind: Any) -> str:
    if pa.types.is_struct(kind):
        return "make its fields columns of their own (table.flatten()), or leave it out with columns="
    if pa.types.is_decimal(kind):
        return "cast it to float64 or, scaled, to int64, or leave it out with columns="
    return "cast it to numbers or lists of numbers, or leave it out with columns="


def _is_list(kind: Any) -> bool:
    checks = ("is_list", "is_large_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, check)(kind) for check in checks)


def _is_text(kind: Any) -> bool:
    checks = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    return any(getattr(pa.types, check)(kind) for check in checks)


def _first_null(array: Any) -> int:
    return int(np.flatnonzero(_nulls(array))[0])


def _nulls(array: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask: np.ndarray[Any, np.dtype[np.bool_]] = pc.is_null(array).to_numpy(zero_copy_only=False)
    return mask


def _tensor(buffer: Any, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """View `count` elements of an Arrow buffer, from element `start`."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    size = dtype.itemsize
    raw = pa.UInt8Array.from_buffers(pa.uint8(), count * size, [None, buffer], offset=start * size)
    return from_dlpack(raw).view(dtype)


def _primitive(name: str, array: Any, dtype: torch.dtype, fill: FillValue, width: int | None = None) -> Column:
    if array.null_count and fill is None:
        raise _NullFound(_first_null(array), "a null")
    each = 1 if width is None else width
    values = _tensor(array.buffers()[1], dtype, array.offset * each, len(array) * each)
    if width is not None:
        values = values.view(len(array), width)
    return Column(_filled(name, array, values, fill) if array.null_count else values)


def _boolean(name: str, array: Any, fill: FillValue) -> Column:
    if array.null_count and fill is None:
        raise _NullFound(_first_null(array), "a null")
    bits = array.cast(pa.uint8())
    values = _tensor(bits.buffers()[1], torch.uint8, bits.offset, len(bits)).view(torch.bool)
    return Column(_filled(name, array, values, fill) if array.null_count else values)


def _filled(name: str, array: Any, values: Tensor, fill: FillValue) -> Tensor:
    """Copy the values with `fill` where the array is null."""
    filled = values.clone().numpy()
    wanted = np.asarray(fill)
    try:
        with np.errstate(all="ignore"):
            fits = wanted.astype(filled.dtype)
            exact = filled.dtype.kind == "f" or bool(fits == wanted)
    except (OverflowError, ValueError, TypeError):
        exact = False
    if not exact:
        raise ValueError(f"fill_value must fit the type of column {name!r}, {array.type}, got {fill!r}")
    filled[_nulls(array)] = fits
    return torch.from_numpy(filled)


def _list(name: str, array: Any, fill: FillValue) -> Column:
    if array.null_count and fill is None:
        raise _NullFound(_first_null(array), "a null list")
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        lengths = np.asarray(array.sizes).astype(np.int64)
    else:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
        if len(lengths) and lengths.min() < 0:
            raise ValueError(f"column {name!r} is no valid Arrow data: offsets of row {lengths.argmin()} decrease")
    if array.null_count:
        lengths[_nulls(array)] = 0
    # flatten() follows slices and leaves out what lies under null lists, which may be anything. Without rows it goes
    # where the one offset says, which nobody has checked.
    return _nested(
        name, lengths, lambda: _column(name, array.flatten() if len(array) else array.values.slice(0, 0), fill)
    )


def _nested(name: str, lengths: np.ndarray[Any, Any], make_items: Callable[[], Column]) -> Column:
    """Put a level of lengths above a column of items; a null among the items is reported at its sample."""
    try:
        items = make_items()
    except _NullFound as null:
        sample = int(np.searchsorted(np.cumsum(lengths), null.row, side="right"))
        raise _NullFound(sample, null.what + " inside a list") from None
    if items.depth == MAX_DEPTH:
        raise ValueError(f"column {name!r} has more than {MAX_DEPTH} levels of lists; flatten the innermost ones")
    return Column(items.values, (torch.from_numpy(lengths), *items.levels))


def _fixed_size_list(name: str, array: Any, fill: FillValue) -> Column:
    size, n = array.type.list_size, len(array)
    if array.null_count and fill is None:
        raise _NullFound(_first_null(array), "a null list")
    children = array.values.slice(array.offset * size, n * size)
    if array.null_count:
        rows = np.repeat(np.arange(n), size) * size + np.tile(np.arange(size), n)
        rows = np.where(np.repeat(_nulls(array), size), -1, rows)
        children = children.take(pa.array(rows, pa.int64(), mask=rows < 0))  # nulls, which are filled below
    lengths = np.full(n, size, dtype=np.int64)
    column = _nested(name, lengths, lambda: _column(name, children, fill))
    if column.depth > 1:
        return column
    values = column.values
    return Column(values.view(n, size, *values.shape[1:]))


def _text(name: str, array: Any, fill: FillValue) -> Column:
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    if array.null_count:
        if fill is None:
            raise _NullFound(_first_null(array), "a null string")
        is_bytes = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
        array = pc.fill_null(array, b"" if is_bytes else "")
    wide = array.type in (pa.large_string(), pa.large_binary())
    _, offsets_buffer, data = array.buffers()
    if len(array) == 0 or offsets_buffer is None:
        return Column(torch.empty(0, dtype=torch.uint8), (torch.zeros(len(array), dtype=torch.int64),))
    offsets = _tensor(offsets_buffer, torch.int64 if wide else torch.int32, array.offset, len(array) + 1)
    first, last = int(offsets[0]), int(offsets[-1])
    if bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"column {name!r} is no valid Arrow data: offsets of row {int(offsets.diff().argmin())} decrease"
        )
    return Column(_tensor(data, torch.uint8, first, last - first), (offsets.diff().to(torch.int64),))


def _extension(name: str, array: Any, fill: FillValue) -> Column:
    column = _column(name, array.storage, fill)
    if not isinstance(array.type, pa.FixedShapeTensorType):
        return column
    values = column.values.view(len(array), *array.type.shape)  # shape in memory; the permutation makes it logical
    order = array.type.permutation or range(values.dim() - 1)
    return Column(values.permute(0, *(1 + i for i in order)))


def column_to_arrow(name: str, column: Column, text: bool = False) -> Any:
    """Make an Arrow array of a column in host memory: lists become large_list, trailing shapes fixed_size_list.

    Args:
        name: Names the column in errors.
        column: Any depth. Its memory is shared, but for bool, which Arrow packs.
        text: The uint8 values are UTF-8 text: make strings, not lists.

    Raises:
        ValueError: The dtype does not exist in Arrow, or `text` asks for what is not uint8 in lists.
    """
    values, levels = column.values, list(column.levels)
    if text:
        if values.dtype is not torch.uint8 or values.dim() != 1 or not levels:
            raise ValueError(f"column {name!r} is {column.spec}; only jagged uint8 columns can be text")
        lengths = levels.pop()
        buffers = [None, _buffer(_offsets(lengths)), _buffer(values)]
        array = pa.Array.from_buffers(pa.large_string(), len(lengths), buffers)
    else:
        array = _flat_array(name, values)
        for size in reversed(values.shape[1:]):
            if size == 0:
                raise ValueError(f"column {name!r} has rows of no elements, shape {list(values.shape)}")
            array = pa.FixedSizeListArray.from_arrays(array, size)
    for lengths in reversed(levels):
        array = pa.LargeListArray.from_arrays(pa.array(_offsets(lengths).numpy()), array)
    return array


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _buffer(values: Tensor) -> Any:
    return pa.py_buffer(as_bytes(values).numpy())


def _flat_array(name: str, values: Tensor) -> Any:
    flat = values.reshape(-1)
    if flat.dtype is torch.bool:
        return pa.array(flat.numpy())
    if flat.dtype not in _TYPES:
        raise ValueError(
            f"column {name!r} is {values.dtype}, which Arrow does not have; convert it, or view it as integers"
        )
    return pa.Array.from_buffers(_TYPES[flat.dtype], len(flat), [None, _buffer(flat)])


def table_columns(
    table: Any, columns: list[str] | None, fill_value: FillValue | Mapping[str, FillValue]
) -> tuple[dict[str, Column], int]:
    """Make the columns of a Table, a RecordBatch or anything that exports an Arrow stream, and count its rows.

    Raises:
        ValueError: A column is missing or has a repeated name, or cannot be a column.
        TypeError: `table` holds no Arrow data.
    """
    if not isinstance(table, (pa.Table, pa.RecordBatch)):
        if not hasattr(table, "__arrow_c_stream__"):
            raise TypeError(f"table must be a pyarrow Table or RecordBatch, got {type(table).__name__}")
        table = pa.table(table)
    names = table.schema.names if columns is None else list(columns)
    check_names(names, table.schema.names, "the table")
    fills = fill_value if isinstance(fill_value, Mapping) else dict.fromkeys(names, fill_value)
    made = {name: column_from_arrow(name, table.column(name), fills.get(name)) for name in names}
    return made, table.num_rows


def check_names(wanted: list[str], found: list[str], where: str) -> None:
    """Raise ValueError when a wanted column is missing or ambiguous in `where`."""
    for name in wanted:
        if name not in found:
            raise ValueError(f"no column {name!r} in {where}; it has {', '.join(found) or 'none'}")
        if found.count(name) > 1 or wanted.count(name) > 1:
            raise ValueError(f"column {name!r} is there more than once in {where}")
