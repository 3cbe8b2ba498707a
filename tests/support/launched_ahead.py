"""Starts what the tests of a file look at, some launches at once: ranks in trouble mostly wait for a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rank_processes import Launched

AT_ONCE = 3
Case = tuple[str, ...]


@contextmanager
def launched_ahead(start: Callable[..., Launched], cases: Sequence[Case]) -> Iterator[Callable[[Case], Launched]]:
    """Call `start(*case)` for each case, in order. Gives a function that waits for one, and raises what it raised."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        begun = {case: pool.submit(start, *case) for case in cases}
        yield lambda case: begun[case].result()
    finally:
        pool.shutdown(cancel_futures=True)


def cases_of(request: pytest.FixtureRequest) -> list[Case]:
    """Values of the parameter `case` of all tests of this file that are to run, each once."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params["case"] for params in chosen if "case" in params))


def cases(firsts: Sequence[str], seconds: Sequence[str], **more: Any) -> pytest.MarkDecorator:
    """All pairs, for tests that get what became of them from the fixture `case`."""
    pairs = [(first, second) for second in seconds for first in firsts]
    return pytest.mark.parametrize("case", pairs, indirect=True, ids="-".join, **more)
