"""How a process leaves an MPI job: a rank that fails lets its peers report first (paper, section 3.3).

An MPI job ends badly in three ways. A process that exits non-zero makes mpiexec kill its peers at once, so that they
never say where they stood. A process with an unfinished collective hangs in MPI_Finalize. And peers of a failed rank
learn nothing until their deadline. So a rank that fails tells its peers at once, waits until they have come to their
own end or a deadline has passed, and exits without MPI_Finalize.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from .background import exit_at_once, flush_output
from .errors import TransportError
from .leaving import leave_last

if TYPE_CHECKING:
    from mpi4py import MPI

_NOTICE_BYTES = 512
_NOTICE_TAG = 1
_LISTEN_EVERY_S = 0.05
_NAP_S = 0.001
_GRACE_S = 2.0
_EXIT_CODE = 1


class Parting:
    """One rank's end of a communicator that carries nothing but news of failures and the last barrier.

    Args:
        communicator: A duplicate of the ranks' communicator that nobody else uses.
        timeout_s: How long a failed rank waits for its peers to report.
    """

    def __init__(self, communicator: MPI.Intracomm, timeout_s: float) -> None:
        self.communicator, self.timeout_s = communicator, timeout_s
        self._peer_failure: str | None = None
        self._next_listen = 0.0
        self._sent: list[object] = []
        _process.add(self)

    def raise_if_a_peer_failed(self, now: float | None = None) -> None:
        """Raise what a failed peer said; looks at most every 50 ms. `now` is the monotonic time, if known.

        Raises:
            TransportError: A peer failed.
        """
        now = time.monotonic() if now is None else now
        if now >= self._next_listen:
            self._next_listen = now + _LISTEN_EVERY_S
            self._listen()
        if self._peer_failure is not None:
            raise TransportError(self._peer_failure)

    def tell(self, failure: str) -> None:
        """Tell all peers that this rank failed. Does not block."""
        rank = self.communicator.Get_rank()
        text = f"rank {rank} failed: {failure}".encode()[:_NOTICE_BYTES]
        notice = np.frombuffer(text, dtype=np.uint8)
        for peer in range(self.communicator.Get_size()):
            if peer != rank:
                self._sent.append(self.communicator.Isend(notice, peer, _NOTICE_TAG))

    def heard(self) -> bool:
        """Whether a peer has said that it failed."""
        self._listen()
        return self._peer_failure is not None

    def _listen(self) -> None:
        from mpi4py import MPI

        if self._peer_failure is not None:
            return
        message = self.communicator.Improbe(MPI.ANY_SOURCE, _NOTICE_TAG)
        if message is not None:
            notice = np.zeros(_NOTICE_BYTES, dtype=np.uint8)
            message.Recv(notice)
            self._peer_failure = notice.tobytes().rstrip(b"\0").decode(errors="replace")


class Kept:
    """Keeps the memory of a collective alive until MPI is done with it."""

    def __init__(self, request: MPI.Request, memory: object) -> None:
        self.request, self.memory = request, memory
        _process.kept.add(self)

    def release(self) -> None:
        """MPI is done."""
        _process.kept.discard(self)


class _Process:
    """What this process knows about its own end. MPI is one a process, so this is too."""

    def __init__(self) -> None:
        self.kept: set[Kept] = set()
        self._partings: list[Parting] = []
        self._pid: int | None = None  # of the rank, once it has begun with MPI
        self._longest_s = 0.0  # deadline of a wait
        self._doubt: str | None = None  # a channel failed; the trainer may have dealt with it
        self._failure: str | None = None  # an exception that nobody caught
        self._told = False
        self._previous_hook = sys.excepthook

    def add(self, parting: Parting) -> None:
        self._prepare(parting.timeout_s)
        self._partings.append(parting)

    def note_doubt(self, error: BaseException, timeout_s: float) -> None:
        self._prepare(timeout_s)
        self._doubt = self._doubt or f"{type(error).__name__}: {error}"

    def is_forked_child(self) -> bool:
        return self._pid not in (None, os.getpid())

    def _prepare(self, timeout_s: float) -> None:
        self._longest_s = max(self._longest_s, timeout_s)
        if self._pid is None:
            self._pid = os.getpid()
            self._previous_hook = sys.excepthook
            sys.excepthook = self._on_uncaught
            leave_last(self._leave)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous_hook(kind, error, trace)
        flush_output()
        self._failure = f"{kind.__name__}: {error}"
        if self.is_forked_child():
            return
        self._tell(self._failure)
        # Python now joins the threads that are not daemons, and one of them may wait for a peer for ever.
        watchdog = threading.Timer(self._longest_s + 2 * _GRACE_S, os._exit, [_EXIT_CODE])
        watchdog.daemon = True
        watchdog.start()

    def _tell(self, failure: str) -> None:
        from mpi4py import MPI

        if self._told:
            return
        self._told = True
        for parting in self._partings:
            try:
                parting.tell(failure)
            except MPI.Exception as error:
                print(f"freescale: peers were not told of the failure: {error}", file=sys.stderr)  # noqa: T201

    def _leave(self) -> None:
        """Wait for the peers; then let Python go on to MPI_Finalize, or exit without it after a failure."""
        if self.is_forked_child():
            self._leave_as_child()
        clean = False
        try:
            clean = self._await_peers() and self._all_well() and self._finish_collectives()
        finally:
            if not clean:
                exit_at_once(_EXIT_CODE)

    def _leave_as_child(self) -> None:
        """A fork of a rank has the rank's connections to MPI, and to use them in MPI_Finalize breaks the rank."""
        if self._failure is None:
            print(  # noqa: T201
                "freescale: a forked child of an MPI rank ends without MPI, with exit status 0 whatever it asked for: "
                "end it with os._exit",
                file=sys.stderr,
            )
        exit_at_once(0 if self._failure is None else _EXIT_CODE)

    def _all_well(self) -> bool:
        # Also when only a peer failed: it exits without MPI_Finalize, which would then wait for it for ever.
        return self._failure is None and not any(parting.heard() for parting in self._partings)

    def _await_peers(self) -> bool:
        """Come to the last barrier. Without a deadline, unless a channel, this rank or a peer failed."""
        from mpi4py import MPI

        begun = time.monotonic()
        deadline = float("inf")
        try:
            barriers = [parting.communicator.Ibarrier() for parting in self._partings]
            # Without any, this rank never got to know its peers, and knows no end that they have in common.
            while not (barriers and MPI.Request.Testall(barriers)):
                now = time.monotonic()
                failure = self._failure or self._doubt
                if failure or any(parting.heard() for parting in self._partings):
                    deadline = min(deadline, now + self._longest_s + _GRACE_S)
                if failure and now - begun > _GRACE_S:
                    self._tell(f"it left after {failure}")
                if now > deadline:
                    print("freescale: left without waiting longer for the other ranks", file=sys.stderr)  # noqa: T201
                    return False
                time.sleep(_NAP_S)
        except MPI.Exception as error:
            print(f"freescale: the other ranks cannot be waited for: {error}", file=sys.stderr)  # noqa: T201
            return False
        return True

    def _finish_collectives(self) -> bool:
        """Complete what was begun and never waited for. All ranks have come to their end, so nothing new will come."""
        from mpi4py import MPI

        deadline = time.monotonic() + _GRACE_S
        while self.kept:
            for kept in list(self.kept):
                try:
                    done = kept.request.Test()
                except MPI.Exception:  # it has been raised to whoever waited, or nobody wanted it
                    done = True
                if done:
                    kept.release()
            if time.monotonic() > deadline:
                print(  # noqa: T201
                    f"freescale: {len(self.kept)} transfers were begun that not all ranks took part in", file=sys.stderr
                )
                return False
            time.sleep(_NAP_S)
        return True


_process = _Process()


def note_doubt(error: BaseException, timeout_s: float) -> None:
    """Remember that a channel failed, or was never made.

    Peers may then never come to the end, so this process will not wait for ever.

    Args:
        error: What went wrong.
        timeout_s: The deadline that peers have to report.
    """
    _process.note_doubt(error, timeout_s)


def is_forked_child() -> bool:
    """Whether this process is a fork of a rank: MPI does not work here."""
    return _process.is_forked_child()
