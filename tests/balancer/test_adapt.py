"""Adapters: the user's own batch type goes in and comes out, or is refused by name."""

from __future__ import annotations

import gc
import re
import weakref
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from freescale.balancer import SchemaMismatch, balance
from freescale.balancer.adapters.adapt import adapter_for, adapter_from
from freescale.balancer.batches.batch import Column, JaggedBatch
from freescale.balancer.protocol.schema import Schema, describe_difference
from freescale.transport import Transport

from rank_threads import run_in_threads

ORDER = [2, 0, 0, 1]


def reordered(batch: Any, jagged: Any = None, order: list[int] = ORDER) -> Any:
    """The batch after its samples moved, through the adapter that a description makes where there is one."""
    adapter = adapter_for(batch, jagged=jagged)
    described = adapter.describe()
    out = adapter.restore(adapter.flatten(batch).take(order))
    if described is not None:
        there = adapter_from(described)
        assert there.schema == adapter.schema
        assert there.describe() == described
        assert_same(there.restore(there.flatten(batch).take(order)), out)
        assert there.flatten(there.restore(there.empty())).equal(adapter.empty())
    return out


def assert_same(a: Any, b: Any) -> None:
    """Types, dtypes, memory formats and values, for the types that these tests use."""
    assert type(a) is type(b)
    if isinstance(a, Tensor) and a.is_nested:
        assert_same([*a.unbind()], [*b.unbind()])
        assert a.offsets().dtype is b.offsets().dtype  # type: ignore[attr-defined]  # of nested tensors
    elif isinstance(a, Tensor):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()  # NaT is unlike itself
    elif isinstance(a, (dict, UserDict)):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif hasattr(a, "lengths") and hasattr(a, "weights_or_none"):
        parts = ("values", "lengths", "weights_or_none")
        assert_same([getattr(a, part)() for part in parts], [getattr(b, part)() for part in parts])
    else:
        assert a is b is None or a.equal(b)


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class NamedPoint(Point):
    """A class of its own over a NamedTuple."""


@dataclass
class Plain:
    dense: Tensor
    inner: dict[str, Tensor]


@dataclass(frozen=True)
class Frozen:
    dense: Tensor
    nothing: None = None


@dataclass(frozen=True, slots=True)
class Slotted:
    dense: Tensor
    late: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "late", self.dense * 10)


@dataclass
class Derived:
    dense: Tensor

    def __post_init__(self) -> None:
        self.total = int(self.dense.sum())


class Extended(dict[str, Any]):
    """As batch classes of tokenizers and data loaders are: a dict with something more."""

    note: str = ""


class Wrapped(UserDict[str, Any]):
    pass


def x() -> Tensor:
    return torch.arange(3)


def moved(tensor: Tensor) -> Tensor:
    return tensor[ORDER]


CONTAINERS: list[tuple[Any, Any]] = [
    ({"a": x()}, {"a": moved(x())}),
    (
        {"f": {"b": x(), "a": [x(), (x(),)]}, "n": None},
        {"f": {"b": moved(x()), "a": [moved(x()), (moved(x()),)]}, "n": None},
    ),
    (OrderedDict(b=x(), a=x()), OrderedDict(b=moved(x()), a=moved(x()))),
    ([x(), x()], [moved(x()), moved(x())]),
    ((x(), None), (moved(x()), None)),
    ({0: x(), 1: x()}, {0: moved(x()), 1: moved(x())}),
    (x(), moved(x())),
    (Wrapped(a=x()), Wrapped(a=moved(x()))),
]


@pytest.mark.parametrize(("batch", "expected"), CONTAINERS, ids=lambda v: type(v).__name__)
def test_containers_keep_type_order_and_contents(batch: Any, expected: Any) -> None:
    assert_same(reordered(batch), expected)


def test_named_tuples_and_their_subclasses_keep_their_type() -> None:
    for kind in (Point, NamedPoint):
        out = reordered(kind(x(), x() + 1))
        assert type(out) is kind
        assert_same([out.x, out.y], [moved(x()), moved(x() + 1)])


def test_dataclasses_keep_their_type() -> None:
    plain = reordered(Plain(x(), {"a": x()}))
    assert type(plain) is Plain
    assert_same([plain.dense, plain.inner], [moved(x()), {"a": moved(x())}])
    frozen = reordered(Frozen(x()))
    assert type(frozen) is Frozen
    assert_same([frozen.dense, frozen.nothing], [moved(x()), None])


def test_dataclass_fields_without_init_are_balanced_and_what_is_derived_is_derived_anew() -> None:
    slotted = reordered(Slotted(x()))
    assert type(slotted) is Slotted
    assert_same([slotted.dense, slotted.late], [moved(x()), moved(x() * 10)])
    assert reordered(Derived(x())).total == int(moved(x()).sum())


def test_classes_derived_from_dict_keep_their_attributes_but_not_the_first_batch() -> None:
    first = Extended(a=x())
    first.note = "kept"
    adapter = adapter_for(first)
    out = adapter.restore(adapter.flatten(first).take(ORDER))
    assert type(out) is Extended
    assert out.note == "kept"
    assert_same(dict(out), {"a": moved(x())})
    assert_same(dict(first), {"a": x()})
    kept_alive = weakref.ref(first["a"])
    del first
    gc.collect()
    assert kept_alive() is None
    grouped: defaultdict[str, Any] = defaultdict(list, a=x())
    again = reordered(grouped)
    assert type(again) is defaultdict
    assert again["unheard of"] == []


@dataclass
class Counted:
    dense: Tensor
    times: Tensor = field(init=False)
    scale: InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        self.dense = self.dense + scale
        self.times = self.dense * 0 + scale


def test_a_dataclass_is_made_by_its_constructor_and_then_given_the_fields_that_are_not_its_arguments() -> None:
    first = Counted(x(), scale=5)
    out = reordered(first)
    assert_same([out.dense, out.times], [moved(x() + 5) + 1, moved(x() * 0 + 5)])


@dataclass
class Demanding:
    dense: Tensor
    scale: InitVar[int]


@dataclass(init=False)
class Renaming:
    dense: Tensor

    def __init__(self, values: Tensor) -> None:
        self.dense = values


@pytest.mark.parametrize("batch", [Demanding(x(), 1), Renaming(x())], ids=lambda v: type(v).__name__)
def test_a_dataclass_that_its_fields_cannot_make_is_refused_at_the_first_batch(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"field 'f' is of dataclass .*constructor asks for something else"):
        adapter_for({"f": batch})


class Attributes(OrderedDict[str, Any]):
    """Items that are attributes, through one dict for both."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Mirrored(dict[str, Any]):
    """Items that are attributes, kept twice."""

    def __init__(self, **items: Any) -> None:
        for name, item in items.items():
            self[name] = item

    def __setitem__(self, name: str, item: Any) -> None:
        super().__setitem__(name, item)
        super().__setattr__(name, item)

    __setattr__ = __setitem__


class Twice(dict[str, Any]):
    """Attributes that are set once, at the start, for items of the same name."""

    __slots__ = ("a",)

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.a = items["a"]


@pytest.mark.parametrize("kind", [Attributes, Mirrored, Twice])
def test_attributes_that_are_items_follow_the_items(kind: type[Any]) -> None:
    first = kind(a=x(), b=x() + 1)
    adapter = adapter_for(first)
    kept_alive = weakref.ref(first["a"])
    del first
    gc.collect()
    assert kept_alive() is None
    for start in (0, 10):
        later = kind(a=x() + start, b=x() + start + 1)
        out = adapter.restore(adapter.flatten(later).take(ORDER))
        assert type(out) is kind
        assert_same(dict(out), {"a": moved(x() + start), "b": moved(x() + start + 1)})
        assert out.a is out["a"]
        assert_same(dict(later), {"a": x() + start, "b": x() + start + 1})
    if kind is not Twice:
        out["a"] = None
        assert out.a is None


ATTRIBUTES: list[Any] = [x(), np.arange(3), [{"deep": x()}], Plain(x(), {}), JaggedBatch({"u": Column(x())})]


@pytest.mark.parametrize("attribute", ATTRIBUTES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("kind", [Extended, Wrapped])
def test_attributes_with_samples_beside_the_items_are_refused_at_every_batch(kind: type[Any], attribute: Any) -> None:
    plain, more = kind(a=x()), kind(a=x())
    more.cache = attribute
    with pytest.raises(ValueError, match="field 'f' has the attribute 'cache' beside its items"):
        adapter_for({"f": more})
    with pytest.raises(ValueError, match="the batch has the attribute 'cache' beside its items"):
        adapter_for(plain).flatten(more)


def test_an_attribute_that_changes_from_batch_to_batch_is_refused() -> None:
    first, same, other = Extended(a=x()), Extended(a=x()), Extended(a=x())
    first.note, same.note, other.note = "of all", "of all", "of this batch"
    adapter = adapter_for(first)
    assert adapter.restore(adapter.flatten(same)).note == "of all"
    with pytest.raises(ValueError, match="attribute 'note' of 'of this batch', in the first batch it was 'of all'"):
        adapter.flatten(other)


def test_columns_are_named_by_their_path() -> None:
    batch = {"features": {"page": x()}, "rest": [x(), Point(x(), x())], 7: x()}
    assert adapter_for(batch).flatten(batch).names == ("features.page", "rest.0", "rest.1.x", "rest.1.y", "7")
    assert adapter_for(x()).flatten(x()).names == ("values",)


@pytest.mark.parametrize("batch", [{"a.b": x(), "a": {"b": x()}}, {"1": x(), 1: x()}], ids=str)
def test_two_fields_of_one_path_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="two fields of the batch are called"):
        adapter_for(batch)


N = torch.tensor([1, 2])
AMBIGUOUS: list[tuple[dict[Any, Any], dict[str, str]]] = [
    ({"v": x(), "a.b": N, "a": {"b": N.flip(0)}}, {"v": "a.b"}),
    ({"v": x(), 1: N, "1": N.flip(0)}, {"v": "1"}),
    ({"v.w": x(), "v": {"w": x()}, "n": N}, {"v.w": "n"}),
    ({"v": x(), "a": JaggedBatch({"b": Column(N)}), "a.b": N}, {"v": "a.b"}),
]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("batch", "jagged"), AMBIGUOUS, ids=lambda v: str(list(v)))
def test_two_fields_of_one_declared_path_are_refused(batch: dict[Any, Any], jagged: dict[str, str], order: int) -> None:
    with pytest.raises(ValueError, match="two fields of the batch are called"):
        adapter_for(dict([*batch.items()][::order]), jagged)


NUMPY = ["bool", "int8", "uint16", "uint64", "float16", "float64", "complex64", "datetime64[s]", "timedelta64[ns]"]


@pytest.mark.parametrize("dtype", NUMPY)
def test_arrays_come_back_as_arrays(dtype: str) -> None:
    array = np.arange(6).reshape(3, 2).astype(dtype)
    out = reordered({"a": array})["a"]
    assert_same(out, array[ORDER])


TIMES = ["datetime64[s]", "datetime64[ms]", "datetime64[25s]", "timedelta64[s]", "timedelta64[D]", "int64"]


@pytest.mark.parametrize("later", TIMES)
@pytest.mark.parametrize("first", TIMES)
@pytest.mark.parametrize("jagged", [{}, {"t": "n"}], ids=["dense", "jagged"])
def test_another_unit_of_time_is_refused_at_a_later_batch_and_on_another_rank(
    first: str, later: str, jagged: dict[str, str]
) -> None:
    def batch(dtype: str) -> dict[str, Any]:
        return {"t": np.arange(3).astype(dtype), "n": np.array([1, 0, 2])}

    adapter, peer = adapter_for(batch(first), jagged), adapter_for(batch(later), jagged)
    ours = Schema.of(adapter.flatten(batch(first)), adapter.describe())
    theirs = Schema.of(peer.flatten(batch(later)), peer.describe())
    assert (ours.digest == theirs.digest) == (first == later)
    if first == later:
        assert_same(adapter.restore(adapter.flatten(batch(later))), batch(later))
        return
    with pytest.raises(
        ValueError, match=re.escape(f"'t' is an array of {later}, in the first batch it was of {first}")
    ):
        adapter.flatten(batch(later))
    assert re.search(r"column 't: (date|time).*missing", describe_difference(0, ours, 1, theirs))
    none = {"t": np.array([], dtype=later), "n": np.array([], dtype=np.int64)}
    assert adapter.restore(adapter.flatten(none))["t"].dtype == np.dtype(first)


def test_ranks_with_two_units_of_time_say_so() -> None:
    def run(transport: Transport) -> list[Any]:
        unit = ["datetime64[s]", "datetime64[ms]"][transport.rank]
        return list(balance([{"t": np.arange(3).astype(unit), "n": x()}], transport, lengths="n"))

    with pytest.raises(SchemaMismatch, match=r"column 't: datetime64\[m?s\]' is"):
        run_in_threads(2, run, timeout_s=5)


def test_dates_go_to_ranks_and_to_one_that_never_had_a_batch() -> None:
    dates = np.array(["2020-01-01", "2021-02-03", "NaT", "1969-07-20"], dtype="datetime64[s]")

    def run(transport: Transport) -> list[Any]:
        mine = [] if transport.rank else [{"t": dates, "v": dates[:3], "n": torch.tensor([1, 0, 2, 0])}]
        loader = balance(mine, transport, "v", lambda world: torch.tensor([1, 0, 1, 0]), jagged={"v": "n"})
        return [[batch["t"], batch["v"]] for batch in loader]

    there, here = run_in_threads(2, run)
    assert_same([there, here], [[[dates[[1, 3]], dates[:0]]], [[dates[[0, 2]], dates[:3]]]])


@pytest.mark.parametrize("dtype", ["U1", "object", ">i8", "longdouble"])
def test_an_array_of_a_later_batch_that_is_no_plain_numbers_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(TypeError, match="field 'a' is an array of"):
        adapter_for({"a": np.arange(3)}).flatten({"a": np.arange(3).astype(dtype)})


def test_arrays_that_are_read_only_or_strided_are_taken() -> None:
    array = np.arange(6).reshape(2, 3).T
    array.flags.writeable = False
    assert_same(reordered(array), np.ascontiguousarray(array[ORDER]))


def images(batch_size: int, memory_format: torch.memory_format) -> Tensor:
    """Square, so that axes could be mistaken for each other."""
    return torch.arange(batch_size * 64).view(batch_size, 4, 4, 4).contiguous(memory_format=memory_format)


def test_memory_formats_are_kept() -> None:
    image = images(3, torch.channels_last)
    video = torch.arange(3 * 2 * 2 * 4 * 5).view(3, 2, 2, 4, 5).to(memory_format=torch.channels_last_3d)
    adapter = adapter_for([image, video])
    assert [adapter.schema[name].shape for name in "01"] == [(4, 4, 4), (2, 2, 4, 5)]
    out = reordered([image, video])
    assert_same(out, [moved(image), moved(video)])
    for back in (out, adapter.restore(adapter.flatten([image.contiguous(), video.contiguous()]))):
        assert back[0].is_contiguous(memory_format=torch.channels_last)
        assert back[1].is_contiguous(memory_format=torch.channels_last_3d)
    assert_same(adapter.restore(adapter.flatten([image.contiguous(), video.contiguous()])), [image, video])
    plain = adapter_for(image.contiguous())
    assert plain.restore(plain.flatten(image)).is_contiguous()


def test_the_memory_format_is_that_of_the_first_batch_with_samples() -> None:
    adapter = adapter_for({"image": images(0, torch.channels_last)})
    later = {"image": images(2, torch.channels_last)}
    out = adapter.restore(adapter.flatten(later))
    assert_same(out, later)
    assert out["image"].is_contiguous(memory_format=torch.channels_last)
    assert adapter.restore(adapter.flatten({"image": later["image"].contiguous()}))["image"].stride()[1] == 1


def test_a_later_shape_is_compared_as_it_is_whatever_the_memory_format() -> None:
    adapter = adapter_for({"image": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)})
    with pytest.raises(ValueError, match=r"field 'image' is dense float32 \[\*, 4, 5, 3\],.*was .*\[\*, 3, 4, 5\]"):
        adapter.flatten({"image": torch.zeros(2, 4, 5, 3)})


@pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")
def test_ranks_may_have_images_in_different_memory_formats() -> None:
    formats = [torch.channels_last, torch.contiguous_format]

    def run(transport: Transport) -> list[Any]:
        sizes = (0, 3) if transport.rank else (3, 3)
        mine = [{"image": images(n, formats[transport.rank]), "n": torch.arange(n)} for n in sizes]
        loader = balance(mine, transport, "n", lambda world: (world.rank + 1) % 2)
        return [batch["image"] for batch in loader if len(batch["image"])]

    for rank, received in enumerate(run_in_threads(2, run)):
        for image in received:
            assert_same(image, images(3, torch.contiguous_format))
            assert image.is_contiguous(memory_format=formats[rank])


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


class TestTorchrec:
    """TorchRec's own types."""

    @pytest.fixture(autouse=True)
    def _torchrec(self) -> None:
        self.rec = pytest.importorskip("torchrec")

    def keyed(self, dtype: torch.dtype = torch.int32, **changes: Any) -> Any:
        parts: dict[str, Any] = {
            "keys": ["page", "time"],
            "values": torch.arange(6),
            "lengths": torch.tensor([1, 0, 2, 0, 3, 0], dtype=dtype),
            "weights": torch.arange(6).half(),
        }
        return self.rec.KeyedJaggedTensor(**parts | changes)

    def moved_by_hand(self, dtype: torch.dtype, weighted: bool) -> Any:
        values = [1, 2, 0, 0, 3, 4, 5]
        return self.rec.KeyedJaggedTensor(
            keys=["page", "time"],
            values=torch.tensor(values),
            lengths=torch.tensor([2, 1, 1, 0, 0, 0, 0, 3], dtype=dtype),
            weights=torch.tensor(values).half() if weighted else None,
        )

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("weighted", [True, False])
    def test_a_keyed_tensor_comes_back(self, dtype: torch.dtype, weighted: bool) -> None:
        keyed = self.keyed(dtype) if weighted else self.keyed(dtype, weights=None)
        assert_same(reordered(keyed), self.moved_by_hand(dtype, weighted))
        out = reordered({"k": keyed, "y": x()})
        assert_same(out["k"], self.moved_by_hand(dtype, weighted))
        assert out["k"].keys() == ["page", "time"]
        names = adapter_for(keyed).flatten(keyed).names
        assert names == ("page", "time", "page.weights", "time.weights")[: 4 if weighted else 2]

    def test_what_a_keyed_tensor_has_cached_stays_behind(self) -> None:
        keyed = self.keyed()
        keyed.sync()
        keyed.to_dict()
        keyed.offsets()
        out = reordered(keyed)
        assert out.length_per_key() == [4, 3]
        assert out.offset_per_key() == [0, 4, 7]
        assert out.offsets().tolist() == [0, 2, 3, 4, 4, 4, 4, 4, 7]
        assert out["time"].values().tolist() == [3, 4, 5]
        assert keyed["time"].values().tolist() == [3, 4, 5]

    def test_a_keyed_tensor_given_by_offsets_or_with_wide_values_comes_back(self) -> None:
        offsets = torch.tensor([0, 1, 1, 3, 3, 6, 6])
        by_offsets = self.rec.KeyedJaggedTensor(keys=["page", "time"], values=torch.arange(6), offsets=offsets)
        assert_same(reordered(by_offsets), self.moved_by_hand(torch.int64, weighted=False))
        wide = self.keyed(values=torch.arange(12).view(6, 2), weights=None)
        assert reordered(wide)["time"].values().tolist() == [[6, 7], [8, 9], [10, 11]]

    def test_a_keyed_tensor_of_no_samples_comes_back(self) -> None:
        out = reordered(self.keyed(), order=[])
        assert out.stride() == 0
        assert sorted(out.to_dict()) == ["page", "time"]
        adapter = adapter_for(self.keyed())
        assert adapter.flatten(out).equal(adapter.empty())

    def test_a_keyed_tensor_whose_lists_are_all_empty_takes_the_first_types(self) -> None:
        adapter = adapter_for(self.keyed(weights=None))
        empty = self.keyed(values=torch.tensor([]), lengths=torch.zeros(4, dtype=torch.int64), weights=None)
        out = adapter.restore(adapter.flatten(empty))
        assert out.values().dtype is torch.int64
        assert out.lengths().dtype is torch.int32

    def test_what_a_keyed_tensor_may_not_be_is_refused(self) -> None:
        varying: dict[str, Any] = {"lengths": torch.tensor([1, 2, 3]), "stride_per_key_per_rank": [[2], [1]]}
        with pytest.raises(ValueError, match=r"field 'k' has another batch size for each key \(VBE\)"):
            adapter_for({"k": self.keyed(**varying)})
        adapter = adapter_for({"k": self.keyed()})
        with pytest.raises(ValueError, match="field 'k' has no weights, in the first batch it had some"):
            adapter.flatten({"k": self.keyed(weights=None)})
        with pytest.raises(ValueError, match=r"field 'k' has keys \['page', 'item'\]"):
            adapter.flatten({"k": self.keyed(keys=["page", "item"])})
        with pytest.raises(ValueError, match="field 'k' is of type Tensor, in the first batch it was KeyedJagged"):
            adapter.flatten({"k": x()})
        with pytest.raises(ValueError, match=r"field 'y' has 2 rows.*field 'k' has 3 samples"):
            adapter_for({"y": torch.arange(2), "k": self.keyed()})
        none: dict[str, Any] = {"keys": [], "values": x()[:0], "lengths": x()[:0], "weights": None}
        with pytest.raises(ValueError, match=r"field 'k' is a KeyedJaggedTensor without keys.*leave it out"):
            adapter_for({"k": self.keyed(**none), "y": x()})
        with pytest.raises(ValueError, match=r"field 'k' has keys \[\], in the first batch"):
            adapter.flatten({"k": self.keyed(**none)})
        with pytest.raises(ValueError, match="require grad"):
            adapter_for(self.keyed(values=torch.ones(6, requires_grad=True)))

    @pytest.mark.parametrize("weighted", [True, False])
    def test_a_jagged_tensor_comes_back(self, weighted: bool) -> None:
        weights = torch.arange(3.0) if weighted else None
        lengths = torch.tensor([2, 0, 1], dtype=torch.int32)
        jagged = self.rec.JaggedTensor(values=torch.arange(3), weights=weights, lengths=lengths)
        jagged.offsets()
        out = reordered({"j": jagged})["j"]
        assert type(out) is self.rec.JaggedTensor
        assert out.values().tolist() == [2, 0, 1, 0, 1]
        assert_same(out.lengths(), torch.tensor([1, 2, 2, 0], dtype=torch.int32))
        assert out.offsets().tolist() == [0, 1, 3, 5, 5]
        assert_same(out.weights_or_none(), torch.tensor([2.0, 0, 1, 0, 1]) if weighted else None)
        with pytest.raises(ValueError, match="field 'j' has"):
            adapter_for({"j": jagged}).flatten(
                {"j": self.rec.JaggedTensor(torch.arange(3), None if weighted else torch.ones(3), lengths)}
            )


def test_classes_of_the_users_own_are_not_described() -> None:
    for batch in (Point(x(), x()), Frozen(x()), Extended(a=x()), {"deep": [Point(x(), x())]}, {("k", 1): x()}):
        assert adapter_for(batch).describe() is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"tree": {"kind": "pickle"}, "schema": []}'])
def test_a_description_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no description of a batch type"):
        adapter_from(text)
