"""Adapters of jagged fields, declared or by themselves, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from freescale.balancer.adapters.adapt import adapter_for
from freescale.balancer.batches.batch import Column, JaggedBatch

from adapted_batches import ORDER, assert_same, moved, reordered, x


def test_flattening_shares_memory_and_restored_batches_have_their_own() -> None:
    batch: dict[str, Any] = {"a": x(), "b": np.arange(3)}
    adapter = adapter_for(batch)
    flat = adapter.flatten(batch)
    assert flat["a"].values.data_ptr() == batch["a"].data_ptr()
    out = adapter.restore(flat.take([0, 1, 2]))
    out["a"].fill_(-1)
    out["b"].fill(-1)
    assert_same(batch, {"a": x(), "b": np.arange(3)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint16, torch.uint64], ids=str)
def test_declared_jagged_fields_move_with_their_lengths(dtype: torch.dtype) -> None:
    batch = {
        "page_len": torch.tensor([2, 0, 1], dtype=dtype),
        "page": torch.tensor([1, 2, 3]),
        "time": np.array([4, 5, 6]),
    }
    jagged = {"page": "page_len", "time": "page_len"}
    expected = {
        "page_len": torch.tensor([1, 2, 2, 0], dtype=dtype),
        "page": torch.tensor([3, 1, 2, 1, 2]),
        "time": np.array([6, 4, 5, 4, 5]),
    }
    assert_same(reordered(batch, jagged), expected)
    assert adapter_for(batch, jagged).flatten(batch).names == ("page", "time")


def test_a_length_that_the_first_integer_type_cannot_hold_is_refused() -> None:
    jagged = {"v": "n"}
    adapter = adapter_for({"v": x(), "n": torch.tensor([1, 2], dtype=torch.uint8)}, jagged)
    fits = adapter.flatten({"v": torch.zeros(255, dtype=torch.int64), "n": torch.tensor([255])})
    assert_same(adapter.restore(fits)["n"], torch.tensor([255], dtype=torch.uint8))
    wide = adapter.flatten({"v": torch.zeros(300, dtype=torch.int64), "n": torch.tensor([300])})
    with pytest.raises(
        ValueError, match=r"field 'n' holds the length 300, in the first batch lengths were torch\.uint8"
    ):
        adapter.restore(wide)


def test_declared_nested_fields_move_with_both_lengths() -> None:
    batch = {
        "f": {
            "content": torch.tensor([[1], [2], [3], [4]]),
            "counts": np.array([1, 0, 2], dtype=np.int16),
            "lengths": torch.tensor([2, 0, 2], dtype=torch.int32),
            "label": torch.tensor([7, 8, 9]),
        }
    }
    jagged = {"f.content": ("f.counts", "f.lengths"), "f.label": "f.counts"}
    expected = {
        "f": {
            "content": torch.tensor([[3], [4], [1], [2], [1], [2]]),
            "counts": np.array([2, 1, 1, 0], dtype=np.int16),
            "lengths": torch.tensor([0, 2, 2, 2], dtype=torch.int32),
            "label": torch.tensor([8, 9, 7, 7]),
        }
    }
    assert_same(reordered(batch, jagged), expected)


@pytest.mark.parametrize(
    ("jagged", "message"),
    [
        ({"pages": "page_len"}, "jagged= names 'pages'; the batch has page, page_len"),
        ({"page": "len"}, "jagged= names 'len'; the batch has page, page_len"),
        ({"page": "page"}, "jagged= uses 'page' in two roles"),
    ],
)
def test_declarations_that_do_not_fit_the_batch_are_refused(jagged: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_for({"page": x(), "page_len": torch.tensor([3])}, jagged)


L = torch.tensor([4, 0, 5])


@pytest.mark.parametrize("pages", [torch.arange(9), torch.ones(9), torch.arange(9) - 4, np.full(9, 2**60)])
@pytest.mark.parametrize("others", [{}, {"label": torch.ones(3)}])
def test_values_and_lengths_the_other_way_round_are_told_and_no_other_field_is_blamed(pages: Any, others: Any) -> None:
    with pytest.raises(ValueError, match=r"other way round: .* 'pl' add up to the 9 rows .*; say .*{'page': 'pl'}"):
        adapter_for({"page": pages, "pl": L, **others}, {"pl": "page"})


def test_a_batch_without_samples_has_nothing_the_other_way_round() -> None:
    empty = {"ids": torch.tensor([], dtype=torch.int64), "n": torch.tensor([])}  # float32, as torch has it
    with pytest.raises(ValueError, match="'ids': lengths of level 0 must be integers"):
        adapter_for(empty, jagged={"ids": "n"})


def test_lengths_that_could_be_values_of_their_values_are_taken_as_declared() -> None:
    batch = {"page": torch.tensor([1, 0, 2]), "pl": torch.tensor([0, 3, 0])}  # each adds up to the rows of the other
    assert_same(adapter_for(batch, {"page": "pl"}).flatten(batch)["page"].lengths, batch["pl"])
    assert_same(adapter_for(batch, {"pl": "page"}).flatten(batch)["pl"].lengths, batch["page"])


FORGOTTEN: list[tuple[dict[str, Any], str]] = [
    ({"page": torch.arange(9), "pl": L}, "field 'page' has 9 rows.*'pl' has 3 samples.*'pl' add.*={'page': 'pl'};"),
    ({"pl": L, "page": torch.arange(9)}, "field 'page' has 9 rows.*'pl' has 3 samples.*'pl' add.*={'page': 'pl'};"),
    (
        {"page": torch.arange(9), "time": np.ones(9), "pl": L.short()},
        "field 'page' has 9 rows.*'pl' has 3 samples.*={'page': 'pl', 'time': 'pl'};",
    ),
    (
        {"w": torch.arange(5), "counts": torch.tensor([1, 1, 2]), "l": torch.tensor([0, 1, 3, 1])},
        r"field 'w' has 5 rows.*'counts' has 3 samples.*={'w': \('counts', 'l'\), 'l': 'counts'}",
    ),
    ({"odd": torch.ones(9), "a": x(), "b": x()}, "field 'odd' has 9 rows.*'a' has 3 samples.*={'odd': '<path>'};"),
    ({"a": x(), "odd": torch.ones(2), "b": x()}, "field 'odd' has 2 rows.*'a' has 3 samples.*={'odd': '<path>'};"),
    ({"odd": torch.ones(9), "a": torch.ones(2)}, "field 'odd' has 9 rows.*'a' has 2 samples"),
]


@pytest.mark.parametrize(("batch", "message"), FORGOTTEN, ids=lambda v: str(v)[:40])
def test_a_forgotten_declaration_blames_the_field_that_is_unlike_the_others(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_for(batch)


def test_declared_lengths_that_do_not_fit_are_refused_at_every_batch() -> None:
    batch = {"page": x(), "page_len": torch.tensor([1, 2])}
    adapter = adapter_for(batch, {"page": "page_len"})
    with pytest.raises(ValueError, match="column 'page': lengths add up to 4, but there are 3 rows"):
        adapter.flatten({"page": x(), "page_len": torch.tensor([1, 3])})
    with pytest.raises(ValueError, match=r"column 'page'.*negative.*-1 at row 0"):
        adapter.flatten({"page": x(), "page_len": torch.tensor([-1, 4])})


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"a": x(), "n": 3}, TypeError, r"field 'n' is of type int; a number cannot be split.*\[batch_size\]"),
    ({"a": x(), "n": np.float32(3)}, TypeError, r"field 'n' is of type float32; a number"),
    ({"a": x(), "s": "text"}, TypeError, r"field 's' is of type str; text cannot be split"),
    ({"a": x(), "s": ["u", "v", "w"]}, TypeError, r"field 's\.0' is of type str"),
    ({"a": x(), "s": [object()]}, TypeError, r"field 's\.0' is of type object; its samples cannot be told apart"),
    ({"a": x(), "s": {1, 2, 3}}, TypeError, r"field 's' is of type set"),
    ({"a": x(), "t": torch.tensor(3)}, ValueError, r"field 't' is a single number"),
    ({"a": x(), "t": np.array(3)}, ValueError, r"field 't' is a single number"),
    ({"a": x(), "t": torch.arange(4)}, ValueError, r"field 't' has 4 rows.*field 'a' has 3 samples.*jagged=\{'t'"),
    ({"a": x(), "t": torch.eye(3).to_sparse()}, ValueError, r"field 't' has layout torch.sparse_coo"),
    ({"a": torch.ones(3, requires_grad=True)}, ValueError, r"field 'a' requires grad.*detach"),
    ({"a": torch.nn.Parameter(torch.ones(3))}, TypeError, r"field 'a' is of type Parameter; only plain tensors"),
    ({"a": np.array(["u", "v"])}, TypeError, r"field 'a' is an array of <U1"),
    ({"a": np.array([1, "v"], dtype=object)}, TypeError, r"field 'a' is an array of object"),
    ({"a": np.arange(3).astype(np.longdouble)}, TypeError, r"field 'a' is an array of float128"),
    ({"a": np.ma.masked_array([1, 2])}, TypeError, r"field 'a' is of type MaskedArray"),
    ({"a": np.arange(3).astype(">i8")}, TypeError, r"field 'a' is an array of >i8"),
    ({"a": pa.table({"b": [1]})}, TypeError, r"field 'a' is of type Table; turn it into columns first"),
    (torch.tensor(3), ValueError, r"the batch is a single number"),
    ("text", TypeError, r"the batch is of type str"),
    ({}, ValueError, r"the batch holds no tensor"),
    ({"a": None}, ValueError, r"the batch holds no tensor"),
]


@pytest.mark.parametrize(("batch", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_split_by_sample_is_refused_by_name(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        adapter_for(batch)


FIRST = {"f": {"a": x(), "b": torch.zeros(3, 5)}, "n": None, "l": [x()], "np": np.arange(3)}
LATER: list[tuple[dict[str, Any], str]] = [
    ({"f": {"a": x()}}, r"field 'f' has the fields \['a'\], in the first batch it had \['a', 'b'\]"),
    ({"f": {"a": x(), "c": x()}}, r"field 'f' has the fields \['a', 'c'\], in the first batch it had \['a', 'b'\]"),
    ({"f": [x(), x()]}, r"field 'f' is of type list, in the first batch it was dict"),
    ({"n": x()}, r"field 'n' is of type Tensor, in the first batch it was NoneType"),
    ({"l": [x(), x()]}, r"field 'l' has the fields \[0, 1\], in the first batch it had \[0\]"),
    ({"l": [np.arange(3)]}, r"field 'l\.0' is of type ndarray, in the first batch it was Tensor"),
    ({"np": x()}, r"field 'np' is of type Tensor, in the first batch it was ndarray"),
    ({"l": [x().int()]}, r"field 'l\.0' is dense int32 \[\*\], in the first batch it was dense int64 \[\*\]$"),
    ({"f": {"a": x(), "b": torch.zeros(3, 7)}}, r"field 'f\.b' is dense float32 \[\*, 7\].*\[\*, 5\].*pad all batches"),
    ({"f": {"a": x(), "b": torch.zeros(3)}}, r"field 'f\.b' is dense float32 \[\*\],.*\[\*, 5\]"),
    ({"f": {"a": x().float().requires_grad_(), "b": torch.zeros(3, 5)}}, r"field 'f\.a' requires grad"),
    ({"l": [torch.arange(2)]}, r"field 'l\.0' has 2 rows on dimension 0, field 'f\.a' has 3 samples"),
]


@pytest.mark.parametrize(("change", "message"), LATER, ids=[message for _, message in LATER])
def test_a_later_batch_that_differs_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    adapter = adapter_for(FIRST)
    with pytest.raises(ValueError, match=message):
        adapter.flatten(FIRST | change)


def test_a_last_batch_of_another_size_is_taken() -> None:
    padded = {"tokens": torch.zeros(128, 20), "label": torch.zeros(128)}
    adapter = adapter_for(padded)
    last = {"tokens": torch.ones(11, 20), "label": torch.ones(11)}
    assert adapter.flatten(last).batch_size == 11
    assert_same(adapter.restore(adapter.flatten(last)), last)
    none = {"tokens": torch.ones(0, 20), "label": torch.ones(0)}
    assert_same(adapter.restore(adapter.flatten(none)), none)


def test_keys_in_another_order_come_out_in_the_first_order() -> None:
    adapter = adapter_for({"a": x(), "b": x() + 1})
    assert_same(adapter.restore(adapter.flatten({"b": x() + 1, "a": x()})), {"a": x(), "b": x() + 1})


def test_lists_that_are_all_empty_take_the_type_of_the_first_batch() -> None:
    first = {"page": torch.arange(6, dtype=torch.int32).view(3, 2), "n": torch.tensor([1, 2], dtype=torch.int32)}
    adapter = adapter_for(first, {"page": "n"})
    empty = {"page": torch.tensor([]), "n": torch.tensor([0, 0])}
    out = adapter.restore(adapter.flatten(empty))
    assert_same(out, {"page": torch.zeros(0, 2, dtype=torch.int32), "n": torch.zeros(2, dtype=torch.int32)})


def test_jagged_batches_come_back_alone_or_as_a_field() -> None:
    jagged = JaggedBatch({"u": Column(x()), "page": Column(torch.arange(4), (torch.tensor([3, 0, 1]),))})
    assert_same(reordered(jagged), jagged.take(ORDER))
    adapter = adapter_for({"f": jagged, "y": x()})
    assert adapter.flatten({"f": jagged, "y": x()}).names == ("f.u", "f.page", "y")
    assert_same(reordered({"f": jagged, "y": x()}), {"f": jagged.take(ORDER), "y": moved(x())})
    with pytest.raises(ValueError, match=r"field 'f' has columns \['u'\], in the first batch \['u', 'page'\]"):
        adapter.flatten({"f": JaggedBatch({"u": Column(x())}), "y": x()})
    with pytest.raises(ValueError, match=r"field 'y' has 2 rows.*field 'f' has 3 samples"):
        adapter.flatten({"f": jagged, "y": torch.arange(2)})


def test_nested_tensors_come_back() -> None:
    parts = [torch.arange(2.0), torch.arange(0.0), torch.arange(3.0)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out = reordered({"a": nested, "b": nested})
    assert_same([row.clone() for row in out["a"].unbind()], [parts[i] for i in ORDER])
    narrow = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 2, 2, 3], dtype=torch.int32))
    assert reordered(narrow).offsets().dtype is torch.int32
    strided = torch.nested.as_nested_tensor(parts, layout=torch.jagged).requires_grad_()
    with pytest.raises(ValueError, match="the batch requires grad"):
        adapter_for(strided)
    with pytest.raises(ValueError, match=r"field 'a' is of type Tensor|must be a nested tensor"):
        adapter_for({"a": nested}).flatten({"a": x()})
