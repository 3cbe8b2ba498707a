"""Runs a function once per rank, ranks being threads of this process, with a deadline."""

import threading
from collections.abc import Callable
from typing import TypeVar

from freescale.transport import Transport, local_group

T = TypeVar("T")


def run_ranks(
    world_size: int, function: Callable[[Transport], T], *, timeout_s: float = 20.0, deadline_s: float = 60.0
) -> list[T]:
    """Call `function(transport)` on each rank and return the results in rank order; the lowest rank's error is raised.

    Args:
        world_size: Number of ranks.
        function: What each rank does.
        timeout_s: Deadline of each wait inside the transport.
        deadline_s: Deadline for everything; a rank that is not done by then is an AssertionError.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(transport: Transport) -> None:
        try:
            results[transport.rank] = function(transport)
        except BaseException as error:
            errors[transport.rank] = error

    transports = local_group(world_size, timeout_s=timeout_s)
    threads = [threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    for transport in transports:
        transport.close()
    if errors:
        raise errors[min(errors)]
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"ranks {stuck} are not done after {deadline_s} s"
    return [results[rank] for rank in range(world_size)]
