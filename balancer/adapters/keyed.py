"""Fields of the user's batch that are TorchRec's: KeyedJaggedTensor and JaggedTensor (paper, section 4.1).

Nothing here imports TorchRec before a batch holds one of its types.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from ..batches.batch import JaggedBatch
from ..batches.column import Column
from ..batches.convert import WEIGHTS, jagged_columns, jagged_tensor, keyed_columns, keyed_tensor
from .attributes import torchrec_type
from .leaves import BARE
from .parts import Parts
from .structure import Node, below, field


def _check(value: Any, expected: str, path: str) -> None:
    if torchrec_type(value) != expected:
        raise ValueError(f"{field(path)} is of type {type(value).__name__}, in the first batch it was {expected}")


class KeyedLeaf(Node):
    """A KeyedJaggedTensor: one column for each key, and one more for each key's weights."""

    def __init__(self, path: str, keys: list[str], weighted: bool, lengths_dtype: torch.dtype) -> None:
        self._path = path
        self._keys = keys
        self._weighted = weighted
        self._lengths_dtype = lengths_dtype

    @classmethod
    def of(cls, keyed: Any, path: str) -> KeyedLeaf:
        """Make the leaf of the first batch's field.

        Raises:
            ValueError: It has no keys.
        """
        if not keyed.keys():
            raise ValueError(
                f"{field(path)} is a KeyedJaggedTensor without keys, which holds nothing and cannot tell how many "
                f"samples there are: leave it out of the batch, or make it None"
            )
        return cls(path, list(keyed.keys()), keyed.weights_or_none() is not None, keyed.lengths().dtype)

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        _check(value, "KeyedJaggedTensor", self._path)
        if set(value.keys()) != set(self._keys):
            raise ValueError(f"{field(self._path)} has keys {value.keys()}, in the first batch {self._keys}")
        if (value.weights_or_none() is not None) != self._weighted:
            now, first = ("no weights", "some") if self._weighted else ("weights", "none")
            raise ValueError(f"{field(self._path)} has {now}, in the first batch it had {first}")
        columns, weights = keyed_columns(value, field(self._path))
        for key in self._keys:
            parts.add(below(self._path, key), columns[key])
        for key in self._keys if self._weighted else ():
            parts.add(below(self._path, key) + WEIGHTS, weights[key])
        parts.batch_sizes[self._path or "batch"] = value.stride()

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        columns = {key: batch[below(self._path, key)] for key in self._keys}
        weights = {key: batch[below(self._path, key) + WEIGHTS] for key in self._keys if self._weighted}
        return keyed_tensor(columns, weights, batch.batch_size, self._lengths_dtype)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {
            "kind": "keyed",
            "keys": self._keys,
            "weighted": self._weighted,
            "lengths_dtype": str(self._lengths_dtype),
        }


class JaggedTensorLeaf(Node):
    """A JaggedTensor: a column, and one more for its weights."""

    def __init__(self, path: str, weighted: bool, lengths_dtype: torch.dtype) -> None:
        self._path = path
        self._weighted = weighted
        self._lengths_dtype = lengths_dtype

    @classmethod
    def of(cls, jagged: Any, path: str) -> JaggedTensorLeaf:
        """Make the leaf of the first batch's field."""
        return cls(path, jagged.weights_or_none() is not None, jagged.lengths().dtype)

    @override
    def flatten(self, value: Any, parts: Parts) -> None:
        _check(value, "JaggedTensor", self._path)
        column, weights = jagged_columns(value)
        if (weights is not None) != self._weighted:
            now, first = ("no weights", "some") if self._weighted else ("weights", "none")
            raise ValueError(f"{field(self._path)} has {now}, in the first batch it had {first}")
        name = self._path or BARE
        parts.add(name, column)
        if weights is not None:
            parts.add(name + WEIGHTS, weights)

    @override
    def restore(self, batch: JaggedBatch) -> Any:
        name = self._path or BARE
        weights: Column | None = batch[name + WEIGHTS] if self._weighted else None
        return jagged_tensor(batch[name], weights, self._lengths_dtype)

    @override
    def describe(self) -> dict[str, Any] | None:
        return {"kind": "jagged_tensor", "weighted": self._weighted, "lengths_dtype": str(self._lengths_dtype)}
