"""Arrow data with offsets that lie, sliced and chunked: what Arrow says the values are, or a refusal; no wild reads."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.balancer import JaggedBatch
from freescale.balancer.batches.arrow import column_from_arrow

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
OFFSETS = st.integers(0, 7) | st.sampled_from([-1, 8, 10**6, 2**31 - 1, -(2**31)])
VALUES = pa.array(range(7), pa.int64())


def offsets_of(data: st.DataObject, n: int, dtype: Any) -> Any:
    """Offsets that mostly ascend, as good ones do."""
    offsets = data.draw(st.lists(OFFSETS, min_size=n + 1, max_size=n + 1))
    if data.draw(st.booleans()):
        offsets.sort()
    return pa.py_buffer(np.array(offsets, dtype))


def draw_array(data: st.DataObject) -> Any:
    """An array whose offsets, sizes, indices may be anything. Arrow checks the ends alone, if that."""
    n = data.draw(st.integers(0, 4))
    kind = data.draw(st.sampled_from(["list", "large", "text", "nested", "view", "dictionary"]))
    if kind == "text":
        buffers = [None, offsets_of(data, n, np.int32), pa.py_buffer(b"abcdefg")]
        return pa.Array.from_buffers(pa.string(), n, buffers)
    if kind == "view":
        buffers = [None, offsets_of(data, n, np.int32), offsets_of(data, n, np.int32)]
        return pa.Array.from_buffers(pa.list_view(pa.int64()), n, buffers, children=[VALUES])
    if kind == "dictionary":
        indices = pa.array(data.draw(st.lists(st.integers(-1, 9), min_size=n, max_size=n)), pa.int32())
        return pa.DictionaryArray.from_arrays(indices, VALUES, safe=False)
    if kind == "large":
        buffers = [None, offsets_of(data, n, np.int64)]
        return pa.Array.from_buffers(pa.large_list(pa.int64()), n, buffers, children=[VALUES])
    child = VALUES
    if kind == "nested":
        child = pa.Array.from_buffers(pa.list_(pa.int64()), 7, [None, offsets_of(data, 7, np.int32)], children=[VALUES])
    return pa.Array.from_buffers(pa.list_(child.type), n, [None, offsets_of(data, n, np.int32)], children=[child])


def expected(array: Any) -> list[Any]:
    rows: list[Any] = array.cast(pa.binary()).to_pylist() if pa.types.is_string(array.type) else array.to_pylist()
    return [list(row) if isinstance(row, bytes) else row for row in rows]


@settings(PATIENT, max_examples=400)
@given(data=st.data())
def test_arrays_with_any_offsets_slices_and_chunks_are_taken_or_refused(data: st.DataObject) -> None:
    with contextlib.suppress(pa.ArrowInvalid):
        array = draw_array(data)
        start = data.draw(st.integers(0, len(array)))
        part = array.slice(start, data.draw(st.integers(0, len(array) - start)))
        chunks = pa.chunked_array([part, part.slice(0, data.draw(st.integers(0, len(part))))])
        sound = all(is_sound(chunk) for chunk in chunks.chunks)
        got, refusal = None, ""
        try:
            got = column_from_arrow("x", chunks).to_list()
        except ValueError as error:
            refusal = str(error)
        assert not refusal or ("column 'x'" in refusal and not sound), refusal
        if sound:
            assert got == [row for chunk in chunks.chunks for row in expected(chunk)]


def is_sound(array: Any) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


@settings(PATIENT, max_examples=150)
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_stream_with_any_bytes_changed_is_read_or_refused(changes: list[tuple[float, int]]) -> None:
    table = pa.table({"x": [[1, 2], [], [3]], "t": ["ab", "", "c"], "n": [[[1], []], [], [[2, 3]]]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    raw = bytearray(sink.getvalue().to_pybytes())
    for at, byte in changes:
        raw[int(at * (len(raw) - 1))] = byte
    try:
        read = pa.ipc.open_stream(pa.py_buffer(bytes(raw))).read_all()
    except (pa.ArrowException, OSError, ValueError, MemoryError, TypeError, KeyError, UnicodeDecodeError):
        return
    try:
        batch = JaggedBatch.from_arrow(read)
    except (ValueError, UnicodeDecodeError):
        return
    for name in batch.names:
        batch[name].to_list()


UNION = pa.sparse_union([pa.field("a", pa.int64())])
TYPES = [
    *(pa.sparse_union([]), pa.list_(pa.sparse_union([]))),  # of which Arrow makes no empty array, but a crash
    *(pa.null(), pa.bool_(), pa.int64(), pa.string(), pa.string_view(), pa.binary(4), pa.timestamp("s")),
    *(pa.decimal128(5, 2), pa.month_day_nano_interval(), pa.struct([("a", pa.int32())]), UNION, pa.list_(UNION)),
    *(pa.dense_union([pa.field("a", pa.int64())]), pa.map_(pa.string(), pa.int64()), pa.list_(pa.int64(), 3)),
    *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.list_(pa.int64()))),
    *(pa.run_end_encoded(pa.int32(), pa.int64()), pa.fixed_shape_tensor(pa.int32(), [2, 2])),
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_column_of_any_type_without_a_row_is_taken_or_refused_by_name(kind: Any) -> None:
    made = [] if "sparse_union<>" in str(kind) else [[pa.nulls(0, kind)], [pa.nulls(1, kind).slice(1)]]
    for chunks in ([], *made):
        got, refusal = [], ""
        try:
            got = column_from_arrow("x", pa.chunked_array(chunks, kind)).to_list()
        except ValueError as error:
            refusal = str(error)
        assert got == []
        assert not refusal or "column 'x'" in refusal


def streams_of_months() -> list[Any]:
    """Tables with a type that Arrow has and its Python lacks: text, whose tag in a stream is 5, becomes months, 11."""
    found = []
    for kind in (pa.string(), pa.list_(pa.string())):
        sink = pa.BufferOutputStream()
        pa.ipc.new_stream(sink, pa.schema([("x", kind)])).close()
        raw = sink.getvalue().to_pybytes()
        for place in [place for place, byte in enumerate(raw) if byte == 5]:
            with contextlib.suppress(pa.ArrowException, OSError):
                table = pa.ipc.open_stream(pa.py_buffer(raw[:place] + b"\x0b" + raw[place + 1 :])).read_all()
                found += [table] * ("month_interval" in str(table.schema))
    return found


def test_types_that_python_does_not_know_are_refused_by_name() -> None:
    tables = streams_of_months()
    assert len(tables) == 2
    for table in tables:
        with pytest.raises(ValueError, match=r"column 'x' is of Arrow type .*month_interval.*; cast it to numbers"):
            JaggedBatch.from_arrow(table)
