"""Three threads that every batch passes on its way through the id plane, and what is handed on (section 3.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from ..kernels.one_core import use_one_core
from ..transport.background import BackgroundThread
from .device_arrays import Upload
from .errors import IdOutOfRange
from .forms import Bits
from .host_ids import HostIds
from .plan import GroupPlan


@dataclass(eq=False)
class Batch:
    """One batch on its way through the id plane.

    Attributes:
        ids: One entry a slot, in host memory.
        groups: Plans of the groups, once `ready`.
        upload: Index arrays for the forward.
        successor: Index arrays for the backward, once the next batch is ready.
        fault: Slot, place and value of an id that its table does not have.
        error: An id out of range, of this batch or of one before it, on any rank: the same on all.
        ready: Set when done, or failed.
    """

    ids: HostIds
    fault: list[int] | None = None
    groups: list[GroupPlan] = field(default_factory=list)
    upload: Upload | None = None
    successor: Upload | None = None
    error: IdOutOfRange | None = None
    ready: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Job:
    """One batch on its way through the stages.

    Attributes:
        batch: The batch.
        talk: What to do with the other ranks.
        indexed: Batches whose index arrays are then to be made, each after what it needs; each is ready after it.
    """

    batch: Batch
    talk: Callable[[Batch], list[Indexing]]
    indexed: list[Indexing] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Indexing:
    """A batch whose index arrays are to be made.

    Attributes:
        batch: The batch.
        before: The batch before it, if this one decides what of its gradients is urgent.
        urgent: Bits of the batch before, by group: of its keys and of its rows.
        trains: Whether everything is urgent, so that the backward can be prepared.
    """

    batch: Batch
    before: Batch | None = None
    urgent: list[tuple[Bits, Bits]] = field(default_factory=list)
    trains: bool = False


class Work(Protocol):
    """What the threads do.

    Attributes:
        error: What went wrong first; nothing is done after it.
    """

    error: BaseException | None

    def ask(self, batch: Batch) -> None:
        """Find a batch's distinct ids."""

    def index(self, found: Indexing) -> None:
        """Make index arrays."""

    def fail(self, error: BaseException) -> None:
        """Remember an error, and tell the others."""


def start_stages(
    jobs: SimpleQueue[Job | None], work: Work, cut: Callable[[], None] = lambda: None
) -> list[BackgroundThread]:
    """Start the threads, each handing on to the next.

    Args:
        jobs: What they are to do; None ends them.
        work: How.
        cut: Lets what they wait for fail, when the process ends.
    """

    def ask_first(job: Job) -> None:
        work.ask(job.batch)

    def talk(job: Job) -> None:
        job.indexed = job.talk(job.batch)

    def index(job: Job) -> None:
        # Each is said to be ready once: planning may go on with it then, and say that it is not.
        for each in job.indexed:
            work.index(each)
            each.batch.ready.set()
        if all(each.batch is not job.batch for each in job.indexed):
            job.batch.ready.set()

    queues: list[SimpleQueue[Job | None]] = [jobs, SimpleQueue(), SimpleQueue()]
    threads: list[BackgroundThread] = []
    for stage, (step, name) in enumerate(((ask_first, "ask"), (talk, "talk"), (index, "index"))):
        run = partial(_run, queues[stage], queues[stage + 1] if stage < 2 else None, step, work)
        threads.append(BackgroundThread(f"freescale-embedding-{name}", run, partial(jobs.put, None), cut))
        threads[-1].start()
    return threads


def _run(
    jobs: SimpleQueue[Job | None],
    following: SimpleQueue[Job | None] | None,
    step: Callable[[Job], None],
    work: Work,
) -> None:
    use_one_core()
    job = jobs.get()
    while job is not None:
        try:
            if work.error is None:
                step(job)
        except BaseException as error:
            work.fail(error)
        if following is not None:
            following.put(job)
        elif work.error is not None:
            for batch in (job.batch, *[each.batch for each in job.indexed]):
                batch.ready.set()
        del job  # keeps a batch alive
        job = jobs.get()
    if following is not None:
        following.put(None)
