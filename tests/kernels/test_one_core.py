"""Background threads leave the other cores to the trainer; see kernels/one_core.py."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from freescale.kernels.one_core import use_one_core


def in_a_thread(todo: Callable[[], object] = lambda: None) -> int:
    """Do something in a new thread; how many cores torch uses there then."""
    counts: list[int] = []

    def run() -> None:
        todo()
        counts.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return counts[0]


@pytest.mark.usefixtures("three_cores")
def test_a_thread_that_asks_for_it_uses_one_core_and_no_other_thread_does() -> None:
    assert in_a_thread(use_one_core) == 1
    assert torch.get_num_threads() == 3
    assert in_a_thread() == 3


@pytest.mark.usefixtures("three_cores")
def test_one_core_stays_one_core_after_operations_large_enough_to_be_split() -> None:
    def work() -> None:
        use_one_core()
        torch.sort(torch.arange(200_000).flip(0), stable=True)

    assert in_a_thread(work) == 1
