"""The columns that a user's batch falls into, and whether they fit together (paper, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batches.column import Column


class Parts:
    """Gathers columns while the tree of a batch is walked.

    Attributes:
        batch_sizes: What fields that know their number of samples say, by path.
    """

    def __init__(self) -> None:
        self.batch_sizes: dict[str, int] = {}
        self._columns: dict[str, Column] = {}
        self._values: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
        self._lengths: dict[str, Tensor] = {}
        self._units: dict[str, str] = {}

    def add(self, name: str, column: Column, unit: str | None = None) -> None:
        """Add a column.

        Args:
            name: Path of the field.
            column: Its samples.
            unit: What its integers mean, "datetime64[s]" say, where the dtype alone does not tell.

        Raises:
            ValueError: Two fields have the same path.
        """
        self._check_new(name)
        self._columns[name] = column
        if unit is not None:
            self._units[name] = unit

    def add_values(self, name: str, values: Tensor, lengths: tuple[str, ...], unit: str | None = None) -> None:
        """Add a column whose lengths are other fields, maybe not seen yet."""
        self.add(name, Column(values), unit)
        self._values[name] = (values, lengths)

    def add_lengths(self, name: str, lengths: Tensor) -> None:
        """Add a field that is the lengths of others."""
        self._check_new(name)
        self._lengths[name] = lengths

    def _check_new(self, name: str) -> None:
        if name in self._columns or name in self._lengths:
            raise ValueError(f"two fields of the batch are called {name!r}; rename one of them")

    def joined(self) -> tuple[dict[str, Column], int]:
        """Put values and their lengths together, and count the samples.

        A unit becomes one more column, without a byte in it: columns are what ranks compare.

        Raises:
            ValueError: Fields have different numbers of samples, or there is none to tell; names the fields.
        """
        for name, (values, lengths) in self._values.items():
            self._columns[name] = Column(values, tuple(self._lengths[path] for path in lengths))
        batch_size = self._batch_size()
        for name, unit in self._units.items():
            self.add(f"{name}: {unit}", Column(torch.empty((batch_size, 0), dtype=torch.uint8)))
        return self._columns, batch_size

    def _batch_size(self) -> int:
        sizes = self.batch_sizes | {name: column.batch_size for name, column in self._columns.items()}
        jagged = [name for name, column in self._columns.items() if column.depth]
        first = next(iter([*self.batch_sizes, *jagged, *sizes]), None)
        if first is None:
            raise ValueError("the batch holds no tensor, so it has no samples to move")
        for name, size in sizes.items():
            if size != sizes[first]:
                raise ValueError(_sizes_differ(name, size, first, sizes[first]))
        return sizes[first]


def _sizes_differ(name: str, size: int, first: str, expected: int) -> str:
    return (
        f"field {name!r} has {size} rows on dimension 0, field {first!r} has {expected} samples. Each field needs one "
        f"row a sample. For the values of a jagged feature say which field holds its lengths: "
        f"jagged={{{name!r}: '<its lengths>'}}; anything else has to be left out of the batch"
    )
