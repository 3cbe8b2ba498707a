"""Takes the user's own batch type apart into columns and puts it together again (section 4.1: any DataLoader)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..batches.batch import JaggedBatch
from ..batches.column import Column, ColumnSpec, empty_column
from .attributes import torchrec_type
from .keyed import JaggedTensorLeaf, KeyedLeaf
from .leaves import BatchLeaf, DenseLeaf, Form, LengthsLeaf, NestedLeaf, ValuesLeaf
from .parts import Parts
from .structure import DictNode, Node, NoneNode, SequenceNode, below, container_of, field

BatchT = TypeVar("BatchT")


class Adapter(Generic[BatchT]):
    """Turns batches of one structure into columns, and columns into batches. Made by `adapter_for`.

    Attributes:
        schema: Dtype, trailing shape and depth of every column.
    """

    def __init__(self, root: Node, schema: Mapping[str, ColumnSpec]) -> None:
        self._root = root
        self.schema = dict(schema)
        self._alike = tuple((n, s.dtype, s.depth, s.shape, 1 + len(s.shape)) for n, s in self.schema.items())

    def flatten(self, batch: BatchT) -> JaggedBatch:
        """View the batch as columns. Copies only what is not contiguous.

        Raises:
            ValueError: Structure, dtype or trailing shape differ from the first batch's, or batch sizes between
                fields; names the field and both sides.
        """
        if isinstance(batch, JaggedBatch) and self._takes_as_it_is(batch):
            return batch
        parts = Parts()
        self._root.flatten(batch, parts)
        joined, batch_size = parts.joined()
        columns = {name: _like_first(name, column, self.schema[name]) for name, column in joined.items()}
        if isinstance(self._root, BatchLeaf):  # checked when it was made
            return JaggedBatch.of_checked(columns, batch_size)
        return JaggedBatch(columns, batch_size)

    def _takes_as_it_is(self, batch: JaggedBatch) -> bool:
        """Whether the batch itself is the columns, which a look at each column tells, and is in host memory."""
        if not (isinstance(self._root, BatchLeaf) and self._root.is_the_batch):
            return False
        columns = batch.columns
        if len(columns) != len(self.schema):
            return False
        for (name, column), (wanted, dtype, depth, shape, dims) in zip(columns.items(), self._alike, strict=True):
            values = column.values
            if name != wanted or values.dtype != dtype or len(column.levels) != depth or values.ndim != dims:
                return False
            if not values.is_cpu or (shape and values.shape[1:] != shape):
                return False
        return True

    def restore(self, columns: JaggedBatch) -> BatchT:
        """Put a batch together. Dense (but for channels-last), jagged and nested fields share memory with `columns`."""
        batch: BatchT = self._root.restore(columns)
        return batch

    def empty(self) -> JaggedBatch:
        """Make the columns of a batch of no samples."""
        return JaggedBatch.empty(self.schema)

    def describe(self) -> str | None:
        """Say the structure in JSON, for `adapter_from` on a rank that never had a batch.

        Returns:
            None when the batch holds classes of the user's own, which another process could not make from a text.
        """
        tree = self._root.describe()
        if tree is None:
            return None
        schema = [[n, str(s.dtype), list(s.shape), s.depth] for n, s in self.schema.items()]
        return json.dumps({"tree": tree, "schema": schema})


def _like_first(name: str, column: Column, first: ColumnSpec) -> Column:
    """The column, when it is like in the first batch.

    A column without rows takes the first batch's type: `torch.tensor([])` is float32 whatever was meant.
    """
    spec = column.spec
    if spec == first:
        return column
    if len(column.values) == 0 and spec.depth == first.depth:
        return Column(empty_column(first).values.to(column.device), column.levels)
    hint = ""
    if spec.depth == 0 and spec.dtype == first.dtype:
        hint = (
            ". Rows of one batch that are padded to its longest sample cannot be mixed with those of another: pad all "
            "batches to one length, or keep the field jagged (values and lengths with jagged=, a KeyedJaggedTensor, "
            "a nested tensor)"
        )
    raise ValueError(f"field {name!r} is {spec}, in the first batch it was {first}{hint}")


def adapter_for(
    example: BatchT, jagged: Mapping[str, str | tuple[str, ...] | list[str]] | None = None
) -> Adapter[BatchT]:
    """Make the adapter of a batch type from its first batch.

    A batch is any tree of dict, list, tuple, NamedTuple and dataclass (and classes derived from dict) with these
    at its ends: tensors and NumPy arrays with the samples on dimension 0, TorchRec's KeyedJaggedTensor and
    JaggedTensor, torch nested tensors of the jagged layout, JaggedBatch, and None. Columns are named by their path:
    "features.uih_page", "0"; the keys of a batch that is a KeyedJaggedTensor are its columns, weights are
    "<key>.weights", and a batch that is one tensor has the column "values". Arrays of datetime64 and timedelta64 have
    a second column, "<path>: datetime64[s]" say, of no bytes: it tells ranks that their units differ. Channels-last
    memory stays channels-last.

    Args:
        example: The first batch.
        jagged: For jagged features that are given as two plain fields: path of the values, path of their lengths.
            For nested jagged ones the paths of counts and lengths, outermost first. Fields may share their lengths.

    Raises:
        TypeError: A field cannot be split by sample; names it and says what to do.
        ValueError: Fields do not fit together, or require grad; names them.

    Example:
        >>> batch = {"user": torch.tensor([4, 5]), "page": torch.tensor([7, 8, 9]), "page_len": torch.tensor([1, 2])}
        >>> adapter = adapter_for(batch, jagged={"page": "page_len"})
        >>> columns = adapter.flatten(batch)
        >>> columns
        JaggedBatch(batch_size=2, user: dense int64 [*], page: jagged int64 [*] with 3 rows)
        >>> adapter.restore(columns.take([1, 0]))["page"]
        tensor([8, 9, 7])
    """
    plan = {name: (paths,) if isinstance(paths, str) else tuple(paths) for name, paths in (jagged or {}).items()}
    builder = _Builder(plan)
    root = builder.build(example, "")
    builder.check_all_found()
    parts = Parts()
    root.flatten(example, parts)
    parts.check_order()
    return Adapter(root, JaggedBatch(*parts.joined()).schema)


class _Builder:
    """Makes the tree of nodes of a first batch."""

    def __init__(self, jagged: Mapping[str, tuple[str, ...]]) -> None:
        self._jagged = jagged
        self._owners: dict[str, tuple[str, int]] = {}
        for name, paths in jagged.items():
            for level, path in enumerate(paths):
                owner = self._owners.setdefault(path, (name, level))
                if owner[1] != level or path in jagged:
                    raise ValueError(f"jagged= uses {path!r} in two roles, which cannot both be right")
        self._found: list[str] = []

    def build(self, value: Any, path: str) -> Node:
        """Make the node of a value and of everything below it."""
        container = container_of(value, path, self.build)
        if container is not None:
            return container
        self._found.append(path)
        kind = torchrec_type(value)
        if kind == "KeyedJaggedTensor":
            return KeyedLeaf.of(value, path)
        if kind == "JaggedTensor":
            return JaggedTensorLeaf.of(value, path)
        if isinstance(value, JaggedBatch):
            return BatchLeaf(path, value.names)
        if isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged:
            return NestedLeaf.of(value, path)
        if type(value) in (Tensor, np.ndarray):
            return self._array(value, path)
        raise TypeError(_refusal(value, path))

    def _array(self, value: Any, path: str) -> Node:
        form = Form.of(value, path)
        if path in self._jagged:
            return ValuesLeaf(path, form, self._jagged[path])
        if path in self._owners:
            return LengthsLeaf.of(value, path, form, *self._owners[path])
        return DenseLeaf(path, form, None)

    def check_all_found(self) -> None:
        """Raise ValueError when jagged= names a field that the batch does not have."""
        for path in [*self._jagged, *self._owners]:
            if path not in self._found:
                raise ValueError(f"jagged= names {path!r}; the batch has {', '.join(sorted(self._found))}")


def _refusal(value: Any, path: str) -> str:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        todo = "only plain tensors keep their type when samples move: pass .as_subclass(torch.Tensor)"
    elif isinstance(value, (bool, int, float, complex, np.generic)):
        todo = (
            "a number cannot be split by sample: make it a tensor of shape [batch_size], or leave it out of the batch; "
            "rows of Python lists become columns with JaggedBatch.from_arrow(pyarrow.Table.from_pylist(rows))"
        )
    elif isinstance(value, (str, bytes)):
        todo = "text cannot be split by sample: encode it as numbers (bytes as uint8 with lengths), or leave it out"
    elif hasattr(value, "__arrow_c_stream__"):
        todo = "turn it into columns first: JaggedBatch.from_arrow(batch)"
    else:
        todo = "its samples cannot be told apart: use tensors in a dict, tuple, NamedTuple or dataclass"
    return f"{field(path)} is of type {kind}; {todo}"


def adapter_from(description: str) -> Adapter[Any]:
    """Make the adapter that another rank described with `Adapter.describe`.

    Raises:
        ValueError: The text is not such a description.
    """
    try:
        parsed = json.loads(description)
        root = _node_from(parsed["tree"], "")
        schema = {n: ColumnSpec(_dtype(d), tuple(shape), depth) for n, d, shape, depth in parsed["schema"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"this is no description of a batch type: {description[:200]!r} ({error!r})") from error
    return Adapter(root, schema)


_CONTAINERS: dict[str, type] = {"dict": dict, "ordered_dict": OrderedDict, "list": list, "tuple": tuple}


def _node_from(tree: dict[str, Any], path: str) -> Node:
    kind = tree["kind"]
    if kind in _CONTAINERS:
        children = [(key, _node_from(child, below(path, key))) for key, child in tree["fields"]]
        node = DictNode if kind in ("dict", "ordered_dict") else SequenceNode
        return node(path, _CONTAINERS[kind], children)
    if kind == "dense":
        return DenseLeaf(path, Form(path, tree["numpy"]), tree["memory_format"])
    if kind == "values":
        return ValuesLeaf(path, Form(path, tree["numpy"]), tuple(tree["lengths"]))
    if kind == "lengths":
        form = Form(path, tree["numpy"])
        return LengthsLeaf(path, form, _dtype(tree["dtype"]), tree["owner"], tree["level"])
    if kind == "keyed":
        return KeyedLeaf(path, tree["keys"], tree["weighted"], _dtype(tree["lengths_dtype"]))
    if kind == "jagged_tensor":
        return JaggedTensorLeaf(path, tree["weighted"], _dtype(tree["lengths_dtype"]))
    if kind == "nested":
        return NestedLeaf(path, _dtype(tree["offsets_dtype"]))
    if kind == "jagged_batch":
        return BatchLeaf(path, tree["names"])
    if kind == "none":
        return NoneNode(path)
    raise ValueError(f"unknown kind {kind!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
