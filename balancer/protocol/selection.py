"""Which columns a partitioner sees, and their numbers for stage I (paper, Algorithm 1, lines 6-13)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches.batch import JaggedBatch
from .payload import Sections
from .schema import Schema

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """Which columns mean what. Equal on all ranks.

    Attributes:
        lengths: Columns whose lengths add up to the UIH length; empty when the user computes it.
        candidates: Column whose lengths are the number of candidates; by default the first nested column.
        gather: Dense columns that the partitioner sees for the whole world.
        drop_small: Drop global batches with fewer samples than ranks.
    """

    lengths: tuple[str, ...]
    candidates: str | None = None
    gather: tuple[str, ...] = ()
    drop_small: bool = False

    @cached_property
    def digest(self) -> int:
        """A number that differs when selections differ. Fits int64."""
        text = repr((self.lengths, self.candidates, self.gather, self.drop_small)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)

    def check(self, batch: JaggedBatch) -> None:
        """Raise ValueError when a column is missing, of the wrong kind, or not in host memory."""
        for name in batch.names:
            if batch[name].values.device.type != "cpu":
                raise ValueError(
                    f"column {name!r} is on {batch[name].values.device}; balance() takes batches in host memory: "
                    "wrap the loader before its batches are copied to a device"
                )
        named = [("lengths", name) for name in self.lengths]
        named += [("candidates", name) for name in (self.candidates,) if name is not None]
        for argument, name in named:
            _require(batch, argument, name)
            column = batch[name]
            if not column.levels and not (column.values.dim() == 1 and _is_integer(column.values.dtype)):
                raise ValueError(
                    f"{argument}= must name a jagged column or a dense integer column of shape [batch_size], "
                    f"but {name!r} is {column.values.dtype} of shape {list(column.values.shape)}"
                )
        for name in self.gather:
            _require(batch, "gather", name)
            column = batch[name]
            if column.levels or column.values.dim() != 1 or column.values.dtype.is_complex:
                raise ValueError(
                    f"gather= must name dense columns of shape [batch_size], but {name!r} "
                    + ("is jagged" if column.levels else f"has shape {list(column.values.shape)}")
                )

    def candidate_column(self, schema: Schema) -> str | None:
        """The column whose lengths are the number of candidates."""
        if self.candidates is not None:
            return self.candidates
        nested = schema.layout.nested
        return nested[0][0].name if nested else None

    def nested_column(self, schema: Schema) -> str | None:
        """The column that stage II tells of: the candidates' own if it is nested, else the first nested one."""
        nested = [column.name for column, _ in schema.layout.nested]
        name = self.candidate_column(schema)
        return name if name in nested else next(iter(nested), None)

    def sample_words(self, sections: Sections, schema: Schema, uih_lengths: Int64s | None) -> Int64s:
        """UIH length, candidates, payload and gathered columns of a batch. Shape [batch_size, 3 + len(gather)]."""
        batch = sections.batch
        words = np.empty((batch.batch_size, 3 + len(self.gather)), np.int64)
        uih, candidates = words[:, 0], words[:, 1]
        uih[:] = 0 if uih_lengths is None else _not_negative("lengths", uih_lengths)
        for name in self.lengths:
            uih += _lengths_of(sections, schema, "lengths", name)
        counting = self.candidate_column(schema)
        candidates[:] = 0 if counting is None else _lengths_of(sections, schema, "candidates", counting)
        words[:, 2] = sections.payload_bytes()
        for place, name in enumerate(self.gather):
            words[:, 3 + place] = _as_words(batch[name].values)
        return words

    def gathered(self, words: Tensor, schema: Schema) -> dict[str, Tensor]:
        """The gathered columns of the whole world, from their words. Shape of `words`: [len(gather), N]."""
        dtypes = {c.name: c.torch_dtype for c in schema.columns}
        return {name: _from_words(row, dtypes[name]) for name, row in zip(self.gather, words, strict=True)}


def _require(batch: JaggedBatch, argument: str, name: str) -> None:
    if name not in batch.names:
        raise ValueError(f"{argument}= names column {name!r}; the batch has {list(batch.names)}")


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _lengths_of(sections: Sections, schema: Schema, argument: str, name: str) -> Int64s:
    """Lengths of a jagged column, which never are negative; the values of a dense one."""
    if name in schema.layout.length_words:
        return sections.heads[:, schema.layout.length_words[name]]
    return _not_negative(argument, sections.batch[name].values.to(torch.int64).numpy())


def _not_negative(argument: str, lengths: Int64s) -> Int64s:
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"{argument}= must give lengths of at least 0, got {int(lengths.min())}")
    return lengths


def _as_words(values: Tensor) -> Int64s:
    """A dense column as int64 words: integers as they are, floating numbers by the bits of their float64."""
    if values.dtype.is_floating_point:
        words: Int64s = values.to(torch.float64).numpy().view(np.int64)
        return words
    integers: Int64s = values.to(torch.int64).numpy()
    return integers


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Back from `_as_words`, in the column's own element type."""
    return words.contiguous().view(torch.float64).to(dtype) if dtype.is_floating_point else words.to(dtype)
