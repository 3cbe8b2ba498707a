"""JaggedBatch: rules at the door, and samples that move byte for byte."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from freescale.balancer.batches.batch import Column, JaggedBatch
from freescale.balancer.batches.column import ColumnSpec, as_bytes
from freescale.balancer.batches.select import take_ranges

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def random_values(rows: int, dtype: torch.dtype, shape: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Any bit pattern, NaN with payloads among them."""
    count = rows * torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).view(rows, *shape) if count else torch.empty((rows, *shape), dtype=dtype)


def lengths(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(sizes, dtype=dtype)


def small_batch() -> JaggedBatch:
    return JaggedBatch(
        {
            "user": Column(torch.tensor([10, 11, 12])),
            "page": Column(torch.tensor([1, 2, 3, 4]), (lengths(3, 0, 1),)),
            "content": Column(torch.tensor([5, 6, 7, 8, 9]), (lengths(1, 2, 0), lengths(2, 0, 3))),
        }
    )


def samples(batch: JaggedBatch) -> list[dict[str, list[list[list[int]]]]]:
    """By hand: every sample as the bytes of its rows, list by list, without any code of the batch."""
    out: list[dict[str, list[list[list[int]]]]] = [{} for _ in range(batch.batch_size)]
    for name in batch.names:
        column = batch[name]
        rows = [row.contiguous().reshape(-1).view(torch.uint8).tolist() if row.numel() else [] for row in column.values]
        remaining, levels = iter(rows), [level.tolist() for level in column.levels]
        inner = iter(levels[1]) if len(levels) == 2 else iter(())
        for sample in range(batch.batch_size):
            if not levels:
                out[sample][name] = [[next(remaining)]]
            elif len(levels) == 1:
                out[sample][name] = [[next(remaining) for _ in range(levels[0][sample])]]
            else:
                out[sample][name] = [[next(remaining) for _ in range(next(inner))] for _ in range(levels[0][sample])]
        assert next(remaining, None) is None
    return out


@st.composite
def batches(draw: st.DrawFn, schema: dict[str, ColumnSpec] | None = None) -> JaggedBatch:
    if schema is None:
        shapes = st.sampled_from([(), (3,), (2, 2), (0,)])
        specs = st.builds(ColumnSpec, st.sampled_from(DTYPES), shapes, st.integers(0, 2))
        schema = dict(zip("abcd", draw(st.lists(specs, min_size=1, max_size=4)), strict=False))
    batch_size = draw(st.integers(0, 6))
    columns = {}
    for name, spec in schema.items():
        rows, levels = batch_size, []
        for _ in range(spec.depth):
            sizes = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
            levels.append(torch.tensor(sizes, dtype=torch.int64))
            rows = sum(sizes)
        columns[name] = Column(random_values(rows, spec.dtype, spec.shape, draw(st.integers(0, 99))), tuple(levels))
    return JaggedBatch(columns, batch_size)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"page": Column(torch.arange(2), (lengths(3, -1),))}, r"column 'page'.*negative.*-1 at row 1"),
        ({"page": Column(torch.arange(3), (lengths(1, 1),))}, r"column 'page': lengths add up to 2.*3 rows"),
        ({"page": Column(torch.arange(3), (torch.tensor([1.0, 2.0]),))}, r"column 'page'.*integers, got torch.float32"),
        ({"page": Column(torch.arange(3), (torch.tensor([True]),))}, r"column 'page'.*integers, got torch.bool"),
        ({"page": Column(torch.arange(4), (lengths(2, 2).view(1, 2),))}, r"column 'page'.*one dimension"),
        ({"page": Column(torch.tensor(3), (lengths(1),))}, r"column 'page'.*single number"),
        (
            {"c": Column(torch.arange(3), (lengths(2), lengths(3)))},
            r"column 'c'.*level 1 must be as many as the counts above add up to, 2, got 1",
        ),
        ({"c": Column(torch.arange(1), (lengths(1),) * 3)}, r"column 'c' has 3 length levels; at most 2 are supported"),
        (
            {"a": Column(torch.arange(3)), "b": Column(torch.arange(2))},
            r"column 'b' has 2 samples where the batch has 3",
        ),
        ({"a": Column(torch.ones(3, requires_grad=True))}, r"column 'a'.*require grad"),
        ({"a": Column(torch.eye(3).to_sparse())}, r"column 'a'.*sparse"),
        (
            {"a": Column(torch.arange(2)), "b": Column(torch.empty(2, device="meta"))},
            r"column 'b' is on meta, the columns before it on cpu",
        ),
        ({"a": Column(torch.empty(2, device="meta"), (lengths(2),))}, r"column 'a'.*meta.*lengths on cpu"),
        ({}, r"batch_size must be given"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(columns: dict[str, Column], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JaggedBatch(columns)


def test_what_is_no_tensor_or_column_is_refused_by_name() -> None:
    values: Any = [1, 2]
    with pytest.raises(TypeError, match="column 'a': values must be a tensor, got list"):
        JaggedBatch({"a": Column(values)})
    with pytest.raises(TypeError, match="column 'a': lengths of level 0 must be a tensor, got list"):
        JaggedBatch({"a": Column(torch.arange(3), (values,))})
    with pytest.raises(TypeError, match=r"column 'a' must be a Column\(values, levels\), got list"):
        JaggedBatch({"a": values})


def test_a_batch_size_that_no_column_has_is_refused() -> None:
    with pytest.raises(ValueError, match="column 'a' has 3 samples where the batch has 4"):
        JaggedBatch({"a": Column(torch.arange(3))}, 4)


INTEGERS = [dtype for dtype in DTYPES if "int" in str(dtype)]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_lengths_of_any_integer_type_become_int64(dtype: torch.dtype) -> None:
    batch = JaggedBatch({"a": Column(torch.arange(3), (lengths(2, 1, dtype=dtype), lengths(0, 1, 2, dtype=dtype)))})
    assert [level.dtype for level in batch["a"].levels] == [torch.int64, torch.int64]
    assert batch["a"].to_list() == [[[], [0]], [[1, 2]]]
    assert JaggedBatch({"a": Column(x := torch.arange(0), (x.to(dtype),))}).batch_size == 0


def test_lengths_that_do_not_fit_int64_are_refused_with_their_value() -> None:
    wide = torch.tensor([1, 2**63 + 5], dtype=torch.uint64)
    with pytest.raises(ValueError, match=f"column 'a'.*must fit int64, got {2**63 + 5} at row 1"):
        JaggedBatch({"a": Column(torch.arange(3), (wide,))})


def test_all_zero_lengths_keep_their_types() -> None:
    batch = JaggedBatch({"a": Column(torch.empty(0, dtype=torch.int32), (lengths(0, 0, dtype=torch.int32),))})
    assert batch["a"].values.dtype is torch.int32
    assert batch["a"].to_list() == [[], []]
    assert batch.take([1]).schema == batch.schema


def test_values_that_are_not_contiguous_are_laid_out_by_sample() -> None:
    transposed = torch.arange(6).view(2, 3).t()
    batch = JaggedBatch({"a": Column(transposed), "b": Column(torch.tensor([1 + 2j, 3j, 1]).conj())})
    assert batch["a"].values.is_contiguous()
    assert batch.take([2])["a"].to_list() == [[2, 5]]
    assert batch.take([0])["b"].to_list() == [1 - 2j]


def test_contiguous_values_and_int64_lengths_are_shared() -> None:
    values, sizes = torch.arange(3), lengths(1, 2)
    column = JaggedBatch({"a": Column(values, (sizes,))})["a"]
    assert column.values.data_ptr() == values.data_ptr()
    assert column.levels[0].data_ptr() == sizes.data_ptr()


def test_a_column_tells_where_each_sample_lies() -> None:
    batch = small_batch()
    assert batch["page"].lengths.tolist() == [3, 0, 1]
    assert batch["page"].offsets.tolist() == [0, 3, 3, 4]
    assert batch["content"].offsets.tolist() == [0, 1, 3, 3]
    assert batch["content"].row_offsets.tolist() == [0, 2, 5, 5]
    assert batch["content"].num_rows.tolist() == [2, 3, 0]
    assert batch["user"].row_offsets.tolist() == [0, 1, 2, 3]
    assert batch["user"].num_rows.tolist() == [1, 1, 1]
    assert batch["content"].to_list() == [[[5, 6]], [[], [7, 8, 9]], []]
    with pytest.raises(ValueError, match="dense column has no lengths"):
        _ = batch["user"].offsets


def test_names_length_and_missing_columns() -> None:
    batch = small_batch()
    assert batch.names == ("user", "page", "content")
    assert len(batch) == 3
    assert "page" in batch
    assert "pages" not in batch
    with pytest.raises(KeyError, match="no column 'pages'; this batch has user, page, content"):
        batch["pages"]
    assert repr(batch) == (
        "JaggedBatch(batch_size=3, user: dense int64 [*], page: jagged int64 [*] with 4 rows, "
        "content: nested jagged int64 [*] with 5 rows)"
    )


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_take_gives_the_samples_asked_for_byte_for_byte(data: st.DataObject) -> None:
    batch = data.draw(batches())
    chosen = st.lists(st.integers(0, batch.batch_size - 1), max_size=8) if batch.batch_size else st.just([])
    indices = data.draw(chosen)
    taken, by_hand = batch.take(indices), samples(batch)
    assert taken.schema == batch.schema
    assert samples(taken) == [by_hand[i] for i in indices]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_concat_and_split_undo_each_other(data: st.DataObject) -> None:
    first = data.draw(batches())
    parts = [first, *data.draw(st.lists(batches(first.schema), max_size=3))]
    joined = JaggedBatch.concat(parts)
    assert samples(joined) == [sample for part in parts for sample in samples(part)]
    again = joined.split([len(part) for part in parts])
    assert all(a.equal(b) for a, b in zip(again, parts, strict=True))
    assert JaggedBatch.concat(again).equal(joined)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6), st.sampled_from(DTYPES))
def test_ranges_of_any_type_are_copied_bit_for_bit(ranges: list[tuple[int, int]], dtype: torch.dtype) -> None:
    starts, sizes = torch.tensor(ranges, dtype=torch.int64).view(-1, 2).unbind(1)
    by_hand = [row for start, size in ranges for row in range(start, start + size)]
    rows = random_values(15, dtype, (3,))
    copied = take_ranges(rows, starts, sizes)
    assert as_bytes(copied).tolist() == [as_bytes(rows)[row].tolist() for row in by_hand]
    if torch.cuda.is_available():
        copied = take_ranges(rows.cuda(), starts.cuda(), sizes.cuda())
        assert as_bytes(copied.cpu()).tolist() == [as_bytes(rows)[row].tolist() for row in by_hand]


def test_taken_samples_have_memory_of_their_own_and_split_ones_share() -> None:
    batch = small_batch()
    taken, split = batch.take([0, 1, 2]), batch.split([1, 2])
    for name in batch.names:
        taken[name].values.fill_(-1)
    assert batch.equal(small_batch())
    split[0]["user"].values.fill_(-1)
    assert batch["user"].to_list() == [-1, 11, 12]


@pytest.mark.parametrize("indices", [[3], [-1], torch.tensor([0, 3])])
def test_indices_out_of_range_are_refused(indices: list[int] | Tensor) -> None:
    with pytest.raises(ValueError, match=r"indices must be in \[0, 3\), got (3|-1)"):
        small_batch().take(indices)


@pytest.mark.parametrize("indices", [torch.tensor([0.0]), torch.tensor([True, False, True]), torch.tensor([[0]])])
def test_indices_that_are_not_integers_are_refused(indices: Tensor) -> None:
    with pytest.raises(ValueError, match="indices must be integers in one dimension"):
        small_batch().take(indices)


@pytest.mark.parametrize("sizes", [[1, 1], [4], [-1, 4], []])
def test_sizes_that_do_not_add_up_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes must not be negative and add up to 3"):
        small_batch().split(sizes)


def test_batches_that_differ_cannot_be_joined() -> None:
    batch = small_batch()
    with pytest.raises(ValueError, match="batches must not be empty"):
        JaggedBatch.concat([])
    with pytest.raises(ValueError, match=r"batch 1 has columns \['user'\], expected"):
        JaggedBatch.concat([batch, JaggedBatch({"user": batch["user"]})])
    other = JaggedBatch({**batch.columns, "page": Column(torch.zeros(0, dtype=torch.int32), (lengths(0, 0, 0),))})
    with pytest.raises(ValueError, match=r"batch 1: column 'page' is jagged int32.*expected jagged int64"):
        JaggedBatch.concat([batch, other])


def test_no_samples_and_several_columns_go_through_everything() -> None:
    empty = small_batch().take([])
    assert empty.batch_size == 0
    assert empty.schema == small_batch().schema
    assert JaggedBatch.concat([empty, small_batch(), empty]).equal(small_batch())
    assert [len(part) for part in empty.split([0, 0])] == [0, 0]
    assert JaggedBatch.empty(small_batch().schema).equal(empty)


def test_equal_compares_bits_and_not_numbers() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert JaggedBatch({"a": Column(nan)}).equal(JaggedBatch({"a": Column(nan.clone())}))
    assert not JaggedBatch({"a": Column(zero)}).equal(JaggedBatch({"a": Column(-zero)}))
    assert not JaggedBatch({"a": Column(zero)}).equal(JaggedBatch({"a": Column(zero.view(torch.int32))}))
    assert not JaggedBatch({"a": Column(zero)}).equal(JaggedBatch({"b": Column(zero)}))
    one, two = (Column(torch.arange(2), (lengths(*sizes),)) for sizes in ((2, 0), (1, 1)))
    assert not JaggedBatch({"a": one}).equal(JaggedBatch({"a": two}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_of_any_type_survives_pickle(dtype: torch.dtype) -> None:
    batch = JaggedBatch({"a": Column(random_values(4, dtype, (2,)), (lengths(1, 3),))})
    assert pickle.loads(pickle.dumps(batch)).equal(batch)


class _Batches(IterableDataset[JaggedBatch]):
    def __iter__(self) -> Iterator[JaggedBatch]:
        yield small_batch()
        yield small_batch().take([2, 1])


def test_dataloader_workers_hand_over_batches() -> None:
    with_workers = list(DataLoader(_Batches(), batch_size=None, num_workers=1))
    assert [batch.batch_size for batch in with_workers] == [3, 2]
    assert with_workers[0].equal(small_batch())


def test_moving_to_the_device_it_is_on_shares_memory() -> None:
    batch = small_batch()
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert moved.equal(batch)
    assert moved["page"].values.data_ptr() == batch["page"].values.data_ptr()
    assert batch.to("meta")["content"].levels[1].device.type == "meta"
    assert batch.to("meta").batch_size == 3


def test_torchrec_takes_a_batch_for_pipelineable() -> None:
    streamable = pytest.importorskip("torchrec.streamable")
    batch = small_batch()
    assert isinstance(batch, streamable.Pipelineable)
    assert isinstance(pickle.loads(pickle.dumps(batch)), streamable.Pipelineable)
    on_host: Any = None  # the host has no streams, and nothing to record
    batch.record_stream(on_host)


def test_importing_the_balancer_does_not_import_torchrec() -> None:
    code = "import sys, freescale.balancer; sys.exit('torchrec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0


class _Operators(TorchDispatchMode):
    """Remembers the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_on_a_device_are_taken_and_joined_there(dtype: torch.dtype) -> None:
    batch = JaggedBatch(
        {
            **small_batch().columns,
            "ids": Column(random_values(700, dtype), (lengths(0, 699, 1),)),
            "nested": Column(random_values(9, dtype, (3,)), (lengths(2, 0, 3), lengths(4, 0, 1, 1, 3))),
        }
    )
    there = batch.pin_memory().to("cuda", non_blocking=True)
    there.record_stream(torch.cuda.current_stream())
    assert there.device.type == "cuda"
    assert there.take([2, 0, 0, 1]).to("cpu").equal(batch.take([2, 0, 0, 1]))
    assert there.take([]).to("cpu").equal(batch.take([]))
    assert JaggedBatch.concat(there.split([1, 2])).to("cpu").equal(batch)
    assert JaggedBatch.concat([there.take([1]), there]).to("cpu").equal(batch.take([1, 0, 1, 2]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_device_are_taken_by_the_jagged_operators() -> None:
    batch, indices = small_batch().to("cuda"), torch.tensor([2, 0], device="cuda")
    with _Operators() as seen:
        batch.take(indices)
    assert "freescale.dispatch_ranges.plain" in seen.names
