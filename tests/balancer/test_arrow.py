"""Arrow in and out: every layout that Arrow allows, compared with what Arrow itself says the values are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.balancer.batches.batch import Column, JaggedBatch


def column(array: Any, fill_value: Any = None) -> Column:
    return JaggedBatch.from_arrow(pa.table({"x": array}), fill_value=fill_value)["x"]


NUMBERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
]


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_numbers_keep_type_and_value(kind: Any) -> None:
    array = pa.array([1, 0, 1, 1, 0], pa.int64()).cast(kind)
    assert column(array).to_list() == array.to_pylist()
    assert str(column(array).values.dtype) == {"float": "torch.float32", "double": "torch.float64"}.get(
        str(kind), f"torch.{kind}"
    )


def test_half_floats_are_kept() -> None:
    halves = np.array([1.5, -0.0, np.nan, 65504], dtype=np.float16)
    values = column(pa.array(halves)).values
    assert values.dtype is torch.float16
    assert values.numpy().tobytes() == halves.tobytes()


LISTS = [
    [[1, 2], [], [3], [4, 5, 6]],
    [[], [], []],
    [],
]


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", LISTS, ids=len)
def test_lists_of_any_offset_type_become_jagged(make: Any, rows: list[list[int]]) -> None:
    array = pa.array(rows, make(pa.int32()))
    assert column(array).to_list() == rows
    assert column(array).levels[0].dtype is torch.int64
    assert column(array).values.dtype is torch.int32


ANY_LIST = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


@pytest.mark.parametrize("outer", ANY_LIST, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inner", ANY_LIST, ids=lambda f: f.__name__)
def test_lists_of_lists_become_nested(outer: Any, inner: Any) -> None:
    rows = [[[1, 2], []], [], [[3]], [[], [4]]]
    array = pa.array(rows, outer(inner(pa.int64())))
    assert column(array).to_list() == rows
    assert column(array.slice(2)).to_list() == rows[2:]
    with_nulls = pa.array([[[1], None], None, [[None, 2]]], outer(inner(pa.int64())))
    assert column(with_nulls, 7).to_list() == [[[1], []], [], [[7, 2]]]


@pytest.mark.parametrize("outer", ANY_LIST, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["view", "binary", "list_view<string_view>"])
def test_a_field_may_be_called_like_a_type(outer: Any, name: str) -> None:
    numbers = pa.array([[1, 2], [], None], outer(pa.field(name, pa.int64())))
    assert column(numbers, 0).to_list() == [[1, 2], [], []]


@pytest.mark.parametrize("outer", ANY_LIST, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "binary_view"])
def test_lists_of_any_text_become_nested_and_their_nulls_are_filled(outer: Any, kind: str) -> None:
    array = pa.array([["ab", None], [], ["c"]], outer(pa.type_for_alias(kind)))
    assert column(array, 0).to_list() == [[[97, 98], []], [], [[99]]]
    with pytest.raises(ValueError, match="column 'x' has a null string inside a list at row 0"):
        column(array)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (pa.int64(), [1, 2, 3, 4, 5]),
        (pa.bool_(), [True, False, True, True, False]),
        (pa.list_(pa.bool_()), [[True], [], [False, True], [], [True] * 9]),
        (pa.list_(pa.list_(pa.int64())), [[[1], [2, 3]], [], [[4]], [[]], [[5, 6]]]),
        (pa.list_(pa.int64(), 2), [[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]]),
        (pa.list_(pa.list_(pa.int64(), 2)), [[[1, 2]], [], [[3, 4], [5, 6]], [], [[7, 8]]]),
        (pa.list_(pa.list_(pa.int64()), 2), [[[1], []], [[2, 3], [4]], [[], []], [[5], [6]], [[7], [8]]]),
    ],
    ids=str,
)
def test_slices_and_chunks_hold_what_arrow_says(kind: Any, rows: list[Any]) -> None:
    array = pa.array(rows, kind)
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 1):
            assert column(array.slice(start, stop - start)).to_list() == rows[start:stop]
    chunked = pa.chunked_array([array.slice(1, 2), array.slice(0, 0), array.slice(2), array.slice(0, 1)], kind)
    assert column(chunked).to_list() == chunked.to_pylist()
    assert column(pa.chunked_array([], kind)).batch_size == 0


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "binary_view"])
def test_text_becomes_lists_of_bytes(kind: str) -> None:
    words = ["", "naïve", "x", "", "a string that is too long to be inlined"]
    array = pa.array(words).cast(pa.type_for_alias(kind))
    for part, expected in ((array, words), (array.slice(1, 3), words[1:4]), (array.slice(5), [])):
        got = column(part)
        assert got.values.dtype is torch.uint8
        assert [bytes(row).decode() for row in got.to_list()] == expected


def test_lists_of_text_become_nested_bytes() -> None:
    rows = [["ab", ""], [], ["c"]]
    got = column(pa.array(rows)).to_list()
    assert [[bytes(word).decode() for word in row] for row in got] == rows


def test_fixed_size_lists_become_a_trailing_dimension() -> None:
    dense = column(pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)))
    assert (dense.depth, list(dense.values.shape)) == (0, [2, 2])
    jagged = column(pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), 2))))
    assert (jagged.depth, list(jagged.values.shape)) == (1, [3, 2])
    square = column(pa.array([[[1, 2], [3, 4]]], pa.list_(pa.list_(pa.int8(), 2), 2)))
    assert square.to_list() == [[[1, 2], [3, 4]]]
    digests = column(pa.array([b"abc", b"def"], pa.binary(3)))
    assert digests.to_list() == [list(b"abc"), list(b"def")]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(2, 3, 2))
    assert column(tensors).to_list() == np.arange(12).reshape(2, 3, 2).tolist()
    turned = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), (3, 2), permutation=[1, 0]), tensors.storage
    )
    assert column(turned).to_list() == np.arange(12).reshape(2, 3, 2).transpose(0, 2, 1).tolist()


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.date64(), pa.time64("ns"), pa.duration("ms"), pa.date32()],
    ids=str,
)
def test_dates_and_times_become_int64_in_their_unit(kind: Any) -> None:
    counts = [0, 86_400_000, 864_000_000] if kind == pa.date64() else [0, 1, 12345]
    array = pa.array(counts, pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    got = column(array)
    assert got.values.dtype is torch.int64
    assert got.to_list() == counts


def test_dictionaries_are_decoded() -> None:
    assert column(pa.array([7, 7, 9]).dictionary_encode()).to_list() == [7, 7, 9]
    words = column(pa.array(["a", "b", "a"]).dictionary_encode())
    assert [bytes(row).decode() for row in words.to_list()] == ["a", "b", "a"]


def test_a_null_bitmap_without_nulls_is_no_null() -> None:
    with_bitmap = pa.array([1, None, 3, 4])[2:]
    assert with_bitmap.buffers()[0] is not None
    assert column(with_bitmap).to_list() == [3, 4]
    lists = pa.array([[1], None, [2, 3]])[2:]
    assert column(lists).to_list() == [[2, 3]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([1, None]), r"column 'x' has a null at row 1"),
        (pa.array([True, None]), r"column 'x' has a null at row 1"),
        (pa.array([[1], None]), r"column 'x' has a null list at row 1"),
        (pa.array([[1], [], [2, 3], [4, None]]), r"column 'x' has a null inside a list at row 3"),
        (pa.array([[1], [], [None, 2]]), r"column 'x' has a null inside a list at row 2"),
        (pa.array([[[1]], [], [[2], None]]), r"column 'x' has a null list inside a list at row 2"),
        (pa.array([[[1]], [[2], [], [3, None]]]), r"column 'x' has a null inside a list inside a list at row 1"),
        (pa.array(["a", None]), r"column 'x' has a null string at row 1"),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), r"column 'x' has a null list at row 1"),
        (pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2)), r"column 'x' has a null inside a list at row 1"),
        (pa.chunked_array([pa.array([1, 2]), pa.array([3, None])]), r"column 'x' has a null at row 3"),
        (pa.array([[1], [None]])[1:], r"column 'x' has a null inside a list at row 0"),
    ],
)
def test_a_null_is_an_error_that_names_column_and_row(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message + ".*give fill_value="):
        column(array)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None]), [1, 7]),
        (pa.array([1.5, None, 2]).cast(pa.float16()), [1.5, 7, 2]),
        (pa.array([[1], None, [None, 2]]), [[1], [], [7, 2]]),
        (pa.array([[[1], None], None, [[None]]]), [[[1], []], [], [[7]]]),
        (pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2)), [[1, 2], [7, 7], [3, 7]]),
        (pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))[1:], [[7, 7], [3, 7]]),
        (pa.array([1, None], pa.timestamp("s")), [1, 7]),
        (pa.array(["a", None]), [[97], []]),
        (pa.array([b"a", None]), [[97], []]),
        (pa.array([4, None], pa.uint64()), [4, 7]),
        (pa.array([b"ab", None], pa.binary(2)), [[97, 98], [7, 7]]),
    ],
    ids=str,
)
def test_a_fill_value_replaces_nulls(array: Any, expected: list[Any]) -> None:
    assert column(array, fill_value=7).to_list() == expected
    assert column(array, fill_value={"x": 7}).to_list() == expected


def test_filling_nulls_leaves_arrow_memory_alone() -> None:
    array = pa.array([1, None, 3])
    before = array.buffers()[1].to_pybytes()
    assert column(array, fill_value=7).to_list() == [1, 7, 3]
    assert array.buffers()[1].to_pybytes() == before


def test_a_null_list_may_hide_items_which_are_left_out() -> None:
    offsets, items = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5])
    hidden = pa.ListArray.from_arrays(offsets, items, mask=pa.array([False, True, False]))
    assert column(hidden, fill_value=0).to_list() == [[1, 2], [], [5]]


@pytest.mark.parametrize(("kind", "fill"), [(pa.int8(), 300), (pa.int64(), 0.5), (pa.uint8(), -1), (pa.int64(), "a")])
def test_a_fill_value_that_does_not_fit_is_refused(kind: Any, fill: Any) -> None:
    with pytest.raises(ValueError, match="fill_value must fit the type of column 'x'"):
        column(pa.array([1, None], kind), fill_value=fill)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([{"a": 1}]), r"column 'x' is of Arrow type struct<a: int64>; make its fields columns"),
        (pa.array([[{"a": 1}]]), r"column 'x' is of Arrow type struct"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), r"column 'x' is of Arrow type map"),
        (pa.array([1], pa.decimal128(5, 2)), r"column 'x' is of Arrow type decimal128.*cast it to float64"),
        (pa.array([None]), r"column 'x' is of Arrow type null"),
        (pa.array([[[[1]]]]), r"column 'x' has more than 2 levels of lists"),
        (pa.array([[["a"]]]), r"column 'x' has more than 2 levels of lists"),
    ],
)
def test_what_is_no_column_is_refused_by_name(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        column(array)


def test_memory_is_shared_where_the_layout_allows() -> None:
    numbers = pa.array(range(100), pa.int64())
    assert column(numbers).values.data_ptr() == numbers.buffers()[1].address
    assert column(numbers[3:]).values.data_ptr() == numbers.buffers()[1].address + 24
    lists = pa.array([[1, 2], [3], [4]])
    assert column(lists[1:]).values.data_ptr() == lists.values.buffers()[1].address + 16
    words = pa.array(["abc", "de"])
    assert column(words).values.data_ptr() == words.buffers()[2].address
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    assert column(fixed).values.data_ptr() == fixed.values.buffers()[1].address


def test_columns_outlive_the_table_they_came_from() -> None:
    table = pa.table({"x": pa.array(np.arange(100_000))})
    batch = JaggedBatch.from_arrow(table)
    del table
    junk = [np.full(100_000, -1) for _ in range(4)]
    assert torch.equal(batch["x"].values, torch.arange(100_000))
    del junk


def test_columns_are_chosen_and_ordered_by_name() -> None:
    table = pa.table({"a": [1], "b": [2], "c": [{"d": 1}]})
    assert JaggedBatch.from_arrow(table, columns=["b", "a"]).names == ("b", "a")
    with pytest.raises(ValueError, match=r"no column 'e' in the table; it has a, b, c"):
        JaggedBatch.from_arrow(table, columns=["e"])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ValueError, match="column 'a' is there more than once"):
        JaggedBatch.from_arrow(twice)


def test_record_batches_and_other_arrow_sources_are_taken() -> None:
    record_batch = pa.record_batch({"x": [[1], []]})
    assert JaggedBatch.from_arrow(record_batch)["x"].to_list() == [[1], []]

    class Stream:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return pa.table(record_batch).__arrow_c_stream__(requested_schema)

    assert JaggedBatch.from_arrow(Stream())["x"].to_list() == [[1], []]
    with pytest.raises(TypeError, match="must be a pyarrow Table or RecordBatch, got dict"):
        JaggedBatch.from_arrow({"x": [1]})


def test_a_table_of_no_columns_keeps_its_rows() -> None:
    assert JaggedBatch.from_arrow(pa.table({"a": [1, 2]}), columns=[]).batch_size == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_type_that_arrow_lacks_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"column 'x' is {dtype}, which Arrow does not have"):
        JaggedBatch({"x": Column(torch.zeros(2, dtype=dtype))}).to_arrow()


def test_text_goes_back_as_text() -> None:
    table = pa.table({"word": ["a", "", "ö"], "words": [["x"], [], ["yy", ""]]})
    back = JaggedBatch.from_arrow(table).to_arrow(text=["word", "words"])
    assert back.to_pydict() == table.to_pydict()
    with pytest.raises(ValueError, match=r"column 'x' is dense int64.*only jagged uint8 columns can be text"):
        JaggedBatch({"x": Column(torch.arange(2))}).to_arrow(text=["x"])


def test_arrow_gets_shared_memory_too() -> None:
    batch = JaggedBatch({"x": Column(torch.arange(3), (torch.tensor([1, 2]),))})
    assert batch.to_arrow().column("x").chunk(0).values.buffers()[1].address == batch["x"].values.data_ptr()


ROWS = st.integers(-100, 100)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_what_arrow_gives_arrow_gets_back(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([pa.int8(), pa.int64(), pa.float16(), pa.float64(), pa.bool_(), pa.uint16()]))
    make = data.draw(st.sampled_from([pa.list_, pa.large_list]))
    depth = data.draw(st.integers(0, 2))
    item: Any = st.booleans() if kind == pa.bool_() else st.integers(0, 100)
    if data.draw(st.booleans()):
        kind, item = pa.list_(kind, 2), st.lists(item, min_size=2, max_size=2)
    for _ in range(depth):
        kind, item = make(kind), st.lists(item, max_size=4)
    rows = data.draw(st.lists(item, max_size=8))
    array = pa.array(rows, kind) if "halffloat" not in str(kind) else _halves(rows, kind)
    start = data.draw(st.integers(0, len(rows)))
    batch = JaggedBatch.from_arrow(pa.table({"x": array.slice(start)}))
    assert batch["x"].depth == depth
    assert batch["x"].to_list() == rows[start:]
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.column("x").to_pylist() == rows[start:]
    assert JaggedBatch.from_arrow(table).equal(batch)


def _halves(rows: list[Any], kind: Any) -> Any:
    """Arrow casts lists of float to lists of half floats, but does not make them of Python numbers on every version."""
    wide = pa.type_for_alias("float")

    def widened(kind: Any) -> Any:
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(widened(kind.value_type), kind.list_size)
        if pa.types.is_large_list(kind):
            return pa.large_list(widened(kind.value_type))
        return pa.list_(widened(kind.value_type)) if pa.types.is_list(kind) else wide

    return pa.array(rows, widened(kind)).cast(kind)
