"""Where local batches come from, and how to get back to a place in them: any DataLoader, or a torchdata node."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

if TYPE_CHECKING:
    from torchdata.nodes import BaseNode

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_REPLAY_VERSION = 2  # of states: how the checksum is taken; the first ones said no version, and some had another
_OTHER_VERSION = (
    "another version of freescale saved the state in mid-epoch and took the checksum of its last batch in another way: "
    "then only that version can go on to the end of the epoch"
)
_USE_STATEFUL = "use a loader with a state, such as torchdata.stateful_dataloader.StatefulDataLoader"


class Source(Protocol):
    """Gives local batches, epoch after epoch."""

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on from a state."""
        ...

    def state(self, fingerprint: Callable[[], int]) -> Any:
        """Where the running epoch stands: a state that `start` goes on from with the next batch, and never changes.

        Args:
            fingerprint: Gives a checksum of the batch taken last.
        """
        ...

    def end_state(self) -> Any:
        """How the next epoch begins, asked when the running one has ended. None: as any epoch."""
        ...

    def go_to_next(self, end_state: Any) -> None:
        """Have the next epoch begin as `end_state` said, in a process where the running one was not read."""
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

    def state(self, fingerprint: Callable[[], int]) -> Any:
        """Where the running epoch stands."""
        del fingerprint
        return copy.deepcopy(self._loader.state_dict())

    def end_state(self) -> Any:
        """How the next epoch begins: at its end, such a loader's state is that (the order of a shuffle is in it)."""
        return copy.deepcopy(self._loader.state_dict())

    def go_to_next(self, end_state: Any) -> None:
        """Have the next epoch begin as `end_state` said."""
        self._loader.load_state_dict(end_state)


class ReplayedSource:
    """A loader without a state: going on means reading again what was read and throwing it away.

    Args:
        loader: Any iterable that begins anew each time.
        fingerprint: A checksum of a batch. The last batch that is thrown away must be the one that was taken last;
            else the loader shuffles, and samples would be lost and repeated.
    """

    def __init__(self, loader: Any, fingerprint: Callable[[Any], int]) -> None:
        self._loader = loader
        self._fingerprint = fingerprint
        self._taken = 0

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on after as many batches as the state says.

        Raises:
            ValueError: The loader shuffles, so a second reading would give other batches; or another version of this
                package saved the state, and nobody can tell whether it does.
        """
        self._taken = 0
        if not state or not state["taken"]:
            return self._count(iter(self._loader))
        self.refuse_shuffling()
        if (version := state.get("version")) not in (None, _REPLAY_VERSION):
            raise ValueError(f"state version must be {_REPLAY_VERSION}, got {version!r}: {_OTHER_VERSION}")
        return self._replay(state["taken"], state["fingerprint"], "" if version else f", unless {_OTHER_VERSION}")

    def refuse_shuffling(self) -> None:
        """Raise ValueError if the loader says that it shuffles. One that does not say so is found when it goes on."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        for sampler in (getattr(self._loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if isinstance(sampler, _SHUFFLING):
                raise ValueError(
                    f"a DataLoader with {type(sampler).__name__} shuffles and has no state: it cannot go on; "
                    f"{_USE_STATEFUL}"
                )
        if getattr(getattr(self._loader, "dataset", None), "shuffles", False):
            raise ValueError(
                f"a DataLoader over a shuffled read_parquet has no state: it cannot go on; {_USE_STATEFUL}, or balance "
                "the source itself"
            )

    def _replay(self, taken: int, fingerprint: int, doubt: str) -> Iterator[Any]:
        batches = self._count(iter(self._loader))
        for _ in range(taken):
            last = next(batches, None)
        if self._taken < taken:
            raise ValueError(f"the state was saved after {taken} batches, but the loader has only {self._taken} now")
        if self._fingerprint(last) != fingerprint:
            raise ValueError(
                f"batch {taken - 1} is not what it was when the state was saved: the loader shuffles or changed, "
                f"so it cannot go on; {_USE_STATEFUL}{doubt}"
            )
        for batch in batches:  # noqa: UP028 - `yield from` would close the user's iterator with this one
            yield batch

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._taken += 1
            yield batch

    def state(self, fingerprint: Callable[[], int]) -> Any:
        """How many batches of the epoch were taken, and which was the last."""
        return {"version": _REPLAY_VERSION, "taken": self._taken, "fingerprint": fingerprint()}

    def end_state(self) -> Any:
        """How the next epoch begins."""
        return None

    def go_to_next(self, end_state: Any) -> None:
        """Every epoch begins alike."""


class NodeSource:
    """A torchdata node."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._node = node

    def start(self, state: Any | None) -> Iterator[Any]:
        """Begin an epoch, or go on from a state."""
        self._node.reset(state)
        return self._node

    def state(self, fingerprint: Callable[[], int]) -> Any:
        """Where the running epoch stands."""
        del fingerprint
        return copy.deepcopy(self._node.state_dict())

    def end_state(self) -> Any:
        """How the next epoch begins: a node's state at its end would give an empty epoch."""
        return None

    def go_to_next(self, end_state: Any) -> None:
        """Every epoch begins alike."""


def _is_node(loader: Any) -> TypeGuard[BaseNode[Any]]:
    """Whether it is a torchdata node: whoever has one has imported its class."""
    nodes = sys.modules.get("torchdata.nodes")
    return nodes is not None and isinstance(loader, nodes.BaseNode)


def source_of(loader: Any, fingerprint: Callable[[Any], int]) -> Source:
    """Choose how to read a loader.

    Raises:
        TypeError: It cannot be iterated.
    """
    if _is_node(loader):
        return NodeSource(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulSource(loader)
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"dataloader must be iterable, got {type(loader).__name__}")
    if hasattr(loader, "__next__"):
        raise TypeError(
            f"dataloader must start anew each time it is iterated, but {type(loader).__name__} is an iterator; "
            "pass the object that it was made from; for a generator, one of a class whose __iter__ yields the batches"
        )
    return ReplayedSource(loader, fingerprint)


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
