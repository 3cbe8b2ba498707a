"""What the balancer's thread leaves behind: no thread when an epoch ends, and no tensors for itself to free."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from types import GeneratorType

import pytest
import torch

from freescale.balancer import WorldSamples, balance, worker
from freescale.balancer.worker import Worker
from freescale.transport import connect

from loaded_batches import await_no_balancer_threads, balancer_threads


@pytest.fixture(autouse=True)
def _none_of_an_earlier_test() -> None:
    await_no_balancer_threads()


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
    assert not balancer_threads()


def test_tensors_of_planning_are_freed_by_whoever_takes_the_batch() -> None:
    freed_by: list[str] = []

    def plan(world: WorldSamples) -> torch.Tensor:
        owners = torch.zeros(world.num_samples, dtype=torch.int64)
        weakref.finalize(owners, lambda: freed_by.append(threading.current_thread().name))
        return owners

    batches = [{"x": torch.ones(2), "length": torch.tensor([3, 5])}] * 6
    iterator = iter(balance(batches, connect("local"), "length", plan))
    for number in range(1, 5):
        next(iterator)
        assert freed_by == [threading.current_thread().name] * number


@pytest.mark.usefixtures("three_cores")
def test_torch_uses_one_core_in_the_thread_and_as_many_as_before_in_the_trainers() -> None:
    counts: list[int] = []

    class Counting:
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            counts.append(torch.get_num_threads())
            yield {"x": torch.ones(2), "length": torch.tensor([3, 5])}

    for _ in balance(Counting(), connect("local"), "length"):
        assert torch.get_num_threads() == 3
    assert counts == [1]


def test_an_error_that_somebody_keeps_does_not_keep_the_users_iterator() -> None:
    """On Pythons on which a closed generator keeps it: it may be that of a DataLoader, with processes and threads."""

    def plan(world: WorldSamples) -> torch.Tensor:
        raise RuntimeError("on fire")

    batches = [{"x": torch.ones(2), "length": torch.tensor([3, 5])}] * 3
    with pytest.raises(RuntimeError, match="on fire") as kept:
        next(iter(balance(batches, connect("local"), "length", plan)))
    errors: list[BaseException | None] = [kept.value, kept.value.__cause__, kept.value.__context__]
    traces = [traceback.walk_tb(error.__traceback__) for error in errors if error is not None]
    frames = [frame for trace in traces for frame, _ in trace if frame.f_code.co_filename == worker.__file__]
    assert any(frame.f_code.co_name == "_epoch_steps" for frame in frames), "an error comes out of the thread's own"
    assert not any(isinstance(value, GeneratorType) for frame in frames for value in frame.f_locals.values())
