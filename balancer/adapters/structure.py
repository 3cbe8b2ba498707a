"""The shape of the user's batch: containers that are walked the same way for every batch (paper, section 4.1).

A batch is a tree. Each position is a `Node`, made from the first batch; it takes the same position of a later batch
apart, refuses it when it differs, and puts it together again.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from ..batches.batch import JaggedBatch
from .attributes import PLAIN, attributes_of, holds_samples
from .parts import Parts

Build = Callable[[Any, str], "Node"]


class Node(ABC):
    """One position of the user's batch."""

    @abstractmethod
    def flatten(self, value: Any, parts: Parts) -> None:
        """Take a value apart. Raises ValueError, naming the field, when it differs from the first batch's."""

    @abstractmethod
    def restore(self, batch: JaggedBatch) -> Any:
        """Put the value together from the columns of `batch`."""

    @abstractmethod
    def describe(self) -> dict[str, Any] | None:
        """Say in plain JSON values what this is, or None when only a class of the user's could tell."""


def field(path: str) -> str:
    """Name a position in an error."""
    return f"field {path!r}" if path else "the batch"


def below(path: str, key: object) -> str:
    """Path of a child."""
    return f"{path}.{key}" if path else str(key)


def check_type(path: str, value: Any, expected: type) -> None:
    """Raise ValueError when the type is another than in the first batch."""
    if type(value) is not expected:
        raise ValueError(
            f"{field(path)} is of type {type(value).__name__}, in the first batch it was {expected.__name__}"
        )


class NoneNode(Node):
    """A field that is None in every batch."""

    def __init__(self, path: str) -> None:
        self._path = path

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        check_type(self._path, value, type(None))

    @override
    def restore(self, batch: JaggedBatch) -> None:
        return None

    @override
    def describe(self) -> dict[str, Any] | None:
        return {"kind": "none"}


class _Container(Node):
    """A field that holds fields."""

    def __init__(self, path: str, kind: type, children: Sequence[tuple[Any, Node]]) -> None:
        self._path = path
        self._type = kind
        self._children = children

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        check_type(self._path, value, self._type)
        keys = [key for key, _ in self._children]
        found = self._keys(value)
        if len(found) != len(keys) or set(found) != set(keys):
            raise ValueError(f"{field(self._path)} has the fields {found}, in the first batch it had {keys}")
        for key, child in self._children:
            child.flatten(self._get(value, key), parts)

    def _keys(self, value: Any) -> list[Any]:
        return list(value)

    def _get(self, value: Any, key: Any) -> Any:
        return value[key]

    def _restored(self, batch: JaggedBatch) -> dict[Any, Any]:
        return {key: child.restore(batch) for key, child in self._children}

    def _describe(self, kind: str) -> dict[str, Any] | None:
        children = [(key, child.describe()) for key, child in self._children]
        if any(child is None or type(key) not in (str, int) for key, child in children):
            return None
        return {"kind": kind, "fields": [list(pair) for pair in children]}


class DictNode(_Container):
    """A dict or OrderedDict."""

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        return self._type(self._restored(batch))

    @override
    def describe(self) -> dict[str, Any] | None:
        return self._describe(DICTS[self._type])


class OtherDictNode(_Container):
    """A class of its own that is a dict. Attributes that are items follow them; others are alike in all batches."""

    def __init__(self, path: str, example: Any, children: Sequence[tuple[Any, Node]]) -> None:
        super().__init__(path, type(example), children)
        self._is_own_dict = getattr(example, "__dict__", None) is example
        self._constants = self._checked_attributes(example)
        self._template = copy.copy(example)
        self._template.clear()
        self._mirrors = [name for name in attributes_of(example) if name not in self._constants]
        self._link(self._template, dict.fromkeys(self._mirrors))  # the first batch's samples are not kept alive

    def _checked_attributes(self, value: Any) -> dict[str, Any]:
        """The attributes that are not items."""
        constants: dict[str, Any] = {}
        for name, attribute in attributes_of(value).items():
            if name in value and value[name] is attribute:
                continue
            if holds_samples(attribute):
                raise ValueError(
                    f"{field(self._path)} has the attribute {name!r} beside its items, which holds a tensor or an "
                    f"array that would not follow the samples: make it an item, or leave it out of the batch"
                )
            constants[name] = attribute
        return constants

    def _link(self, value: Any, mirrored: dict[str, Any]) -> None:
        if self._is_own_dict:
            value.__dict__ = value
        for name, attribute in mirrored.items():
            object.__setattr__(value, name, attribute)  # not the class's own, which may write an item

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        super().flatten(value, parts)
        for name, now in self._checked_attributes(value).items():
            first = self._constants.get(name)
            if isinstance(now, PLAIN) and isinstance(first, PLAIN) and now != first:
                raise ValueError(
                    f"{field(self._path)} has the attribute {name!r} of {now!r}, in the first batch it was {first!r}: "
                    f"samples of both are mixed, so it has to be one for all, or left out of the batch"
                )

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        value = copy.copy(self._template)
        fields = self._restored(batch)
        self._link(value, {name: fields[name] for name in self._mirrors})
        for key, child in fields.items():
            value[key] = child
        return value

    @override
    def describe(self) -> dict[str, Any] | None:
        return None


class SequenceNode(_Container):
    """A list or tuple of fields."""

    @override
    def _keys(self, value: Any) -> list[Any]:
        return list(range(len(value)))

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        return self._type(self._restored(batch).values())

    @override
    def describe(self) -> dict[str, Any] | None:
        return self._describe(SEQUENCES[self._type])


class NamedTupleNode(_Container):
    """A NamedTuple."""

    @override
    def _keys(self, value: Any) -> list[Any]:
        return list(self._type._fields)  # type: ignore[attr-defined]  # it is a NamedTuple

    @override
    def _get(self, value: Any, key: Any) -> Any:
        return getattr(value, key)

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        return self._type._make(self._restored(batch).values())  # type: ignore[attr-defined]  # as above

    @override
    def describe(self) -> dict[str, Any] | None:
        return None


class DataclassNode(_Container):
    """A dataclass: made again through its `__init__`, so that what `__post_init__` derives is derived anew."""

    def __init__(self, path: str, kind: type, children: Sequence[tuple[Any, Node]]) -> None:
        super().__init__(path, kind, children)
        self._late = {f.name for f in dataclasses.fields(kind) if not f.init}
        try:
            inspect.signature(kind).bind(**{name: None for name, _ in children if name not in self._late})
        except TypeError as error:
            raise TypeError(
                f"{field(path)} is of dataclass {kind.__name__}, which is made again from its fields alone, and its "
                f"constructor asks for something else ({error}): give that a default"
            ) from None

    @override
    def _keys(self, value: Any) -> list[Any]:
        return [f.name for f in dataclasses.fields(value)]

    @override
    def _get(self, value: Any, key: Any) -> Any:
        return getattr(value, key)

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        fields = self._restored(batch)
        value = self._type(**{name: fields[name] for name in fields if name not in self._late})
        for name in self._late:
            object.__setattr__(value, name, fields[name])  # frozen classes too
        return value

    @override
    def describe(self) -> dict[str, Any] | None:
        return None


DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict"}
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}


def container_of(value: Any, path: str, build: Build) -> Node | None:
    """The node of a container, its children made by `build`; None when the value is no container we know."""
    kind = type(value)
    if value is None:
        return NoneNode(path)
    if kind in DICTS:
        return DictNode(path, kind, [(key, build(child, below(path, key))) for key, child in value.items()])
    if isinstance(value, (dict, UserDict)):
        children = [(key, build(child, below(path, key))) for key, child in value.items()]
        return OtherDictNode(path, value, children)
    if kind in SEQUENCES:
        return SequenceNode(path, kind, [(i, build(child, below(path, i))) for i, child in enumerate(value)])
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        names = kind._fields
        return NamedTupleNode(path, kind, [(n, build(getattr(value, n), below(path, n))) for n in names])
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        children = [(f.name, build(getattr(value, f.name), below(path, f.name))) for f in fields]
        return DataclassNode(path, kind, children)
    return None
