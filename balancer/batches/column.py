"""Column: values and lengths of one feature over the samples of a batch, and its rules (section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 2
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}


@dataclass(frozen=True)
class ColumnSpec:
    """What is the same in a column from batch to batch and from rank to rank.

    Attributes:
        dtype: Of the values.
        shape: Trailing shape of the values, without their first dimension.
        depth: Number of length levels: 0 dense, 1 jagged, 2 nested jagged.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    depth: int = 0

    def __str__(self) -> str:
        kind = ("dense", "jagged", "nested jagged")[self.depth]
        name = str(self.dtype).removeprefix("torch.")
        return f"{kind} {name} [{', '.join(['*', *map(str, self.shape)])}]"


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a batch.

    Attributes:
        values: Shape [batch_size, ...] without levels, else [levels[-1].sum(), ...].
        levels: Lengths, outermost first, each int64. `()` dense; `(lengths [B],)` jagged;
            `(counts [B], lengths [counts.sum()])` nested jagged.

    Example:
        >>> column = Column(torch.tensor([7, 8, 9]), (torch.tensor([2, 0, 1]),))
        >>> column.offsets
        tensor([0, 2, 2, 3])
        >>> column.to_list()
        [[7, 8], [], [9]]
    """

    values: Tensor
    levels: tuple[Tensor, ...] = ()

    @property
    def depth(self) -> int:
        """Number of length levels: 0 dense, 1 jagged, 2 nested jagged."""
        return len(self.levels)

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return len(self.levels[0]) if self.levels else len(self.values)

    @property
    def device(self) -> torch.device:
        """Where values and lengths live."""
        return self.values.device

    @property
    def spec(self) -> ColumnSpec:
        """What is the same from batch to batch: dtype, trailing shape, depth."""
        return ColumnSpec(self.values.dtype, tuple(self.values.shape[1:]), self.depth)

    @property
    def lengths(self) -> Tensor:
        """Items of each sample: the outermost level. Shape [B], int64.

        Raises:
            ValueError: The column is dense.
        """
        if not self.levels:
            raise ValueError("a dense column has no lengths: it has one row a sample")
        return self.levels[0]

    @property
    def offsets(self) -> Tensor:
        """Where each sample's items start in the next level (values, or inner lengths). Shape [B + 1], int64.

        Raises:
            ValueError: The column is dense.
        """
        return offsets_of(self.lengths)

    @property
    def row_offsets(self) -> Tensor:
        """Where each sample's rows start in `values`, at any depth. Shape [B + 1], int64."""
        if not self.levels:
            return torch.arange(len(self.values) + 1, device=self.device)
        offsets = offsets_of(self.levels[0])
        for lengths in self.levels[1:]:
            offsets = offsets_of(lengths)[offsets]
        return offsets

    @property
    def num_rows(self) -> Tensor:
        """Rows of `values` that belong to each sample, at any depth. Shape [B], int64."""
        return self.levels[0] if self.depth == 1 else self.row_offsets.diff()

    def tensors(self) -> tuple[Tensor, ...]:
        """Values, then the levels, outermost first."""
        return (self.values, *self.levels)

    def to_list(self) -> list[Any]:
        """Give the samples as Python numbers and lists. Synchronises."""
        items: list[Any] = self.values.tolist()
        for lengths in reversed(self.levels):
            bounds = offsets_of(lengths).tolist()
            items = [items[start:stop] for start, stop in pairwise(bounds)]
        return items

    def equal(self, other: Column) -> bool:
        """Whether dtype, shape, lengths and every byte of the values agree (NaN included). Synchronises."""
        return (
            self.spec == other.spec
            and self.values.shape == other.values.shape
            and all(torch.equal(a, b) for a, b in zip(self.levels, other.levels, strict=True))
            and torch.equal(as_bytes(self.values), as_bytes(other.values))
        )


def offsets_of(lengths: Tensor) -> Tensor:
    """Add up lengths from 0. Shape [B] to [B + 1], int64."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def as_bytes(values: Tensor) -> Tensor:
    """View the memory of a contiguous tensor: shape [n, ...] to [n, bytes of a row], uint8."""
    n, row = len(values), row_bytes(values)
    if n * row == 0:
        return torch.empty((n, row), dtype=torch.uint8, device=values.device)
    return values.reshape(n, -1).view(torch.uint8)


def row_bytes(values: Tensor) -> int:
    """Count the bytes of one row of `values`."""
    return values.shape[1:].numel() * values.element_size()


def empty_column(spec: ColumnSpec) -> Column:
    """Make a column of no samples, in host memory."""
    levels = tuple(torch.zeros(0, dtype=torch.int64) for _ in range(spec.depth))
    return Column(torch.empty((0, *spec.shape), dtype=spec.dtype), levels)


def checked_column(name: str, column: Column) -> Column:
    """Check every rule, and make lengths int64 and values contiguous. Synchronises.

    Raises:
        ValueError: Names the column, the rule and the value.
        TypeError: Values or lengths are not tensors.
    """
    if column.depth > MAX_DEPTH:
        raise ValueError(f"column {name!r} has {column.depth} length levels; at most {MAX_DEPTH} are supported")
    levels: list[Tensor] = []
    for level, lengths in enumerate(column.levels):
        what = f"column {name!r}: lengths of level {level}"
        lengths = _checked_lengths(what, lengths)
        if level and len(lengths) != (total := int(levels[-1].sum())):
            raise ValueError(f"{what} must be as many as the counts above add up to, {total}, got {len(lengths)}")
        levels.append(lengths)
    values = _checked_values(name, column.values)
    if levels and len(values) != (total := int(levels[-1].sum())):
        raise ValueError(f"column {name!r}: lengths add up to {total}, but there are {len(values)} rows of values")
    for lengths in levels:
        if lengths.device != values.device:
            raise ValueError(f"column {name!r}: values are on {values.device}, lengths on {lengths.device}")
    return Column(values, tuple(levels))


def _checked_lengths(what: str, lengths: Tensor) -> Tensor:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(lengths).__name__}")
    if lengths.dtype not in _INTEGERS:
        raise ValueError(f"{what} must be integers, got {lengths.dtype}")
    if lengths.dim() != 1:
        raise ValueError(f"{what} must have one dimension, got shape {list(lengths.shape)}")
    wide = lengths.detach().to(torch.int64).contiguous()
    if len(wide) and int(wide.min()) < 0:
        row = int((wide < 0).nonzero()[0])
        if lengths.dtype is torch.uint64:
            raise ValueError(f"{what} must fit int64, got {int(wide[row]) + 2**64} at row {row}")
        raise ValueError(f"{what} must not be negative, got {int(wide[row])} at row {row}")
    return wide


def _checked_values(name: str, values: Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"column {name!r}: values must be a tensor, got {type(values).__name__}")
    if values.layout is not torch.strided or values.is_nested or values.is_quantized:
        raise ValueError(f"column {name!r}: values must be a plain dense tensor, got layout {values.layout}")
    if values.dim() == 0:
        raise ValueError(f"column {name!r}: values must have the samples on dimension 0, got a single number")
    if values.requires_grad:
        raise ValueError(f"column {name!r}: values require grad, which does not survive moving samples; detach() them")
    return values.resolve_conj().resolve_neg().contiguous()
