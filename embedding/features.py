"""Reads ids from what a collection is given, and gives rows back in the same form (section 3.2)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .tables import Table

_INTEGERS = (torch.int64, torch.int32)
_JAGGED = "torchrec.sparse.jagged_tensor"


class FeatureReader:
    """Features of a collection, in the order of its tables.

    Args:
        tables: The tables. Where two share a feature, results are called `feature@table`, as in torchrec.

    Attributes:
        pairs: Feature and table name of each lookup.
        names: What each lookup's result is called.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.pairs = [(feature, table.name) for table in tables for feature in table.features]
        features = [feature for feature, _ in self.pairs]
        self.names = [f if features.count(f) == 1 else f"{f}@{table}" for f, table in self.pairs]

    def ids(self, features: Any) -> list[Tensor]:
        """The ids of every lookup. Shapes as they came, int64 or int32.

        Raises:
            KeyError: A feature is missing.
            TypeError: Ids are no integers.
        """
        columns = _columns(features)
        return [read_ids(columns, feature) for feature, _ in self.pairs]

    def wrap(self, features: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Rows of every lookup by name: jagged where the ids were."""
        if _is_keyed(features):
            return self._wrap_keyed(features, rows)
        columns = _columns(features)
        return {
            name: _like(columns[feature], each)
            for name, (feature, _), each in zip(self.names, self.pairs, rows, strict=True)
        }

    def _wrap_keyed(self, keyed: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
        """JaggedTensors with the lengths of a KeyedJaggedTensor's features."""
        keys = keyed.keys()
        lengths = keyed.lengths()
        parts = [lengths] if len(keys) == 1 else lengths.view(len(keys), len(lengths) // len(keys)).unbind()
        by_key, jagged = dict(zip(keys, parts, strict=True)), sys.modules[_JAGGED].JaggedTensor
        return {
            name: jagged(values=each, lengths=by_key[feature])
            for name, (feature, _), each in zip(self.names, self.pairs, rows, strict=True)
        }


def read_ids(batch: Any, column: str) -> Tensor:
    """Ids of one column of a batch: of a mapping, or of an object with attributes.

    Raises:
        KeyError: It has no such column.
        TypeError: Ids are no integers.
    """
    if isinstance(batch, Tensor | list):
        raise TypeError(
            f"ids name column '{column}', but the batch is a {type(batch).__name__}: call the model with a batch "
            "that has columns, or give functions of the batch as ids"
        )
    if hasattr(batch, "__getitem__") and not isinstance(batch, tuple):
        try:
            found = batch[column]
        except KeyError:
            names = list(batch) if hasattr(batch, "keys") else getattr(batch, "names", "others")
            raise KeyError(f"the batch must have '{column}' to look up, got {names}: ids name that column") from None
    elif hasattr(batch, column):
        found = getattr(batch, column)
    else:
        raise KeyError(f"the batch must have '{column}' to look up, got a {type(batch).__name__} without it")
    ids = _values(found)
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids of '{column}' must be a tensor of int64 or int32, got {kind}")
    return ids


def is_collection(module: Any) -> bool:
    """Whether a module is torchrec's EmbeddingCollection; torchrec is not imported for that."""
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    return torchrec is not None and type(module) is torchrec.EmbeddingCollection


def _is_keyed(features: Any) -> bool:
    """Whether features are a KeyedJaggedTensor with as many samples for every key; torchrec is not imported."""
    torchrec = sys.modules.get(_JAGGED)
    return (
        torchrec is not None
        and isinstance(features, torchrec.KeyedJaggedTensor)
        and not features.variable_stride_per_key()
    )


def _columns(features: Any) -> Any:
    """Ids by feature; without the offsets that `to_dict` makes, on a GPU in four kernels, and nobody reads."""
    if _is_keyed(features):
        values, counts = features.values(), features.length_per_key()
        parts = [values] if counts == [len(values)] else values.split(counts)
        return dict(zip(features.keys(), parts, strict=True))
    return features.to_dict() if hasattr(features, "to_dict") else features


def _values(column: Any) -> Any:
    """Ids of a tensor, of torchrec's JaggedTensor (`values()`) or of our Column (`values`)."""
    if isinstance(column, Tensor):
        return column
    values = getattr(column, "values", column)
    return values() if callable(values) else values


def _like(column: Any, rows: Tensor) -> Any:
    if isinstance(column, Tensor):
        return rows.view(*column.shape, rows.shape[1])
    if callable(getattr(column, "values", None)) and hasattr(column, "lengths"):
        return type(column)(values=rows, lengths=column.lengths())
    return rows
