"""Ranks under mpiexec: non-blocking MPI collectives on host memory (paper, sections 3.3 and 5.3)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import TransportError, TransportTimeout
from .exchange import Exchange
from .lane import HostTransport, open_lane
from .mpi_launch import check_environment, check_installation, refuse_child_processes
from .mpi_messages import Messages
from .mpi_parting import Kept, Parting, note_doubt
from .mpi_ticket import MpiTicket, translate
from .roll import Column, Roll, open_roll
from .wire import Purpose, SizeCheck

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP_S = 0.001


def connect_mpi(communicator: MPI.Intracomm | None, timeout_s: float, check_sizes: bool) -> HostTransport:
    """Make the first channel between the ranks of a communicator; collective. Uses duplicates of it only.

    Also arranges how this process ends (`mpi_parting.py`): a rank that fails tells its peers and leaves them time to
    report before MPI takes the job down.

    Args:
        communicator: The ranks; None means MPI's COMM_WORLD.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Whether ranks compare sizes first.

    Raises:
        Unavailable: No mpi4py, no MPI library, too little thread support, a child process of an MPI rank, or processes
            that were not started by mpiexec.
    """
    refuse_child_processes()
    check_installation()
    check_environment()
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD if communicator is None else communicator
    if not isinstance(communicator, MPI.Intracomm):
        raise ValueError(f"communicator must be an mpi4py.MPI.Intracomm, got {type(communicator).__name__}")
    rank, world_size = communicator.Get_rank(), communicator.Get_size()
    parting = Parting(_duplicate(communicator, timeout_s), timeout_s)
    roll = open_roll(partial(_gather_bytes, parting, timeout_s), rank)
    berth = _Berth(roll, 0)
    berth.fill(communicator, check_sizes, timeout_s, parting)
    wire = MpiWire(parting, berth, check_sizes)
    return open_lane(wire, "main", rank, world_size, timeout_s, check_sizes)


class MpiWire:
    """Communicators of our own: one for data and, where sizes are compared, one for sizes.

    Every exchange is an Ialltoallw: it allows uneven pieces that lie anywhere, pieces over 2 GiB by a datatype made for
    them, pieces left out because two ranks disagree, and is the same collective on all ranks. Open MPI's Iallgatherv
    is no faster for little, and in some runs four times slower for a MiB.
    Communicators are never freed, as MPI_Comm_free is collective and closing is not. Instead a later channel of the
    same parent takes over those of one that all ranks have closed.
    """

    devices: tuple[str, ...] = ("cpu",)
    size_check: SizeCheck = "if asked"

    def __init__(self, parting: Parting, berth: _Berth, check_sizes: bool) -> None:
        self._messages, self._parting, self._berth = Messages(), parting, berth
        self._trusts_sizes = not check_sizes

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> MpiTicket:
        """See `Wire.begin`."""
        del sequence  # the communicator counts for itself
        # Sizes and gathers of trusted sizes come again as they are; nobody skips a peer there.
        again = purpose == "sizes" or (self._trusts_sizes and exchange.operation == "all_gather")
        place = self._berth.communicators[purpose], self._parting, self._berth.columns[purpose]
        return self._berth.note(MpiTicket(exchange, again, self._messages, *place))

    def split(self, check_sizes: bool, timeout_s: float) -> MpiWire:
        """See `Wire.split`."""
        return MpiWire(self._parting, self._berth.find_or_make(check_sizes, timeout_s, self._parting), check_sizes)

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`."""
        if reason is None:
            self._berth.leave()
        else:
            note_doubt(reason, self._parting.timeout_s)


class _Berth:
    """Communicators that one channel after the other uses.

    Args:
        roll: Tells who has come to what.
        slot: Where it does; the same on all ranks.

    Attributes:
        communicators: Those of the channel that is here now.
        columns: What this rank counts on each.
    """

    def __init__(self, roll: Roll, slot: int) -> None:
        self.communicators: dict[Purpose, MPI.Intracomm] = {}
        self.columns = roll.columns(slot)
        self._roll = roll
        self._below: list[_Berth] = []  # for channels made from the one here; on every rank the same, in order
        self._broken: TransportError | None = None  # ranks no longer agree on what is below
        self._under_way: list[MpiTicket] = []
        self._num_begun, self._is_free = 0, False

    def fill(self, origin: MPI.Intracomm, check_sizes: bool, timeout_s: float, parting: Parting) -> None:
        """Make the communicators; collective."""
        self.communicators["data"] = _duplicate(origin, timeout_s, parting)
        if check_sizes:
            self.communicators["sizes"] = _duplicate(origin, timeout_s, parting)

    def note(self, ticket: MpiTicket) -> MpiTicket:
        """Count what is begun here."""
        self._under_way = [each for each in self._under_way if not each.done]
        self._under_way.append(ticket)
        self._num_begun += 1
        return ticket

    def leave(self) -> None:
        """The channel here was closed on this rank."""
        self._is_free = True

    def _is_quiet(self) -> bool:
        return self._is_free and all(ticket.done for ticket in self._under_way)

    def find_or_make(self, check_sizes: bool, timeout_s: float, parting: Parting) -> _Berth:
        """Agree with the other ranks on a berth for another channel; collective.

        One where all ranks have begun and completed equally many collectives holds no message of the channel before.
        """
        if self._broken is not None:
            raise TransportError(f"an earlier channel could not be made: {self._broken}") from self._broken
        try:
            free = [berth._num_begun if berth._is_quiet() else -1 for berth in self._below]
            communicator = self.communicators["data"]
            slot = self._roll.reserve() if communicator.Get_rank() == 0 else -1
            mine = np.array([check_sizes, slot, *free], dtype=np.int64)
            least, most = _find_least_and_most(communicator, mine, timeout_s, parting, self.columns["data"])
            check_sizes = bool(most[0])  # also when ranks disagree about that, which they will find out next
            for index in np.flatnonzero((least[2:] >= 0) & (least[2:] == most[2:])).tolist():
                berth = self._below[index]
                if ("sizes" in berth.communicators) == check_sizes:
                    berth._num_begun, berth._is_free = 0, False
                    self._roll.give_back(slot)
                    return berth
            made = _Berth(self._roll, int(most[1]))
            made.fill(self.communicators["data"], check_sizes, timeout_s, parting)
        except TransportError as error:
            self._broken = error
            raise
        self._below.append(made)
        return made


def _duplicate(communicator: MPI.Intracomm, timeout_s: float, parting: Parting | None = None) -> MPI.Intracomm:
    """MPI_Comm_dup with a deadline, and an ear for peers that fail meanwhile."""
    from mpi4py import MPI

    with _Doubting(timeout_s):
        made, request = communicator.Idup()
        made.Set_errhandler(MPI.ERRORS_RETURN)
        _complete(request, made, communicator, timeout_s, parting)
    assert isinstance(made, MPI.Intracomm), "the duplicate is of the kind of its original"
    return made


def _find_least_and_most(
    communicator: MPI.Intracomm, numbers: NDArray[np.int64], timeout_s: float, parting: Parting, column: Column
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The least and the greatest of each number over all ranks; collective. Both have the shape of `numbers`."""
    from mpi4py import MPI

    mine = np.stack([numbers, -numbers])
    least = np.empty_like(mine)
    with _Doubting(timeout_s):
        request = communicator.Iallreduce(mine, least, MPI.MIN)
        number = column.begin()
        _complete(request, (mine, least), communicator, timeout_s, parting, partial(column.missing, number))
        column.finish()
    return least[0], -least[1]


def _gather_bytes(parting: Parting, timeout_s: float, mine: bytes, size: int) -> list[bytes]:
    """Everybody's bytes, without zeros at their ends; collective, before there is a channel."""
    communicator = parting.communicator
    block = np.frombuffer(mine.ljust(size, b"\0"), dtype=np.uint8)
    blocks = np.empty((communicator.Get_size(), size), dtype=np.uint8)
    with _Doubting(timeout_s):
        request = communicator.Iallgather(block, blocks)
        _complete(request, (block, blocks), communicator, timeout_s, parting)
    return [each.tobytes().rstrip(b"\0") for each in blocks]


def _complete(
    request: MPI.Request,
    memory: object,
    communicator: MPI.Intracomm,
    timeout_s: float,
    parting: Parting | None,
    missing: Callable[[], list[int] | None] = lambda: None,
) -> None:
    kept = Kept(request, memory)
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            absent = missing()
            who = f"missing: ranks {absent}" if absent else "which ranks are missing is not known"
            raise TransportTimeout(
                f"mpi: rank {communicator.Get_rank()} of {communicator.Get_size()} waited {timeout_s:g} s for the "
                f"others to make a channel; {who}"
            )
        if parting is not None:
            parting.raise_if_a_peer_failed()
        time.sleep(_NAP_S)
    kept.release()


class _Doubting:
    """Around what ranks do together before there is a channel that could fail: failures here are remembered too."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from mpi4py import MPI

        if error is not None:
            note_doubt(error, self._timeout_s)
        if isinstance(error, MPI.Exception):
            raise translate(error) from error
