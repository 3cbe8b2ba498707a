"""The columns that a user's batch falls into, and whether they fit together (paper, section 4.1)."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ..batches.column import MAX_DEPTH, Column


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

    def check_order(self) -> None:
        """Raise ValueError when values and lengths are declared the other way round: others would be blamed for it."""
        for name, (values, lengths) in self._values.items():
            if len(lengths) > 1 or not _could_be_lengths(values):
                continue
            declared = self._lengths[lengths[0]]
            fits = _could_be_lengths(declared) and int(declared.to(torch.int64).sum()) == len(values)
            if not fits and 0 < int(values.to(torch.int64).sum()) == len(declared):
                raise ValueError(
                    f"jagged={{{name!r}: {lengths[0]!r}}} has values and lengths the other way round: the numbers in "
                    f"field {name!r} add up to the {len(declared)} rows of field {lengths[0]!r}; "
                    f"say jagged={{{lengths[0]!r}: {name!r}}}"
                )

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
        if not sizes:
            raise ValueError("the batch holds no tensor, so it has no samples to move")
        if len(set(sizes.values())) > 1:
            first = self._reference(sizes)
            odd = next(name for name, size in sizes.items() if size != sizes[first])
            raise ValueError(self._sizes_differ(odd, first, sizes))
        return next(iter(sizes.values()))

    def _reference(self, sizes: dict[str, int]) -> str:
        """A field with the right number of samples: one that knows it, else one of the size that most have."""
        jagged = [name for name, column in self._columns.items() if column.depth]
        if sure := [*self.batch_sizes, *jagged]:
            return sure[0]
        declared = {name: paths for name, paths in self._undeclared(sizes).items() if len(paths) == 1}
        if declared:
            return next(iter(declared.values()))[0]
        counts = Counter(sizes.values())
        return min(sizes, key=lambda name: (-counts[sizes[name]], sizes[name]))

    def _undeclared(self, sizes: dict[str, int]) -> dict[str, tuple[str, ...]]:
        """Dense fields whose rows are as many as the numbers in another field add up to: likely values and lengths."""
        dense = {name: column.values for name, column in self._columns.items() if not column.depth}
        sums = {name: int(values.to(torch.int64).sum()) for name, values in dense.items() if _could_be_lengths(values)}
        owners: dict[str, tuple[str, ...]] = {}
        for name in dense:
            for lengths, total in sums.items():
                if total == sizes[name] != sizes[lengths] and name not in owners:
                    owners[name] = (lengths,)
        return {name: (*owners.get(paths[0], ()), *paths)[-MAX_DEPTH:] for name, paths in owners.items()}

    def _are_offsets(self, name: str) -> bool:
        """Whether what was declared as the lengths of a jagged field begins with 0 and ends with its rows."""
        if name not in self._values:
            return False
        values, paths = self._values[name]
        lengths = self._lengths[paths[-1]]
        return len(lengths) > 1 and int(lengths[0]) == 0 and int(lengths[-1]) == len(values) < int(lengths.sum())

    def _sizes_differ(self, name: str, first: str, sizes: dict[str, int]) -> str:
        undeclared = {n: p for n, p in self._undeclared(sizes).items() if sizes[n] != sizes[first]}
        said = {n: paths[0] if len(paths) == 1 else paths for n, paths in undeclared.items()}
        if (entries := _one_entry_a_sample(name) or _one_entry_a_sample(first)) is not None:
            hint = f"{entries} looks like one entry a sample: join them in collate_fn, torch.cat(…) and their lengths"
        elif self._are_offsets(first):
            hint = f"the lengths that jagged= names for {first!r} look like offsets: give offsets.diff()"
        elif name in undeclared:
            hint = f"the numbers in {undeclared[name][-1]!r} add up to that: if they are its lengths, say jagged={said}"
        else:
            hint = (
                f"for the values of a jagged feature say which field holds its lengths, jagged={{{name!r}: '<path>'}}"
            )
        return (
            f"field {name!r} has {sizes[name]} rows on dimension 0, field {first!r} has {sizes[first]} samples. Each "
            f"field needs one row a sample; {hint}; anything else has to be left out of the batch"
        )


def _one_entry_a_sample(name: str) -> str | None:
    """The list that a field lies in, by the number in its path; None for the fields of a tuple that is the batch."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if place is None or len(parts) == 1:
        return None
    return f"field {'.'.join(parts[:place])!r}" if place else "the batch"


def _could_be_lengths(values: Tensor) -> bool:
    whole = not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool)
    return whole and values.dim() == 1 and bool((values.to(torch.int64) >= 0).all())
