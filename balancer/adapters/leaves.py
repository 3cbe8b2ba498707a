"""Fields of the user's batch that hold samples: tensors, arrays, jagged pairs, batches (section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ..batches.batch import JaggedBatch
from ..batches.column import Column
from ..batches.convert import nested_column, nested_tensor
from .parts import Parts
from .structure import Node, below, check_type, field

BARE = "values"  # column name of a batch that is one field
_TIME = "mM"  # kinds of NumPy's timedelta64 and datetime64


class Form:
    """Whether a field is a tensor or a NumPy array, and how one becomes the other.

    Attributes:
        path: Of the field.
        numpy_type: Of an array in the first batch, as `np.dtype(...).str` says it.
        unit: "datetime64[s]" say, where the array's integers are dates or spans of time.
    """

    def __init__(self, path: str, numpy_type: str | None) -> None:
        self.path = path
        self.numpy_type = numpy_type
        dtype = None if numpy_type is None else np.dtype(numpy_type)
        self.unit = str(dtype) if dtype is not None and dtype.kind in _TIME else None

    @classmethod
    def of(cls, value: Tensor | np.ndarray[Any, Any], path: str) -> Form:
        """Take the form of the first batch's field.

        Raises:
            TypeError: An array of Python objects, text or records.
        """
        if isinstance(value, Tensor):
            return cls(path, None)
        _check_numbers(value, path)
        return cls(path, value.dtype.str)

    def tensor(self, value: Any) -> Tensor:
        """View the field as a tensor.

        Raises:
            TypeError: An array of Python objects, text or records.
            ValueError: A type, layout or unit of time that the first batch did not have; one number, or one that
                requires grad.
        """
        check_type(self.path, value, np.ndarray if self.numpy_type else Tensor)
        if isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided:
                raise ValueError(f"{field(self.path)} has layout {value.layout}; samples need plain dense tensors")
            if value.requires_grad:
                raise ValueError(f"{field(self.path)} requires grad, which ends where samples move; detach() it")
        if value.ndim == 0:
            raise ValueError(
                f"{field(self.path)} is a single number, not one a sample: expand it to shape [batch_size], or leave "
                f"it out of the batch"
            )
        return value if isinstance(value, Tensor) else self._tensor_of(value)

    def _tensor_of(self, array: np.ndarray[Any, Any]) -> Tensor:
        _check_numbers(array, self.path)
        now = str(array.dtype) if array.dtype.kind in _TIME else None
        if now != self.unit and len(array):
            raise ValueError(
                f"{field(self.path)} is an array of {array.dtype}, in the first batch it was of "
                f"{np.dtype(self.numpy_type)}: convert all to one with astype()"
            )
        array = np.ascontiguousarray(array)
        if now is not None:
            array = array.view(np.int64)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def value(self, tensor: Tensor) -> Any:
        """Give the tensor the form of the field."""
        if self.numpy_type is None:
            return tensor
        array = tensor.numpy()
        return array if self.unit is None else array.view(self.numpy_type)


def _check_numbers(array: np.ndarray[Any, Any], path: str) -> None:
    dtype = array.dtype
    if dtype.kind not in "biufc" + _TIME or not dtype.isnative or dtype in (np.longdouble, np.clongdouble):
        raise TypeError(
            f"{field(path)} is an array of {dtype}, which is not made of plain numbers: encode "
            f"it as numbers, or leave it out of the batch"
        )


class DenseLeaf(Node):
    """A tensor or array with one row a sample.

    Tensors come back in the memory format, channels-last or not, of this rank's first batch with samples. Their column
    has the logical shape, whatever the format, so that ranks and batches of two formats can be mixed.
    """

    def __init__(self, path: str, form: Form, memory_format: str | None) -> None:
        self._name = path or BARE
        self._form = form
        self._memory_format = memory_format

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        tensor = self._form.tensor(value)
        if self._memory_format is None and len(tensor):  # without samples all formats are one
            self._memory_format = _memory_format(tensor)
        parts.add(self._name, Column(tensor), self._form.unit)

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        tensor = batch[self._name].values
        wanted = _FORMATS.get(self._memory_format or _CONTIGUOUS)
        if wanted is not None:
            tensor = torch.empty_like(tensor, memory_format=wanted, pin_memory=tensor.is_pinned()).copy_(tensor)
        return self._form.value(tensor)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {"kind": "dense", "numpy": self._form.numpy_type, "memory_format": self._memory_format}


_CONTIGUOUS = "contiguous"
_FORMATS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
_RANKS = {4: "channels_last", 5: "channels_last_3d"}


def _memory_format(tensor: Tensor) -> str:
    """Name the memory format. What is contiguous in both counts as contiguous."""
    name = _RANKS.get(tensor.dim())
    if name is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=_FORMATS[name]):
        return _CONTIGUOUS
    return name


class ValuesLeaf(Node):
    """The values of a jagged feature whose lengths are other fields."""

    def __init__(self, path: str, form: Form, lengths: tuple[str, ...]) -> None:
        self._path = path
        self._form = form
        self._lengths = lengths

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        parts.add_values(self._path, self._form.tensor(value), self._lengths, self._form.unit)

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        return self._form.value(batch[self._path].values)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {"kind": "values", "numpy": self._form.numpy_type, "lengths": list(self._lengths)}


class LengthsLeaf(Node):
    """The lengths of a jagged feature. They come back in the integer type of the first batch."""

    def __init__(self, path: str, form: Form, dtype: torch.dtype, owner: str, level: int) -> None:
        self._path = path
        self._form = form
        self._dtype = dtype
        self._owner = owner
        self._level = level

    @classmethod
    def of(cls, value: Any, path: str, form: Form, owner: str, level: int) -> LengthsLeaf:
        """Make the leaf of the first batch's field.

        Raises:
            ValueError: They are spans of time.
        """
        if form.unit is not None:
            raise ValueError(f"{field(path)} holds lengths, which must be integers, got {form.unit}")
        return cls(path, form, form.tensor(value).dtype, owner, level)

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        parts.add_lengths(self._path, self._form.tensor(value))

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        lengths = batch[self._owner].levels[self._level]
        narrow = lengths.to(self._dtype)
        if not torch.equal(narrow.to(torch.int64), lengths):
            raise ValueError(
                f"{field(self._path)} holds the length {int(lengths.max())}, in the first batch lengths were "
                f"{self._dtype}: use one integer type that holds all, in every batch and on every rank"
            )
        return self._form.value(narrow)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {
            "kind": "lengths",
            "numpy": self._form.numpy_type,
            "dtype": str(self._dtype),
            "owner": self._owner,
            "level": self._level,
        }


class NestedLeaf(Node):
    """A torch nested tensor of the jagged layout."""

    def __init__(self, path: str, offsets_dtype: torch.dtype) -> None:
        self._path = path
        self._offsets_dtype = offsets_dtype

    @classmethod
    def of(cls, nested: Any, path: str) -> NestedLeaf:
        """Make the leaf of the first batch's field."""
        return cls(path, nested.offsets().dtype)

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        if not isinstance(value, Tensor):
            raise ValueError(f"{field(self._path)} is of type {type(value).__name__}, it was a nested tensor")
        if value.requires_grad:
            raise ValueError(f"{field(self._path)} requires grad, which ends where samples move; detach() it")
        parts.add(self._path or BARE, nested_column(value, field(self._path)))

    @override
    def restore(self, batch: JaggedBatch) -> Tensor:
        return nested_tensor(batch[self._path or BARE], self._offsets_dtype)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {"kind": "nested", "offsets_dtype": str(self._offsets_dtype)}


class BatchLeaf(Node):
    """A JaggedBatch: as the batch itself, or as a field of it."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.is_the_batch = not path
        self._path = path
        self._names = tuple(names)

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        check_type(self._path, value, JaggedBatch)
        if set(value.names) != set(self._names):
            names = list(self._names)
            raise ValueError(f"{field(self._path)} has columns {list(value.names)}, in the first batch {names}")
        for name in self._names:
            parts.add(below(self._path, name), value[name])
        parts.batch_sizes[self._path or "batch"] = value.batch_size

    @override
    def restore(self, batch: JaggedBatch) -> JaggedBatch:
        if self.is_the_batch and batch.names == self._names:
            return batch
        columns = {name: batch[below(self._path, name)] for name in self._names}
        return JaggedBatch.of_checked(columns, batch.batch_size)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {"kind": "jagged_batch", "names": list(self._names)}
