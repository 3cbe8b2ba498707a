"""JaggedBatch: named columns over the samples of one batch (paper, section 2.1: variable UIH, candidates and contents)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a batch.

    Attributes:
        values: Shape [batch_size, ...] without levels, else [levels[-1].sum(), ...].
        levels: Lengths, outermost first, each int64. `()` dense; `(lengths [B],)` jagged;
            `(counts [B], lengths [counts.sum()])` nested jagged.
    """

    values: Tensor
    levels: tuple[Tensor, ...] = ()


class JaggedBatch:
    """Named columns over `batch_size` samples."""

    def __init__(self, columns: Mapping[str, Column], batch_size: int) -> None:
        self._columns = dict(columns)
        self.batch_size = batch_size

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]
