"""The balancer's thread is gone when an epoch is: a process may end with the loop that was its last line."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from freescale.balancer import balance
from freescale.balancer.worker import Worker
from freescale.transport import connect


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_is_left_when_the_last_batch_was_taken(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Worker._run_to_the_end

    def slow(worker: Worker) -> None:
        run(worker)
        time.sleep(0.3)  # an interpreter that ends meanwhile aborts, if the thread is in a destructor of torch's

    monkeypatch.setattr(Worker, "_run_to_the_end", slow)
    batches = [{"x": torch.ones(2), "length": torch.tensor([3, 5])}] * 3
    if fails:
        batches.append({"x": torch.ones(2)})
    loader = balance(batches, connect("local"), "length")
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises((StopIteration, RuntimeError)):
        next(iterator)
    assert not any(thread.name == "freescale-balancer" for thread in threading.enumerate())
