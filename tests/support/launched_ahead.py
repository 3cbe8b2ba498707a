"""Starts what the tests of a file look at, some launches at once: ranks in trouble mostly wait for a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rank_processes import Launched

AT_ONCE = 3
Case = tuple[str, ...]


def launches(start: Callable[..., Launched]) -> Any:
    """A fixture that calls `start(*case)` for each case of a file, in order.

    It gives a function that waits for one, and raises what it raised.
    """

    @pytest.fixture(scope="module")
    def result_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Launched]]:
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            begun = {case: pool.submit(start, *case) for case in _cases_of(request)}
            yield lambda case: begun[case].result()
        finally:
            pool.shutdown(cancel_futures=True)

    return result_of


def _cases_of(request: pytest.FixtureRequest) -> list[Case]:
    """Values of the parameter `case` of all tests of this file that are to run, each once."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params["case"] for params in chosen if "case" in params))


def cases(firsts: Sequence[str], seconds: Sequence[str], **more: Any) -> pytest.MarkDecorator:
    """All pairs, for tests that get what became of them from the fixture `case`."""
    pairs = [(first, second) for second in seconds for first in firsts]
    return pytest.mark.parametrize("case", pairs, indirect=True, ids="-".join, **more)
