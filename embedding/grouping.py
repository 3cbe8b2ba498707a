"""Which tables share a row space and an exchange, and where each feature of a batch belongs (section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .optimizer import Adam, Optimizer, RowwiseAdagrad, Sgd
from .planner import Slot
from .tables import Table


@dataclass(frozen=True)
class Place:
    """A feature of a call: the group of its table, and the table's index within the group."""

    feature: str
    group: int
    table: int


def group_tables(
    tables: Sequence[Table], optimizer: Optimizer | Mapping[str, Optimizer]
) -> list[tuple[list[Table], Optimizer]]:
    """Tables of one dimension, dtype and optimizer, in the order of their first."""
    groups: dict[tuple[int, torch.dtype, Optimizer], list[Table]] = {}
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            raise ValueError(f"names of tables must be unique, got '{table.name}' twice")
        names.add(table.name)
        if isinstance(optimizer, Mapping) and table.name not in optimizer:
            raise ValueError(f"optimizer must name one for every table, got none for '{table.name}'")
        rule = optimizer[table.name] if isinstance(optimizer, Mapping) else optimizer
        if not isinstance(rule, Sgd | RowwiseAdagrad | Adam):
            raise TypeError(f"optimizer must be Sgd, RowwiseAdagrad or Adam, got {type(rule).__name__}")
        groups.setdefault((table.embedding_dim, table.dtype, rule), []).append(table)
    if not groups:
        raise ValueError("configs must name at least one table")
    return [(members, rule) for (_, _, rule), members in groups.items()]


def lay_out_slots(calls: Sequence[Sequence[Place]]) -> tuple[list[Slot], list[dict[int, tuple[int, list[int]]]]]:
    """Slots in the order of calls; and, for each call and group, its index in the group and which features it has."""
    slots: list[Slot] = []
    indices: list[dict[int, tuple[int, list[int]]]] = []
    numbers: dict[int, int] = {}
    for call in calls:
        found: dict[int, tuple[int, list[int]]] = {}
        for i, place in enumerate(call):
            if place.group not in found:
                found[place.group] = (numbers.get(place.group, 0), [])
                numbers[place.group] = numbers.get(place.group, 0) + 1
            found[place.group][1].append(i)
            slots.append(Slot(place.feature, place.group, place.table, found[place.group][0]))
        indices.append(found)
    return slots, indices
