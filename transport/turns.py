"""Ranks meet over a store before they connect, and connect for one channel at a time (paper, section 3.3).

A connection to a store of torch.distributed does one thing at a time: a thread that waits for a key keeps the others of
its process from saying anything, also what peers wait for. Threads that made channels at once, in another order on
another rank, would wait for each other until the deadline. So nobody waits for a key before it is known to come: ranks
say that they are here, and look again and again whether all are; then one rank decides whose turn it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .errors import TransportError, TransportTimeout

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0003, 0.01
_LONGEST_NAP_A_RANK_S = 0.0001  # a store answers some ten thousand questions a second


class Turns:
    """Turns at a store that ranks share.

    Args:
        store: The store, by the one connection that all channels of this rank use.
        rank: This rank; rank 0 decides.
        world_size: Number of ranks.
        hear: Called now and then while waiting; what it says of a failed rank is raised.
    """

    def __init__(self, store: Any, rank: int, world_size: int, hear: Callable[[], str | None]) -> None:
        self._store, self._rank, self._world_size, self._hear = store, rank, world_size, hear
        self._deciding = threading.Lock()

    @contextmanager
    def turn(self, name: str, timeout_s: float, note: str) -> Iterator[str]:
        """Around what ranks do over the store together: when all have come, and no other name has its turn. Collective.

        Whoever is late for one name keeps nobody from another. Gives what rank 0 notes.

        Raises:
            TransportTimeout: Some rank has not come.
            TransportError: One has failed.
        """
        deadline = time.monotonic() + timeout_s
        self._store.set(f"{name}/here/{self._rank}", "")
        if self._store.add(f"{name}/number", 1) == self._world_size:
            self._store.set(f"{name}/all", "")
        if self._rank:
            self._await(name, "go", deadline, timeout_s)
            yield self._store.get(f"{name}/go").decode(errors="replace")
            return
        self._await(name, "all", deadline, timeout_s)
        if not self._deciding.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._timeout(name, timeout_s)
        try:
            self._store.set(f"{name}/go", note)
            yield note
        finally:
            self._deciding.release()

    def forget(self, name: str) -> None:
        """Take away this rank's keys of a name whose turn is over, once all ranks are known to have had it."""
        keys = [f"here/{self._rank}", *(("number", "all", "go") if self._rank == 0 else ())]
        with suppress(RuntimeError):  # a store that is gone, or cannot do this
            for key in keys:
                self._store.delete_key(f"{name}/{key}")

    def _await(self, name: str, what: str, deadline: float, timeout_s: float) -> None:
        nap_s = _SHORTEST_NAP_S
        while not self._store.check([f"{name}/{what}"]):
            if time.monotonic() > deadline:
                raise self._timeout(name, timeout_s)
            if nap_s >= _LONGEST_NAP_S and (said := self._hear()) is not None:
                raise TransportError(said)
            time.sleep(nap_s)
            nap_s = min(nap_s * 1.5, max(_LONGEST_NAP_S, self._world_size * _LONGEST_NAP_A_RANK_S))

    def _timeout(self, name: str, timeout_s: float) -> TransportTimeout:
        absent = [peer for peer in range(self._world_size) if not self._store.check([f"{name}/here/{peer}"])]
        who = f"missing: ranks {absent}" if absent else "all have come, but other channels were being made"
        return TransportTimeout(
            f"rank {self._rank} of {self._world_size} waited {timeout_s:g} s for the others to make a channel; {who}"
        )
