"""Deals row groups to ranks, and deals what is left of an epoch to another number of them (paper, section 4.1).

Where every rank stood when the epoch was stopped says what is left of it, whoever had what. So a state holds these
places, one list for each time that the epoch was dealt anew, and not the row groups themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Place = list[int]
"""Row groups of a rank that are behind it, and rows of the next one that are."""

STATE_VERSION = 2
_ALL = 1 << 60  # row groups behind a rank for which the epoch has ended


@dataclass(frozen=True)
class RowGroup:
    """A row group, or what is left of one.

    Attributes:
        path: Its file.
        index: Its number in the file.
        num_rows: Rows to read.
        first_row: The first of them.
    """

    path: str
    index: int
    num_rows: int
    first_row: int = 0


def left_over(groups: Sequence[RowGroup], places: Sequence[Place]) -> list[RowGroup]:
    """What ranks that were dealt `groups` in turn have not read, in the same order.

    Example:
        >>> groups = [RowGroup("a", index, 10) for index in range(4)]
        >>> [(left.index, left.first_row) for left in left_over(groups, [[1, 0], [0, 7]])]
        [(1, 7), (2, 0), (3, 0)]
    """
    left = []
    for turn, group in enumerate(groups):
        behind, row = places[turn % len(places)]
        row = row if turn // len(places) == behind else 0
        if turn // len(places) >= behind and row < group.num_rows:
            left.append(replace(group, first_row=group.first_row + row, num_rows=group.num_rows - row))
    return left


def checked_dealt(dealt: Any) -> list[list[Place]]:
    """Check the places in a state.

    Raises:
        ValueError: They are no lists of places; what they say of groups that exist can be anything.
    """

    def is_place(place: Any) -> bool:
        return type(place) is list and len(place) == 2 and all(type(n) is int and 0 <= n < 1 << 62 for n in place)

    if type(dealt) is not list or not all(type(each) is list and each and all(map(is_place, each)) for each in dealt):
        raise ValueError(f"dealt of the state must be lists of [row groups, rows], got {dealt!r}")
    return [[list(place) for place in places] for places in dealt]


def checked_count(state: Mapping[str, Any], name: str) -> int:
    """A number in a state.

    Raises:
        ValueError: It is no integer of at least 0, or beyond all reason.
    """
    value = state.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} of the state must be an integer of at least 0, got {value!r}")
    return value


def is_state(state: Any) -> bool:
    """Whether something looks like a state of `read_parquet`."""
    return isinstance(state, Mapping) and {"files", "group", "row", "rows_read", "dealt"} <= set(state)


def deal_anew(states: Sequence[Mapping[str, Any]], ended: Sequence[bool], world_size: int) -> list[dict[str, Any]]:
    """States of another number of ranks that together read what was left of the epoch.

    Args:
        states: Of all ranks of before, in order.
        ended: Ranks for which the epoch had ended; their states begin the next one. At least one must be false.
        world_size: The new number of ranks.

    Raises:
        ValueError: The states do not belong together; says which and why.
    """
    running = next(rank for rank, has_ended in enumerate(ended) if not has_ended)
    first = states[running]
    epoch, dealt = checked_count(first, "epoch"), checked_dealt(first.get("dealt"))
    same = {name: first.get(name) for name in ("files", "shuffle", "seed")}
    places = []
    for rank, state in enumerate(states):
        wanted = {"version": STATE_VERSION, **same, "rank": rank, "world_size": len(states)}
        wanted |= {"epoch": epoch + 1, "group": 0} if ended[rank] else {"epoch": epoch, "dealt": dealt}
        for name, value in wanted.items():
            if repr(state.get(name)) != repr(value):
                raise ValueError(f"read_parquet of rank {rank}: {name} must be {value!r}, got {state.get(name)!r}")
        places.append([_ALL, 0] if ended[rank] else [checked_count(state, "group"), checked_count(state, "row")])
    if any(place != [0, 0] for place in places):
        dealt.append(places)
    anew = {**first, "group": 0, "row": 0, "rows_read": 0, "dealt": dealt, "world_size": world_size}
    return [copy.deepcopy({**anew, "rank": rank}) for rank in range(world_size)]
