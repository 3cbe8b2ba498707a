"""What all ranks must have alike when they make their tables, as text and as numbers to compare (section 3.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from .optimizer import Optimizer
from .tables import Table


def describe_settings(
    groups: Sequence[tuple[Sequence[Table], Optimizer]],
    calls: Sequence[Sequence[tuple[str, str]]],
    others: Mapping[str, Any],
) -> dict[str, str]:
    """Settings by name, in the order in which they are compared.

    Args:
        groups: Tables and optimizer of each.
        calls: Feature and table of each lookup, by call.
        others: Further settings.

    Example:
        >>> from freescale.embedding import Sgd
        >>> describe_settings([([Table("item", 5, 4)], Sgd(lr=0.1))], [[("item", "item")]], {"synchronous": False})
        {'tables': 'item [5, 4] float32', 'lookups': 'item', 'optimizer': 'item Sgd(lr=0.1)', 'synchronous': 'False'}
    """
    tables = sorted((table, rule) for table, rule in _with_rules(groups).items())
    return {
        "tables": ", ".join(table for table, _ in tables),
        "lookups": "; ".join(", ".join(feature for feature, _ in call) for call in calls),
        "optimizer": ", ".join(f"{table.split(' ', 1)[0]} {rule}" for table, rule in tables),
        **{name: str(value) for name, value in others.items()},
    }


def _with_rules(groups: Sequence[tuple[Sequence[Table], Optimizer]]) -> dict[str, str]:
    """The optimizer of each table, both as text."""
    found: dict[str, str] = {}
    for members, rule in groups:
        for table in members:
            padding = "" if table.padding_idx is None else f" padding_idx={table.padding_idx}"
            shape, dtype = [table.num_embeddings, table.embedding_dim], str(table.dtype).removeprefix("torch.")
            found[f"{table.name} {shape} {dtype}{padding}"] = repr(rule)
    return found


def digest(text: str) -> int:
    """A number that tells texts apart, the same in every process.

    Example:
        >>> digest("Sgd(lr=0.1)") == digest("Sgd(lr=0.2)")
        False
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
