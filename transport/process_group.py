"""Ranks of a torch.distributed process group: gloo for host memory, NCCL for CUDA (paper, section 3.3)."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.utils.data import get_worker_info

from .device_wire import DeviceWire
from .errors import TransportClosed, TransportError, TransportTimeout, Unavailable
from .exchange import Exchange, plan_all_gather
from .lane import HostTransport, open_lane
from .last_words import LastWords
from .leaving import keep_for_ever, leave_in_time
from .nccl import NcclEngine
from .presence import Presence
from .roll import Column, Roll, open_roll
from .turns import Turns
from .wire import Purpose, SizeCheck, Wire

_PATIENCE_S = 0.1  # for messages that have left when a channel is closed
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
_LOST = re.compile("connection (reset|closed|refused)|broken pipe", re.IGNORECASE)
_LOST_S = 2.0
_LOOK_S = 1.0
_LATER = timedelta(seconds=4)  # gloo's deadline runs from the call, ours from the wait, and says who is missing
_PURPOSES: tuple[Purpose, ...] = ("data", "sizes")
_GLOO_KEY = "0/{rank}"  # where a rank's addresses are for gloo
_c10d: Any = dist  # torch's stubs lack what is used through this name


class _Gloo(Protocol):
    """The one operation of torch.distributed.ProcessGroupGloo that is used here."""

    def alltoall_base(
        self, target: Tensor, source: Tensor, received: list[int], sent: list[int], options: object
    ) -> dist.Work: ...


# Closed with transfers under way; with the wire, which is to be there to be left when the process ends.
_abandoned: list[tuple[GlooWire, list[_Gloo], list[_GlooTicket]]] = []
_num_connected: dict[str, int] = {}  # ranks connect in the same order, so this number is theirs in common


def connect_process_group(group: dist.ProcessGroup | None, timeout_s: float, check_sizes: bool) -> HostTransport:
    """Make the first channel between the ranks of a group; collective. The group itself carries nothing of ours.

    Args:
        group: The ranks; None means all of them. Its backend does not matter: ours are gloo for host tensors and, where
            torch has it and there is a GPU, NCCL for CUDA tensors.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Whether ranks compare the sizes of CUDA tensors first. Those of host tensors they always do.

    Raises:
        Unavailable: torch.distributed is not initialised, or this is a DataLoader worker.
        ValueError: This process is no member of the group.
    """
    if get_worker_info() is not None:
        raise Unavailable("process_group: a DataLoader worker is no rank: connect in the trainer's own process")
    if not (dist.is_available() and dist.is_initialized()):
        raise Unavailable(
            "process_group: torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group() before connect()"
        )
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if dist.get_rank() not in members:
        raise ValueError(f"group must contain this process, rank {dist.get_rank()}, has ranks {members}")
    rank = members.index(dist.get_rank())
    # A clone, so that the deadline is not set on the connection that everybody shares.
    store = _c10d.distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=timeout_s))
    prefix = f"freescale/{hashlib.sha256(repr(members).encode()).hexdigest()}"
    number = _num_connected[prefix] = _num_connected.get(prefix, 0) + 1
    # By a connection of its own, for when a thread waits in the other.
    words = LastWords(store.clone(), f"{prefix}/{number}/failed", rank)
    presence = Presence(store, f"{prefix}/{number}", rank, len(members))
    turns = Turns(store, rank, len(members), words.heard)
    place = _Place(store, f"{prefix}/{number}", rank, len(members), words, presence, turns, Roll(None, [rank], rank))
    gloo = GlooWire(place, timeout_s)
    gloo.call_the_roll(open_roll(partial(gloo.gather_bytes, timeout_s), rank))
    wire: Wire = gloo
    if dist.is_nccl_available() and torch.cuda.is_available():
        # By a connection of its own: whoever makes a communicator waits in it, and channels that threads make go on.
        nccl_store = _c10d.PrefixStore(f"{place.prefix}/nccl", store.clone())
        engine = NcclEngine(nccl_store, rank, len(members), timeout_s)
        wire = DeviceWire(wire, engine, rank, len(members), timeout_s)
    return open_lane(wire, "main", rank, len(members), timeout_s, True, check_sizes)


@dataclass(frozen=True)
class _Place:
    """Where ranks find each other.

    torch's own new_group is of no use here: it names groups after those that exist, which differ between ranks when one
    has closed a channel that another still holds, or it needs ranks that are no members.
    """

    store: Any
    prefix: str
    rank: int
    world_size: int
    words: LastWords
    presence: Presence
    turns: Turns
    roll: Roll

    def make_groups(self, timeout_s: float) -> tuple[dict[Purpose, _Gloo], int]:
        """Connect the ranks; collective.

        Returns:
            The groups, and the slot for them on the roll.
        """
        _drop_what_is_done()
        slot = self.roll.reserve() if self.rank == 0 else -1
        try:
            with self.turns.turn(self.prefix, timeout_s, str(slot)) as told:
                self.presence.look_around()
                made = self._connect(timeout_s)
        except RuntimeError as error:
            if isinstance(error, TransportError) and not isinstance(error, TransportTimeout):
                raise
            raise self.translate(error) from error
        return made, self.roll.slot(told)

    def _connect(self, timeout_s: float) -> dict[Purpose, _Gloo]:
        """Make both groups in a thread: gloo tries five times, for its deadline each, to reach a rank that is gone.

        That thread, and with it the process, ends when gloo gives up.
        """
        made: dict[Purpose, _Gloo] = {}
        failed: list[BaseException] = []

        def make() -> None:
            try:
                for purpose in _PURPOSES:
                    store = _c10d.PrefixStore(f"{self.prefix}/{purpose}", self.store)
                    wait = timedelta(seconds=timeout_s)
                    group = _c10d.ProcessGroupGloo(store, self.rank, self.world_size, wait)
                    group._set_default_timeout(wait + _LATER)  # as init_process_group's own timeout is set
                    made[purpose] = group
            except BaseException as error:
                failed.append(error)

        making = threading.Thread(target=make, name=f"freescale connecting {self.prefix}")
        making.start()
        deadline = time.monotonic() + timeout_s
        making.join(min(_LOOK_S, timeout_s))
        while making.is_alive():
            if self.presence.gone() and (said := self._find_out(0.0)) is not None:
                raise TransportError(f"{said}, while channels were being made")
            if time.monotonic() > deadline:
                raise TransportTimeout(
                    f"rank {self.rank} of {self.world_size} waited {timeout_s:g} s for gloo to connect the ranks, "
                    "which had all come"
                )
            making.join(_LOOK_S)
        if failed:
            raise failed[0]
        return made

    def forget(self) -> None:
        """Take away what this rank wrote into the store to make its groups, when all ranks have made theirs."""
        self.turns.forget(self.prefix)
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
            return  # gloo will connect when a group is used
        with suppress(RuntimeError):  # a store that is gone, or cannot do this
            for purpose in _PURPOSES:
                self.store.delete_key(f"{self.prefix}/{purpose}/{_GLOO_KEY.format(rank=self.rank)}")

    def translate(self, error: RuntimeError) -> TransportError:
        """Say who failed, or is gone, where gloo names an address at best. The first who finds out tells the others."""
        text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        kind = TransportTimeout if isinstance(error, TransportTimeout) or _TIMED_OUT.search(text) else TransportError
        # Connections are closed by whoever is gone, or has heard of one that is; a busy host may take its time for it.
        said = self._find_out(_LOST_S if _LOST.search(text) else 0.0)
        return kind(f"gloo: {text}" if said is None else f"{said} (gloo: {text})")

    def _find_out(self, patience_s: float) -> str | None:
        """What a rank has said, or which are gone; looks again for so many seconds."""
        deadline = time.monotonic() + patience_s
        while (said := self.words.heard()) is None:
            if gone := self.presence.gone():
                self.words.write(found := f"gone: ranks {gone}")  # before this process ends too
                return self.words.heard() or found
            if time.monotonic() >= deadline:
                return None
        return said


class GlooWire:
    """Gloo groups of our own: one for data and one for sizes.

    Gloo has no gather of uneven blocks and refuses some dtypes, but its uneven all-to-all of bytes does everything
    asked of it here. Two groups, because the order of sizes and data of several exchanges differs between ranks.
    A message that is longer than its receiver expects is an exception in a thread of gloo's own, which ends the
    receiver's process. So sizes are always compared, in messages whose length is fixed.
    """

    devices: tuple[str, ...] = ("cpu",)
    size_check: SizeCheck = "always"

    def __init__(self, place: _Place, timeout_s: float) -> None:
        self._place: _Place | None = place
        self._num_channels = 0
        self._groups, self._slot = place.make_groups(timeout_s)
        self._columns = place.roll.columns(self._slot)
        self._under_way: list[_GlooTicket] = []
        leave_in_time(self)

    def call_the_roll(self, roll: Roll) -> None:
        """Count on it from now on. Ranks have met by this wire before."""
        assert self._place is not None, "it is new"
        self._place = replace(self._place, roll=roll)
        self._slot, self._columns = 0, roll.columns(0)

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> _GlooTicket:
        """See `Wire.begin`."""
        del sequence  # gloo counts for itself
        group, place = self._groups.get(purpose), self._place
        if group is None or place is None:
            raise TransportClosed("another thread closed the channel")
        ticket = _GlooTicket(exchange, group, place, self._columns[purpose])
        self._under_way = [*(each for each in self._under_way if not each.work.is_completed()), ticket]
        if not self._groups:  # closed just now: `release` may not have seen the ticket
            _abandoned.append((self, [group], [ticket]))
        return ticket

    def gather_bytes(self, timeout_s: float, mine: bytes, size: int) -> list[bytes]:
        """Everybody's bytes, without zeros at their ends; collective, before the wire is a channel's."""
        assert self._place is not None, "it is new"
        block = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8).reshape(1, size)
        exchange = plan_all_gather(self._place.rank, self._place.world_size, block, None, None)
        if not self.begin(exchange, 0, "data").block(timeout_s):
            raise TransportTimeout(f"rank {self._place.rank} waited {timeout_s:g} s for the others to connect")
        return [bytes(row.numpy()).rstrip(b"\0") for row in exchange.out]

    def settle(self) -> None:
        """See `Settles.settle`."""
        if self._place is not None:
            self._place.forget()

    def split(self, check_sizes: bool, timeout_s: float) -> GlooWire:
        """See `Wire.split`."""
        assert check_sizes, "a lane over a wire that always compares sizes asks for it"
        place = self._place
        if place is None:
            raise TransportClosed("another thread closed the channel")
        self._num_channels += 1
        return GlooWire(replace(place, prefix=f"{place.prefix}/{self._num_channels}"), timeout_s)

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`. Gives back threads and connections, unless gloo still works with them.

        Dropping a group waits for what is under way in it, so such a group is kept until that has ended, by gloo's own
        deadline at the latest, and a later channel is made or closed.
        """
        del reason
        place, groups = self._place, list(self._groups.values())
        self._groups, self._place = {}, None
        if place is not None and place.rank == 0:
            place.roll.give_back(self._slot)
        _abandoned.append((self, groups, self._under_way))
        self._under_way = []
        del groups
        _drop_what_is_done()
        patience = time.monotonic() + _PATIENCE_S
        while _abandoned and time.monotonic() < patience:  # peers learn of it from connections that are gone
            time.sleep(0.005)
            _drop_what_is_done()

    def leave(self, reason: str) -> None:
        """See `Leaving.leave`. Dropping a group joins gloo's threads, which must not outlive the interpreter.

        They drop the tensors of what they have done, some time after it is done, and need the interpreter's lock for
        it. A thread that asks an ending interpreter for that lock is ended in a place where C++ allows no such thing,
        and with it the process. What is still under way drops nothing if it is kept.
        """
        del reason
        self.release(None)
        keep_for_ever(*_abandoned)

    def let_be(self) -> None:
        """See `Leaving.let_be`. A child has no threads of its parent's, and would join them for ever."""
        keep_for_ever(*self._groups.values(), *_abandoned)
        _abandoned.clear()


class _GlooTicket:
    """An all-to-all that gloo's own threads carry out."""

    def __init__(self, exchange: Exchange, group: _Gloo, place: _Place, column: Column) -> None:
        self._place, self._column, self._done = place, column, False
        sent_bytes, received_bytes = exchange.sent_bytes.copy(), exchange.received_bytes.copy()
        sent_bytes[exchange.rank] = received_bytes[exchange.rank] = exchange.kept_bytes
        source, target = exchange.source, exchange.target
        if exchange.incomplete:
            target = torch.empty(int(received_bytes.sum()), dtype=torch.uint8, device="cpu")
        if exchange.incomplete or exchange.operation == "all_gather":
            # Gloo wants the pieces one after the other, this rank's own included: a gathered block is repeated.
            source = torch.cat(exchange.pieces()[0])
        try:
            with _unprofiled():
                self.work = group.alltoall_base(
                    target, source, received_bytes.tolist(), sent_bytes.tolist(), dist.AllToAllOptions()
                )
        except RuntimeError as error:
            raise self._place.translate(error) from error
        self._number = column.begin()

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        return self.work.is_completed() and self.block(1)

    def block(self, seconds: float) -> bool:
        """See `Ticket.block`. Waits in C++, without the interpreter lock."""
        try:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if not self.work.is_completed():
                self._column.look(time.monotonic())
                return False
            self._raise_failure(error)
        if not self._done:
            self._done = True
            self._column.finish()
        return True

    def _raise_failure(self, waited: RuntimeError) -> None:
        """Raise what became of the work, if it failed: it may also have completed just after the wait gave up."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._place.translate(error) from waited

    def missing(self) -> list[int] | None:
        """See `Ticket.missing`. Gloo does not tell; what ranks of this host have counted does."""
        return self._column.missing(self._number)


@contextmanager
def _unprofiled() -> Iterator[None]:
    """Keep a profiler of this thread from noting what gloo does.

    Gloo's threads say when it ended, to a profiler that may have been stopped by then: the memory is another's.
    """
    if not profiler._is_profiler_enabled:
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def _drop_what_is_done() -> None:
    for entry in list(_abandoned):
        if all(ticket.work.is_completed() for ticket in entry[2]):
            with suppress(ValueError):  # another thread was faster
                _abandoned.remove(entry)
