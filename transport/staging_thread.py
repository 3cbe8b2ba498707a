"""The thread that passes pinned slots on to the other ranks, and brings theirs (paper, sections 3.3 and 6.3).

It waits where the host transport waits, and calls no CUDA: a kernel that is loaded for the first time blocks CUDA calls
for as long as some stream waits for a flag, and this thread is who raises the flags.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from .background import BackgroundThread
from .base import Pending
from .errors import TransportClosed, TransportError, TransportTimeout
from .lane import HostTransport
from .pinned_slots import PinnedSlots, empty_rows
from .rounds import HEADER_BYTES, Layout, lay_out_round
from .watch import watch

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.00005, 0.0005
_MOST_ON_THE_WIRE = 2
_MOST_LOOKS_AFTER_A_FAILURE = 40


@dataclass(frozen=True)
class Job:
    """One exchange: rounds that have data on this rank, in the slots from the one numbered `first` on."""

    call: str
    layouts: list[Layout]
    first: int
    deadline: float


@dataclass(frozen=True)
class _OnTheWire:
    number: int
    layout: Layout
    pending: Pending


class Mover:
    """Passes on the slots of one channel.

    Args:
        lane: A host channel for this alone.
        slots: Pinned memory and flags.
    """

    def __init__(self, lane: HostTransport, slots: PinnedSlots) -> None:
        self.slots = slots
        self._lane = lane
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._failure: TransportError | None = None
        self._num_looks, self._stopping = 0, False
        nothing = np.zeros(lane.world_size, dtype=np.int64)
        self._headers_alone = lay_out_round(0, nothing, nothing, lane.rank, 1)
        name = f"freescale staging {lane.rank}"
        BackgroundThread(name, self._run, self._give_up_unless_stopping, self._give_up).start()

    def add(self, job: Job) -> None:
        """Pass on an exchange after those before."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Let the thread end after what it has to do: where two ranks disagree, others still get their rows."""
        self._stopping = True
        self._jobs.put(None)

    def raise_failure(self) -> None:
        """Raise what has ended the transfers that were under way."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def let_go_if_failed(self) -> None:
        """Let the streams pass what nobody will bring."""
        if self._failure is not None:
            self.slots.let_go()

    def _give_up_unless_stopping(self) -> None:
        """The process ends: what a closed channel has to do may take seconds, everything else is given up."""
        if not self._stopping:
            self._give_up()

    def _give_up(self) -> None:
        self._fail(TransportClosed("the process ends"))
        self._lane.close()
        self.stop()

    def _fail(self, error: TransportError) -> None:
        if self._failure is None:
            self._failure = error
            self.slots.let_go()
            self.slots.streams.rest()
            watch.add(self._look)

    def _has_failed(self) -> bool:
        return self._failure is not None

    def _look(self) -> bool:
        """After a failure: the thread may have overwritten what let the streams go."""
        self.slots.let_go()
        self._num_looks += 1
        return self._num_looks < _MOST_LOOKS_AFTER_A_FAILURE

    def _run(self) -> None:
        while self._failure is None and (job := self._jobs.get()) is not None:
            try:
                self._pass_on(job)
            except TransportError as error:
                self._fail(type(error)(f"{job.call}: {error}"))
            except BaseException as error:
                self._fail(TransportError(f"{job.call}: the staging thread ended: {error!r}"))
                raise
            finally:
                if self._has_failed():
                    self._lane.close()
        self._await_emptied()
        if self._has_failed():
            self.slots.let_go()  # by whoever may have overwritten it
        else:
            self._lane.close()
            self.slots.put_away()

    def _pass_on(self, job: Job) -> None:
        """Go through as many rounds as the rank with the most has, at least one."""
        total, posted = max(1, len(job.layouts)), 0
        on_the_wire: deque[_OnTheWire] = deque()
        while posted < total or on_the_wire:
            while posted < total and len(on_the_wire) < _MOST_ON_THE_WIRE:
                number = job.first + posted
                has_data = posted < len(job.layouts)
                if has_data and not self.slots.is_ready(number):
                    if on_the_wire:
                        break
                    self._await_ready(number, job.deadline)
                on_the_wire.append(self._post(number, job, job.layouts[posted] if has_data else None))
                posted += 1
            total = max(total, self._finish(on_the_wire.popleft(), job))

    def _post(self, number: int, job: Job, layout: Layout | None) -> _OnTheWire:
        if layout is None:
            layout = self._headers_alone
            outgoing, incoming = (
                empty_rows(int(splits.sum())) for splits in (layout.sent_splits, layout.received_splits)
            )
            number = -1
        else:
            outgoing = self.slots.outgoing(number, int(layout.sent_splits.sum()))
            incoming = self.slots.incoming(number, int(layout.received_splits.sum()))
        _write_headers(outgoing, layout.sent_splits, len(job.layouts))
        pending = self._lane.all_to_all(outgoing, layout.sent_splits, layout.received_splits, incoming)
        return _OnTheWire(number, layout, pending)

    def _finish(self, one: _OnTheWire, job: Job) -> int:
        """Wait for a round. Returns the most rounds that any rank has."""
        incoming = one.pending.wait()
        if one.number >= 0:
            self.slots.say_passed_on(one.number)
        return max(len(job.layouts), _read_headers(incoming, one.layout.received_splits))

    def _await_ready(self, number: int, deadline: float) -> None:
        nap_s = _SHORTEST_NAP_S
        while not self.slots.is_ready(number):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise TransportTimeout(
                    f"rank {self._lane.rank}: the GPU has not come to the copy before the deadline: is it still busy "
                    "with what was enqueued before?"
                )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _await_emptied(self) -> None:
        while not (self._has_failed() or self.slots.are_empty()):
            time.sleep(_LONGEST_NAP_S)


def _write_headers(rows: Tensor, splits: np.ndarray[tuple[int], np.dtype[np.int64]], num_rounds: int) -> None:
    header = torch.tensor([num_rounds], dtype=torch.int64, device="cpu").view(torch.uint8)
    for start in (np.cumsum(splits) - splits)[splits > 0].tolist():
        rows[start : start + HEADER_BYTES] = header


def _read_headers(rows: Tensor, splits: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    most = 0
    for start in (np.cumsum(splits) - splits)[splits > 0].tolist():
        most = max(most, int.from_bytes(bytes(rows[start : start + HEADER_BYTES].tolist()), "little", signed=True))
    return most
