"""A channel between host processes: order, deadlines, agreement on sizes, for any backend (paper, section 3.3)."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from .agreement import Comparison
from .base import Pending, Transport
from .errors import TransportClosed, TransportError, TransportTimeout
from .exchange import Exchange, plan_all_to_all
from .gathers import Gathers
from .layouts import Layouts, Splits
from .wire import FailsLater, Settles, Ticket, Wire

NAME_BYTES = 64
_SLICE_S = 0.25  # how often a waiting thread looks whether its channel was closed, or Ctrl-C pressed


class HostTransport(Transport):
    """A channel over a backend's wire. Made by `connect`, `local_group` and `channel`."""

    def __init__(self, wire: Wire, name: str, rank: int, world_size: int, timeout_s: float, check_sizes: bool) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout_s, self.check_sizes = timeout_s, check_sizes
        self._checks_device_sizes = check_sizes  # of CUDA tensors; host tensors may have to be compared in any case
        self.name = name
        self._wire = wire
        self._sequence = 0
        self._layouts = Layouts(rank, world_size)
        self._gathers = Gathers(rank, world_size, self._layouts)
        self._comparisons: list[Comparison] = []  # that are over
        self._under_way: deque[HostPending] = deque()
        self._channels: set[HostTransport] = set()
        self._parent: HostTransport | None = None
        self._closed: TransportClosed | None = None
        self._turn = _Turn(name)

    def all_gather(self, block: Tensor, sizes: Splits | None = None, out: Tensor | None = None) -> Pending:
        """See `Transport.all_gather`."""
        with self._turn:
            self._refuse_when_closed("all_gather")
            return self._begin(self._gathers.plan(block, sizes, out, self._wire.devices))

    def all_to_all(
        self, rows: Tensor, sent_splits: Splits, received_splits: Splits, out: Tensor | None = None
    ) -> Pending:
        """See `Transport.all_to_all`."""
        with self._turn:
            if self._closed is not None:
                self._refuse_when_closed("all_to_all")
            place, devices = (self.rank, self.world_size), self._wire.devices
            return self._begin(plan_all_to_all(*place, rows, sent_splits, received_splits, out, devices, self._layouts))

    def channel(self, name: str, check_sizes: bool | None = None) -> Transport:
        """See `Transport.channel`."""
        with self._turn:
            self._refuse_when_closed("channel")
            asked = self._checks_device_sizes if check_sizes is None else check_sizes
            check_sizes = asked or self._wire.size_check != "if asked"
            encoded_name(name)
            # What is under way comes first on every rank, so that backends see their collectives in one order.
            for pending in list(self._under_way):
                pending._wait_until_finished()
            self._refuse_when_closed("channel")
            wire = self._wire.split(check_sizes, self.timeout_s)
            made = open_lane(wire, name, self.rank, self.world_size, self.timeout_s, check_sizes, asked)
            made._parent = self
            self._channels.add(made)
            if self._closed is not None:  # by another thread, meanwhile
                made.close()
            return made

    def raise_if_failed(self) -> None:
        """See `Transport.raise_if_failed`."""
        self._refuse_when_closed("raise_if_failed")
        if isinstance(self._wire, FailsLater):
            self._wire.raise_failure()

    def close(self) -> None:
        """See `Transport.close`."""
        for channel in list(self._channels):
            channel.close()
        if self._closed is None:
            self._closed = self._turn.closed = TransportClosed(f"channel '{self.name}' was closed")
            if self._turn.is_forked_child():
                return  # all that could be given back belongs to the parent
            self._wire.release(None)
            if self._turn.lock.acquire(blocking=False):  # or else the thread that uses the channel does this
                self._end_what_is_under_way()
                self._turn.lock.release()
        if self._parent is not None:
            self._parent._channels.discard(self)

    def use_wire(self, make: Callable[[Wire], Wire]) -> None:
        """Put another wire around, or in the place of, the one of this channel, before it has carried anything."""
        assert not self._under_way, "nothing is under way on a new channel"
        self._wire = make(self._wire)

    def _begin(self, exchange: Exchange) -> HostPending:
        pending = HostPending(self, exchange, self._sequence)
        self._sequence += 1
        if self._under_way or self._closed is not None:
            self._under_way.append(pending)
            self._advance()
            return pending
        try:
            pending._advance()
        finally:  # also where a signal interrupts it: the next call begins it first, as peers have it between
            if not pending.finished:  # what streams carry out is, for the host
                self._under_way.append(pending)
                if self._turn.closed is not None:  # by another thread, meanwhile
                    self._end_what_is_under_way()
        return pending

    def _refuse_when_closed(self, operation: str) -> None:
        if self._closed is not None:
            raise TransportClosed(f"{operation}: {self._closed}") from self._closed.__cause__

    def _advance(self) -> None:
        """Advance what is under way. Data is posted in the order of the calls, so on every rank alike."""
        for pending in tuple(self._under_way):
            if self._closed is not None or not pending._advance():
                break
        if self._closed is not None:
            self._end_what_is_under_way()
        while self._under_way and self._under_way[0].finished:
            self._under_way.popleft()

    def _fail(self, error: BaseException) -> None:
        if self._closed is None:
            self._closed = TransportClosed(f"channel '{self.name}' failed before: {error}")
            self._closed.__cause__ = error
            self._wire.release(error)
            self._end_what_is_under_way()

    def _end_what_is_under_way(self) -> None:
        """Tell whoever waits that the channel is closed, and let go of what the backend needs for it."""
        while self._under_way:
            pending = self._under_way.popleft()
            if not pending.finished:
                pending._finish(TransportClosed(f"{pending._call()}: {self._closed}"))


class HostPending(Pending):
    """An exchange under way on a `HostTransport`: first sizes, then data, then done."""

    finished = False
    _first_test: float | None = None
    _error: BaseException | None = None
    _mismatch: TransportError | None = None
    _sizes: Ticket | None = None
    _data: Ticket | None = None
    _comparison: Comparison | None = None

    def __init__(self, lane: HostTransport, exchange: Exchange, sequence: int) -> None:
        self._lane, self._exchange, self._sequence = lane, exchange, sequence
        on_device = exchange.ready is not None
        checks = lane._checks_device_sizes if on_device else lane.check_sizes
        if checks and (on_device or lane._wire.size_check != "in the backend"):
            exchange.checked = True
            try:
                self._exchange_sizes()
            except TransportError as error:
                self._break(error)

    def test(self) -> bool:
        """See `Pending.test`."""
        if self.finished:
            return True
        lane = self._lane
        with lane._turn:
            lane._advance()
            now = time.monotonic()
            self._first_test = self._first_test or now
            if not self.finished and now - self._first_test > lane.timeout_s:
                self._give_up()
            return self.finished or lane._closed is not None

    def wait(self) -> Tensor:
        """See `Pending.wait`."""
        if not self.finished:
            with self._lane._turn:
                self._wait_until_finished()
        if self._error is not None:
            raise self._error
        if self._exchange.join is not None:
            self._exchange.join()
        return self._exchange.out

    def _wait_until_finished(self) -> None:
        lane = self._lane
        deadline = time.monotonic() + lane.timeout_s
        while True:
            lane._advance()
            if self.finished:
                return
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                self._give_up()
                return
            first = lane._under_way[0]
            if first is not self:
                first = next(p for p in lane._under_way if p is self or not (p.finished or p._data))
            try:
                first._ticket().block(min(seconds, _SLICE_S))
            except TransportError as error:
                first._break(error)

    def _advance(self) -> bool:
        """Go as far as possible without blocking; true when the data is posted, so that the next one may follow."""
        if self.finished:
            return True
        try:
            if self._data is None:
                if self._sizes is not None:
                    if not self._sizes.poll():
                        return False
                    self._compare()
                self._data = self._lane._wire.begin(self._exchange, self._sequence, "data")
            if self._data.poll():
                self._finish(None)
                if self._exchange.ready is not None:
                    self._exchange.has_begun()
                if self._mismatch is not None:
                    raise self._mismatch
        except TransportError as error:
            self._break(error)
        return self.finished or self._data is not None

    def _exchange_sizes(self) -> None:
        lane = self._lane
        comparison = lane._comparisons.pop() if lane._comparisons else Comparison(lane.rank, lane.world_size)
        comparison.prepare(self._exchange, self._sequence)
        self._comparison = comparison
        self._sizes = lane._wire.begin(comparison.carried, self._sequence, "sizes")
        comparison.foresee()

    def _compare(self) -> None:
        comparison = self._comparison
        assert comparison is not None, "sizes are exchanged for it"
        self._mismatch = comparison.outcome(self._exchange)
        self._sizes = self._comparison = None
        self._lane._comparisons.append(comparison)

    def _ticket(self) -> Ticket:
        ticket = self._data or self._sizes
        assert ticket is not None, "an exchange that is under way has been posted"
        return ticket

    def _finish(self, error: BaseException | None) -> None:
        self.finished, self._error = True, error
        self._sizes = self._data = None  # they hold what the backend needs, which is given back on closing

    def _break(self, error: TransportError) -> None:
        """Turn what a backend raised into a failure of this exchange and its lane, named after them."""
        named = type(error)(f"{self._call()}: {error}")
        named.__cause__ = error.__cause__
        self._finish(named)
        self._lane._fail(named)

    def _give_up(self) -> None:
        lane = self._lane
        stage = "agreeing on sizes" if self._data is None else "moving data"
        missing = self._ticket().missing()
        if missing is None and self._comparison is not None:
            missing = self._comparison.silent()
        who = f"missing: ranks {missing}" if missing else "which ranks are missing is not known"
        error = TransportTimeout(
            f"{self._call()}: rank {lane.rank} of {lane.world_size} waited {lane.timeout_s:g} s, {stage}; {who}"
        )
        self._finish(error)
        lane._fail(error)

    def _call(self) -> str:
        return f"{self._exchange.operation} #{self._sequence} on channel '{self._lane.name}'"


class _Process:
    """Which process this is, without asking the system."""

    def __init__(self) -> None:
        self.note()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.note)

    def note(self) -> None:
        self.pid = os.getpid()


_process = _Process()


class _Turn:
    """Lets one thread at a time use a channel, and names the channel when two try."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.Lock()
        self._holder, self._pid = threading.get_ident(), _process.pid
        self.closed: TransportClosed | None = None

    def is_forked_child(self) -> bool:
        return _process.pid != self._pid

    def __enter__(self) -> None:
        if _process.pid != self._pid:  # not by a call: the balancer's thread is here twice an exchange
            raise TransportError(
                f"channel '{self._name}' belongs to process {self._pid}: a child forked from a rank is no rank"
            )
        if not self.lock.acquire(timeout=0.05):  # whoever closes the channel has it for a moment
            if self.closed is not None:  # a moment may be long on a busy machine
                raise TransportClosed(str(self.closed))
            raise TransportError(
                f"channel '{self._name}' is in use by thread '{self._holder_name()}' and cannot be used by thread "
                f"'{threading.current_thread().name}' at the same time: give each thread a channel() of its own"
            )
        self._holder = threading.get_ident()

    def _holder_name(self) -> str:
        return next((thread.name for thread in threading.enumerate() if thread.ident == self._holder), "?")

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def encoded_name(name: str) -> bytes:
    """Check a channel's name and pad it, so that ranks can compare it. Returns NAME_BYTES bytes."""
    encoded = name.encode()
    if not 0 < len(encoded) <= NAME_BYTES:
        raise ValueError(f"name of a channel must have 1 to {NAME_BYTES} bytes of UTF-8, got {name!r}")
    return encoded.ljust(NAME_BYTES, b"\0")


def open_lane(
    wire: Wire,
    name: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    check_sizes: bool,
    check_device_sizes: bool | None = None,
) -> HostTransport:
    """Make a channel over a new wire, and make sure that all ranks made the same one; collective.

    `check_device_sizes`, for CUDA tensors, is like `check_sizes` unless told.
    """
    lane = HostTransport(wire, name, rank, world_size, timeout_s, check_sizes)
    if check_device_sizes is not None:
        lane._checks_device_sizes = check_device_sizes
    mine = encoded_name(name) + bytes([check_sizes, lane._checks_device_sizes])
    # Says nothing of sizes, which cannot be compared before all are known to compare them.
    lane.check_sizes = False
    block = torch.frombuffer(bytearray(mine), dtype=torch.uint8).reshape(1, -1)
    theirs = lane.all_gather(block).wait()
    lane.check_sizes = check_sizes
    for peer in range(world_size):
        if not torch.equal(theirs[peer], block[0]):
            error = TransportError(
                f"rank {rank} makes channel {_describe(mine)}, rank {peer} {_describe(bytes(theirs[peer].tolist()))}"
            )
            lane._fail(error)
            raise error
    if isinstance(wire, Settles):
        wire.settle()
    return lane


def _describe(encoded: bytes) -> str:
    name = encoded[:NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    return f"'{name}' with check_sizes={bool(encoded[NAME_BYTES + 1])}"
