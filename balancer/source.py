"""Where local batches come from, and how to get back to a place in them: any DataLoader, or a torchdata node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.nodes import BaseNode

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Source(Protocol):
    """Gives local batches, epoch after epoch."""

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on from a state."""
        ...

    def state(self) -> Any:
        """Where the running epoch stands: a state that `start` goes on from with the next batch."""
        ...

    def end_state(self) -> Any:
        """How the next epoch begins, asked when the running one has ended. None: as any epoch."""
        ...


class StatefulSource:
    """A loader with state_dict and load_state_dict, like torchdata's StatefulDataLoader or `read_parquet`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on from a state."""
        if state is not None:
            self._loader.load_state_dict(state)
        return iter(self._loader)

    def state(self) -> Any:
        """Where the running epoch stands."""
        return self._loader.state_dict()

    def end_state(self) -> Any:
        """How the next epoch begins: at its end, such a loader's state is that (the order of a shuffle is in it)."""
        return self._loader.state_dict()


class ReplayedSource:
    """A loader without a state: going on means reading again what was read and throwing it away."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._taken = 0

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on after as many batches as the state says.

        Raises:
            ValueError: The loader shuffles, so a second reading would give other batches.
        """
        self._taken = 0
        if state is None:
            return self._count(iter(self._loader))
        sampler = getattr(self._loader, "sampler", None)
        if state["taken"] and isinstance(sampler, _SHUFFLING):
            raise ValueError(
                f"a DataLoader with {type(sampler).__name__} shuffles and has no state, so it cannot go on; "
                "use torchdata.stateful_dataloader.StatefulDataLoader"
            )
        return itertools.islice(self._count(iter(self._loader)), state["taken"], None)

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._taken += 1
            yield batch

    def state(self) -> Any:
        """How many batches of the epoch were taken."""
        return {"taken": self._taken}

    def end_state(self) -> Any:
        """How the next epoch begins."""
        return None


class NodeSource:
    """A torchdata node."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._node = node

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on from a state."""
        self._node.reset(state)
        return self._node

    def state(self) -> Any:
        """Where the running epoch stands."""
        return self._node.state_dict()

    def end_state(self) -> Any:
        """How the next epoch begins: a node's state at its end would give an empty epoch."""
        return None


def source_of(loader: Any) -> Source:
    """Choose how to read a loader.

    Raises:
        TypeError: It cannot be iterated.
    """
    if isinstance(loader, BaseNode):
        return NodeSource(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulSource(loader)
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"dataloader must be iterable, got {type(loader).__name__}")
    if iter(loader) is loader if not isinstance(loader, DataLoader) else False:
        raise TypeError(
            f"dataloader must start anew each time it is iterated, but {type(loader).__name__} is an iterator; "
            "pass the object that it was made from"
        )
    return ReplayedSource(loader)


def check_share(loader: Any, rank: int, world_size: int) -> None:
    """Refuse a loader that reads the share of another rank, or of another number of ranks.

    Only what says so can be checked: `read_parquet` and DistributedSampler, alone or inside a DataLoader.

    Raises:
        ValueError: Names what is wrong with both numbers; samples would be delivered twice or never.
    """
    sampler = getattr(loader, "sampler", None)
    for part in (loader, getattr(loader, "dataset", None), sampler):
        ranks = getattr(part, "world_size", getattr(part, "num_replicas", None))
        share = getattr(part, "rank", None)
        if isinstance(ranks, int) and isinstance(share, int) and (share, ranks) != (rank, world_size):
            raise ValueError(
                f"{type(part).__name__} reads the share of rank {share} of {ranks}, but this is rank {rank} of "
                f"{world_size}: samples would be delivered twice or never; give it rank={rank} and {world_size} ranks"
            )
