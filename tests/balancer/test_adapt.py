"""Adapters: the user's own batch type goes in and comes out; containers, dataclasses and classes derived from dict."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from freescale.balancer.adapters.adapt import adapter_for, adapter_from
from freescale.balancer.batches.batch import Column, JaggedBatch

from adapted_batches import ORDER, assert_same, moved, reordered, x


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


def test_classes_of_the_users_own_are_not_described() -> None:
    for batch in (Point(x(), x()), Frozen(x()), Extended(a=x()), {"deep": [Point(x(), x())]}, {("k", 1): x()}):
        assert adapter_for(batch).describe() is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"tree": {"kind": "pickle"}, "schema": []}'])
def test_a_description_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no description of a batch type"):
        adapter_from(text)
