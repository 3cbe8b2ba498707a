"""Runs one function per rank in threads of the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from freescale.transport import Transport, local_group

Result = TypeVar("Result")


def run_in_threads(
    world_size: int,
    function: Callable[[Transport], Result],
    *,
    timeout_s: float = 120.0,
    transports: list[Transport] | None = None,
) -> list[Result]:
    """Call `function(transport)` once per rank, each in a thread of its own, over the `local` backend.

    When a rank raises, its transport is closed, so that the others learn of it at once; the error of the rank that
    raised first is raised here. Threads that are not back after `timeout_s` are a failure.

    Args:
        world_size: Number of ranks.
        function: Called with the rank's transport.
        timeout_s: Deadline of the whole run and of every wait, in seconds.
        transports: Transports to use instead of a new local group. Length world_size.

    Returns:
        What the ranks returned, rank 0 first.
    """
    transports = local_group(world_size, timeout_s=timeout_s) if transports is None else transports
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(transport: Transport) -> None:
        try:
            results[transport.rank] = function(transport)
        except BaseException as error:
            errors.append(error)
            transport.close()

    threads = [threading.Thread(target=run, args=(t,), daemon=True, name=f"rank {t.rank}") for t in transports]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 60 - time.monotonic()))
    if errors:
        raise errors[0]
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"not back after {timeout_s} s: {stuck}"
    return [results[rank] for rank in range(world_size)]
