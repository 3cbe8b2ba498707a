"""The threads of the id plane, with work of the test's own; see embedding/stages.py."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch

from freescale.embedding.host_ids import HostIds
from freescale.embedding.stages import Batch, Indexing, Job, start_stages

TIMEOUT_S = 30


class Counted(threading.Event):
    """Counts how often it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def set(self) -> None:
        self.times += 1
        super().set()


class Nothing:
    """Work that is done at once, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.error: BaseException | None = None
        self.cores: list[int] = []
        self._fails = fails

    def ask(self, batch: Batch) -> None:
        del batch
        self.cores.append(torch.get_num_threads())

    def index(self, found: Indexing) -> None:
        del found
        self.cores.append(torch.get_num_threads())
        if self._fails:
            raise ArithmeticError("no arrays")

    def fail(self, error: BaseException) -> None:
        self.error = error


def run(work: Nothing, jobs: list[Job]) -> None:
    """Have the threads do jobs, and end."""
    queue: SimpleQueue[Job | None] = SimpleQueue()
    threads = start_stages(queue, work)
    for job in [*jobs, None]:
        queue.put(job)
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def made(*, indexed: bool) -> tuple[Batch, Job]:
    batch = Batch(HostIds([]), ready=Counted())
    return batch, Job(batch, lambda each: [Indexing(each)] if indexed else [])


@pytest.mark.parametrize("indexed", [True, False])
def test_a_batch_is_said_to_be_ready_once(indexed: bool) -> None:
    """A batch that is planned anew is not ready again; a second word about the first plan would be taken for that."""
    batch, job = made(indexed=indexed)
    run(Nothing(), [job])
    assert isinstance(batch.ready, Counted)
    assert batch.ready.times == 1


def test_nobody_waits_for_a_batch_whose_planning_failed_or_was_never_begun() -> None:
    work = Nothing(fails=True)
    batches, jobs = zip(*[made(indexed=True) for _ in range(3)], strict=True)
    run(work, list(jobs))
    assert isinstance(work.error, ArithmeticError)
    assert all(batch.ready.is_set() for batch in batches)


@pytest.mark.usefixtures("three_cores")
def test_the_threads_leave_the_other_cores_to_the_trainer() -> None:
    work = Nothing()
    run(work, [made(indexed=True)[1]])
    assert torch.get_num_threads() == 3
    assert work.cores == [1, 1]
