"""Where embedding traffic runs beside the trainer: two lanes, urgent and background (section 3.2).

A lane takes jobs in order. On a GPU a job is put on the lane's stream and the host goes on; what uses its result waits
on its own stream. On the CPU background jobs run in a thread, and urgent ones at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ..transport import Pending, Transport
from ..transport.background import BackgroundThread
from .device_arrays import Upload

Job = Callable[[Transport], Pending | None]
_PATIENCE_S = 2.0
_NAP_S = 0.001
LAST_PATIENCE_S = 10.0  # when the process ends: peers may be late, and at the same messages


class Ticket(ABC):
    """A job under way."""

    @abstractmethod
    def wait(self) -> Tensor | None:
        """Have the caller (on a GPU, its current stream) wait for the job; what its transfer brought.

        Raises:
            TransportError: The transfer failed.
        """


class Lane(ABC):
    """Runs jobs one after the other.

    Attributes:
        transport: The lane's own channel.
    """

    transport: Transport

    @abstractmethod
    def run(self, job: Job, *used: Tensor, uploads: Sequence[Upload] = (), after: Ticket | None = None) -> Ticket:
        """Run a job after what the caller has done so far, and after another lane's job.

        Args:
            job: Gets the channel; the transfer that it returns is waited for in the lane.
            used: Tensors of the caller that the job reads or writes.
            uploads: Index arrays that it reads.
            after: A job that comes first.
        """

    @abstractmethod
    def drain(self) -> None:
        """Have the caller (on a GPU, its current stream) wait for all jobs."""

    @abstractmethod
    def close(self) -> None:
        """Give back the channel and the thread, after what is under way."""

    def finish(self, deadline: float) -> None:
        """As `close`, with more patience: the process ends. A lane in a thread has patience of its own."""
        del deadline
        self.close()


class InlineLane(Lane):
    """Runs jobs on the caller's thread; only their last transfer is waited for later."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def run(self, job: Job, *used: Tensor, uploads: Sequence[Upload] = (), after: Ticket | None = None) -> Ticket:
        """See `Lane.run`."""
        del used, uploads, after  # arrays in host memory are there
        return _Transfer(job(self.transport))

    def drain(self) -> None:
        """See `Lane.drain`: nothing is left of a job but rows on their way to this rank."""

    def close(self) -> None:
        """See `Lane.close`."""
        self.transport.close()


class _Transfer(Ticket):
    def __init__(self, pending: Pending | None) -> None:
        self._pending = pending

    def wait(self) -> Tensor | None:
        return None if self._pending is None else self._pending.wait()


class ThreadLane(Lane):
    """Runs jobs in a thread, for tables in host memory."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._jobs: SimpleQueue[_ThreadTicket | None] = SimpleQueue()
        self._last: _ThreadTicket | None = None
        run, ask = partial(_serve, self._jobs, transport), partial(self._jobs.put, None)
        self._threads = [BackgroundThread("freescale-embedding-background", run, ask, transport.close)]
        self._threads[0].start()
        self._end = weakref.finalize(self, end_threads, self._jobs, self._threads, transport)

    def run(self, job: Job, *used: Tensor, uploads: Sequence[Upload] = (), after: Ticket | None = None) -> Ticket:
        """See `Lane.run`."""
        del used, uploads, after  # what the urgent lane has to do first is done when its `run` is back
        self._last = _ThreadTicket(job)
        self._jobs.put(self._last)
        return self._last

    def drain(self) -> None:
        """See `Lane.drain`."""
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """See `Lane.close`."""
        self._end()

    def finish(self, deadline: float) -> None:
        """See `Lane.finish`."""
        del deadline
        finish_threads(self._jobs, self._threads)
        self._end()


class _ThreadTicket(Ticket):
    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._done = threading.Event()
        self._result: Tensor | None = None
        self._error: BaseException | None = None

    def execute(self, transport: Transport, failed: BaseException | None) -> BaseException | None:
        """Run in the lane's thread; what went wrong, here or before."""
        job, self._job = self._job, None
        assert job is not None, "a job runs once"
        try:
            if failed is not None:
                raise failed
            pending = job(transport)
            self._result = None if pending is None else pending.wait()
        except BaseException as error:
            self._error = error
        self._done.set()
        return self._error

    def wait(self) -> Tensor | None:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def _serve(jobs: SimpleQueue[_ThreadTicket | None], transport: Transport) -> None:
    failed: BaseException | None = None
    ticket = jobs.get()
    while ticket is not None:
        failed = ticket.execute(transport, failed)
        del ticket
        ticket = jobs.get()


def end_threads(jobs: SimpleQueue[Any], threads: Sequence[threading.Thread], transport: Transport) -> None:
    """Let threads end what they have to do, then close their channel, which ends what they wait for."""
    jobs.put(None)
    _join(threads, _PATIENCE_S)
    transport.close()
    _join(threads, _PATIENCE_S)


def finish_threads(jobs: SimpleQueue[Any], threads: Sequence[threading.Thread]) -> None:
    """Let threads end what they have to do, with more patience."""
    jobs.put(None)
    _join(threads, LAST_PATIENCE_S)


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class StreamLane(Lane):
    """Puts jobs on a stream of its own, for tables on a GPU.

    Args:
        transport: A channel that takes CUDA tensors and whose `wait` holds up the stream, not the host.
        device: Where the tables are.
        urgent: Whether the stream goes before others.
    """

    def __init__(self, transport: Transport, device: torch.device, *, urgent: bool) -> None:
        self.transport, self._device = transport, device
        self.stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
        self._is_closed = False
        self._before = torch.cuda.Event()  # recorded anew by each job: what waits for it is enqueued at once

    def run(self, job: Job, *used: Tensor, uploads: Sequence[Upload] = (), after: Ticket | None = None) -> Ticket:
        """See `Lane.run`."""
        caller = torch.cuda.current_stream(self._device)
        # `torch.cuda.stream` would find out more and take three times as many calls.
        elsewhere = None if torch.cuda.current_device() == caller.device_index else torch.cuda.current_stream()
        self._before.record(caller)
        self.stream.wait_event(self._before)
        for tensor in used:
            tensor.record_stream(self.stream)
        for upload in uploads:
            upload.use(self.stream)
        if after is not None:
            assert isinstance(after, _StreamTicket), "lanes come in pairs of a kind"
            self.stream.wait_event(after.done)
        torch.cuda.set_stream(self.stream)
        try:
            pending = job(self.transport)
            result = None if pending is None else pending.wait()
            done = torch.cuda.Event()
            done.record(self.stream)
        finally:
            torch.cuda.set_stream(caller)
            if elsewhere is not None:
                torch.cuda.set_stream(elsewhere)
        return _StreamTicket(self._device, done, result)

    def drain(self) -> None:
        """See `Lane.drain`."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def close(self) -> None:
        """See `Lane.close`. The stream may wait for a peer that is gone: then the channel has a deadline for it."""
        self.finish(time.monotonic() + _PATIENCE_S)

    def finish(self, deadline: float) -> None:
        """See `Lane.finish`."""
        if self._is_closed:
            return
        self._is_closed = True
        while not self._is_through() and time.monotonic() < deadline:
            time.sleep(_NAP_S)
        self.transport.close()

    def _is_through(self) -> bool:
        try:
            return self.stream.query()
        except RuntimeError:  # the device has failed, and with it whatever was enqueued
            return True


class _StreamTicket(Ticket):
    def __init__(self, device: torch.device, done: torch.cuda.Event, result: Tensor | None) -> None:
        self._device, self.done, self._result = device, done, result

    def wait(self) -> Tensor | None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self.done)
        if self._result is not None:
            self._result.record_stream(stream)
        return self._result


def open_lanes(urgent: Transport, background: Transport, device: torch.device) -> tuple[Lane, Lane]:
    """Make the lanes for tables on a device."""
    if device.type == "cuda":
        return StreamLane(urgent, device, urgent=True), StreamLane(background, device, urgent=False)
    return InlineLane(urgent), ThreadLane(background)
