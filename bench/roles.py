"""Guesses which columns of a file are history, candidates and labels (paper, section 2.1).

The rule, in order; `--uih`, `--candidates` and `--label` of the demo overrule it:

1. History: of the lists of integers, the one whose name holds "uih", "hist" or "seq"; else the longest on
   average.
2. Lists of numbers as long as the history in every row go with it (times, kinds of action, …).
3. Label: of the remaining lists of numbers, the one whose name holds "label", "click" or "target".
4. Candidates: of the remaining lists of integers as long as the label in every row, the one whose name holds
   "cand" or "item"; else the first.
5. Without both: the label is the column of one number from 0 to 1 a row whose name holds "label", "click" or "target",
   and the candidate the column of one integer a row whose name holds "cand" or "item"; without one, the history alone
   is scored.
6. Without a label the task is to tell the last item of a history from another.
7. Contents: lists of lists of integers with one list for each candidate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_SAMPLED_ROWS = 1024


@dataclass(frozen=True)
class Roles:
    """Which column does what.

    Attributes:
        uih: Item ids of the history.
        uih_sides: Numbers that go with each item of the history.
        candidates: Item ids to score, lists or one a sample; None where the history alone is scored.
        label: Over 0 for each candidate that was taken, or without candidates for each sample; None to tell the last
            item of the history from another instead.
        contents: For each candidate a list of ids.
        mean_length: Mean length of the history over the rows looked at.
    """

    uih: str
    uih_sides: tuple[str, ...] = ()
    candidates: str | None = None
    label: str | None = None
    contents: tuple[str, ...] = ()
    mean_length: float = 0.0

    @classmethod
    def of(cls, given: dict[str, Any]) -> Roles:
        """Undo what `dataclasses.asdict` and JSON have made of it."""
        lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**given | lists)

    def describe(self) -> str:
        """Say the choice in one line."""
        parts = [f"history {self.uih}" + (f" with {', '.join(self.uih_sides)}" if self.uih_sides else "")]
        if self.label is None:
            parts.append("no label: the task is to tell the last item of each history from another")
        elif self.candidates is None:
            parts.append(f"label {self.label} of each sample")
        else:
            parts.append(
                f"candidates {self.candidates}" + (f" with {', '.join(self.contents)}" if self.contents else "")
            )
            parts.append(f"label {self.label}")
        return "; ".join(parts)


def infer_roles(
    path: str | Path,
    uih: str | None = None,
    candidates: str | None = None,
    label: str | None = None,
) -> Roles:
    """Guess the roles of a file's columns from its first rows.

    Args:
        path: Parquet file.
        uih: Column that is the history, when known.
        candidates: Column that is the candidates, when known.
        label: Column that is the label, when known.

    Returns:
        The roles.

    Raises:
        ValueError: A named column is missing or of the wrong type or length, or no column can be a history.
        OSError: The file cannot be read.
        pyarrow.ArrowInvalid: The file is not Parquet.
    """
    rows, mean_length = _look(path)
    for option, name in (("uih", uih), ("candidates", candidates), ("label", label)):
        if name is not None and name not in rows.schema.names:
            raise ValueError(f"{option} names column {name!r}; the file has {', '.join(rows.schema.names)}")
    lists = {n: pc.list_value_length(rows[n]) for n in rows.schema.names if _is_list(rows.schema.field(n).type)}
    flat = [n for n in rows.schema.names if _is_number(rows.schema.field(n).type)]
    numbers = [n for n in lists if _is_number(rows.schema.field(n).type.value_type)]
    integers = [n for n in numbers if pa.types.is_integer(rows.schema.field(n).type.value_type)]
    uih = _history(uih, [n for n in integers if n not in (candidates, label)], mean_length, rows.schema)
    taken = (uih, candidates, label)
    sides = tuple(n for n in numbers if n not in taken and lists[n].equals(lists[uih]))
    left = {n: lists[n] for n in numbers if n != uih and n not in sides}
    if label in flat or candidates in flat:
        candidates, label = _flat(candidates, label, rows, flat)
    else:
        asked = candidates is not None or label is not None
        candidates, label = _candidates(candidates, label, left, integers)
        if label is None and not asked:
            candidates, label = _flat(None, None, rows, flat)
    contents: tuple[str, ...] = ()
    if candidates in lists:
        nested = [n for n in lists if _is_nested(rows.schema.field(n).type)]
        contents = tuple(n for n in nested if lists[n].equals(lists[candidates]))
    return Roles(uih, sides, candidates, label, contents, mean_length[uih])


def _look(path: str | Path) -> tuple[pa.Table, dict[str, float]]:
    """Read the first rows, and the mean number of values a row of every column over the whole file."""
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        if metadata.num_rows == 0:
            raise ValueError(f"{path} has no rows")
        batch = next(file.iter_batches(batch_size=_SAMPLED_ROWS))
        values: dict[str, int] = {}
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                name = chunk.path_in_schema.split(".")[0]
                values[name] = values.get(name, 0) + chunk.num_values
    return pa.Table.from_batches([batch]), {n: v / metadata.num_rows for n, v in values.items()}


def _history(named: str | None, integers: list[str], mean_length: dict[str, float], schema: pa.Schema) -> str:
    if named is not None:
        if named not in integers:
            raise ValueError(f"uih must name a column of lists of integers, {named!r} is not one")
        return named
    if not integers:
        there = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise ValueError(f"no column can be the history: none is a list of integers; the file has {there}")
    return _named_like(("uih", "hist", "seq"), integers) or max(integers, key=lambda n: mean_length[n])


def _candidates(
    candidates: str | None, label: str | None, left: dict[str, pa.ChunkedArray], integers: list[str]
) -> tuple[str | None, str | None]:
    """Find label and candidates among the lists of numbers left; both or neither, unless one is named."""
    for option, name in (("candidates", candidates), ("label", label)):
        if name is not None and name not in left:
            raise ValueError(
                f"{option} must name a column of lists of numbers other than the history, {name!r} is not one"
            )
    asked = candidates is not None or label is not None
    label = label or _named_like(("label", "click", "target"), [n for n in left if n != candidates])
    fitting = [n for n in left if n in integers and n != label and label and left[n].equals(left[label])]
    candidates = candidates or _named_like(("cand", "item"), fitting) or (fitting[0] if fitting else None)
    if candidates is not None and label is not None:
        if not left[candidates].equals(left[label]):
            raise ValueError(f"candidates {candidates!r} and label {label!r} must have the same lengths in every row")
        return candidates, label
    if asked:
        missing = "label" if label is None else "candidates"
        raise ValueError(f"{missing} must be named too: no other list of numbers fits {candidates or label!r}")
    return None, None


def _flat(candidates: str | None, label: str | None, rows: pa.Table, flat: list[str]) -> tuple[str | None, str | None]:
    """Find label, and candidate if any, among the columns of one number a row."""

    def is_integer(name: str) -> bool:
        return bool(pa.types.is_integer(rows.schema.field(name).type))

    if label is None:  # ids may be called target_item, and ratings do not say what was taken
        label = _named_like(
            ("label", "click", "target"), [n for n in flat if n != candidates and _is_share(rows.column(n))]
        )
    if label is None:
        if candidates is not None:
            raise ValueError(f"label must be named too: no column of a number from 0 to 1 a row fits {candidates!r}")
        return None, None
    fitting = [n for n in flat if n != label and is_integer(n)]
    if candidates is not None and candidates not in fitting:
        raise ValueError(f"candidates {candidates!r} must be integers, one a row as label {label!r}")
    if label not in flat:
        raise ValueError(f"label {label!r} must be numbers, one a row as candidates {candidates!r}")
    return candidates or _named_like(("cand", "item"), fitting), label


def _is_share(column: pa.ChunkedArray) -> bool:
    """Tell whether all values are from 0 to 1."""
    ends = pc.min_max(column.cast(pa.float64(), safe=False))
    least, most = ends["min"].as_py(), ends["max"].as_py()
    return least is not None and 0 <= least <= most <= 1


def _named_like(parts: tuple[str, ...], names: list[str]) -> str | None:
    return next((n for part in parts for n in names if part in n.lower()), None)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_nested(kind: pa.DataType) -> bool:
    inner = kind.value_type
    return _is_list(inner) and bool(pa.types.is_integer(inner.value_type))
