"""`reshard(states, world_size)`: what was left of an epoch, for another number of ranks to go on with (section 3.1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .batches import row_groups
from .partitioners.speeds import forget_speeds

_COUNTS = ("step", "epoch", "dropped_samples", "rank", "world_size")
_NAMES = {*_COUNTS, "source", "exhausted", "partitioner"}


def check_state(state: Any) -> None:
    """Check what `state_dict()` of a balanced loader gave, as far as the loader itself wrote it.

    Raises:
        TypeError: It is no dict.
        ValueError: It lacks something, or something in it has another type.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
    if missing := _NAMES - set(state):
        raise ValueError(f"state must come from state_dict() of a balanced loader; it lacks {sorted(missing)}")
    for name in _COUNTS:
        if type(state[name]) is not int or not 0 <= state[name] < 1 << 62:
            raise ValueError(f"state: {name} must be an integer of at least 0, got {state[name]!r}")
    if type(state["exhausted"]) is not bool:
        raise ValueError(f"state: exhausted must be true or false, got {state['exhausted']!r}")


def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Make the states of `world_size` ranks from those that another number of ranks saved at the same step.

    For loaders over `read_parquet`: the rows that no rank had been handed are dealt anew, row groups that were begun
    among them, so over the whole run every sample is delivered once. Samples fall into other global batches than they
    would have. What a partitioner has learned of samples goes on; speeds of ranks are measured anew, as nobody knows
    who became whom. The epoch after the one that goes on is as any other. States from between two epochs can be dealt
    to any number for every loader that starts each epoch alike, such as a DataLoader.

    Args:
        states: What `state_dict()` gave on every rank, in any order. They are not changed.
        world_size: The new number of ranks. For as many as there were, each gets its own state back.

    Returns:
        The state for each rank to load, in order of rank.

    Raises:
        ValueError: A rank is missing or there twice, ranks were at different steps, or one has a loader whose place in
            the epoch cannot be dealt anew.
        TypeError: A state is no dict.

    Example:
        >>> from freescale.balancer import balance, reshard
        >>> from freescale.transport import connect
        >>> state = balance([], connect("local"), lengths="length").state_dict()
        >>> [(new["rank"], new["world_size"]) for new in reshard([state], world_size=2)]
        [(0, 2), (1, 2)]
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    ordered = _in_order(states)
    if world_size == len(ordered):
        return [copy.deepcopy(dict(state)) for state in ordered]
    sources = _sources(ordered, world_size)
    ended = all(state["exhausted"] for state in ordered)
    shared = {**ordered[0], "exhausted": ended, "world_size": world_size}
    shared["partitioner"] = forget_speeds(shared["partitioner"])
    return [copy.deepcopy({**shared, "rank": rank, "source": sources[rank]}) for rank in range(world_size)]


def _in_order(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Check that states are those of all ranks, once each and of the same step, and put them in order."""
    if isinstance(states, Mapping) or not len(states):
        raise ValueError("states must be a sequence with the state of every rank that saved one, got " + repr(states))
    for state in states:
        check_state(state)
    of_rank = {state["rank"]: state for state in states}
    ranks = sorted(state["rank"] for state in states)
    sizes = sorted({state["world_size"] for state in states})
    if sizes != [len(states)] or ranks != list(range(len(states))):
        raise ValueError(
            f"states must be one of each rank, got {len(states)}: of ranks {ranks}, which were ranks of "
            f"{' and '.join(map(str, sizes))}"
        )
    for name in ("epoch", "step", "dropped_samples"):
        if len({state[name] for state in states}) > 1:
            found = {rank: of_rank[rank][name] for rank in ranks}
            raise ValueError(f"states must all be of the same {name}, got by rank {found}")
    return [of_rank[rank] for rank in ranks]


def _sources(states: Sequence[Mapping[str, Any]], world_size: int) -> list[Any]:
    """Where the sources of the new ranks begin."""
    sources = [state["source"] for state in states]
    if all(source is None for source in sources) and states[0]["step"] == 0:
        return [None] * world_size  # the epoch has not begun, and begins as any other
    for rank, source in enumerate(sources):
        if not row_groups.is_state(source):
            raise ValueError(
                f"only places of read_parquet can be dealt to another number of ranks, and rank {rank} has another "
                f"loader, or none that has begun, at step {states[0]['step']}: go on with {len(states)} ranks"
            )
    ended = [state["exhausted"] for state in states]
    if all(ended):
        return row_groups.deal_anew(sources, [False] * len(sources), world_size)
    return row_groups.deal_anew(sources, ended, world_size)
