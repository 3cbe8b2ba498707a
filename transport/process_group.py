"""Ranks of a torch.distributed process group, over gloo: host memory, for users of torchrun (paper, section 3.3)."""

from __future__ import annotations

import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from .errors import TransportError, TransportTimeout, Unavailable
from .exchange import Exchange
from .lane import HostTransport, open_lane
from .wire import Purpose

_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)


def connect_process_group(group: dist.ProcessGroup | None, timeout_s: float, check_sizes: bool) -> HostTransport:
    """Make the first channel between the ranks of a group; collective. The group itself carries nothing of ours.

    Args:
        group: The ranks; None means all of them. Its backend does not matter: ours is gloo.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Whether ranks compare sizes first.

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
    wire = GlooWire(members, check_sizes, timeout_s)
    rank = members.index(dist.get_rank())
    return open_lane(wire, "main", rank, len(members), timeout_s, check_sizes)


class GlooWire:
    """Gloo groups of our own: one for data and, where sizes are compared, one for sizes.

    Gloo has no gather of uneven blocks and refuses some dtypes, but its uneven all-to-all of bytes does everything
    asked of it here. Two groups, because the order of sizes and data of several exchanges differs between ranks.
    """

    settles_sizes = False

    def __init__(self, members: list[int], check_sizes: bool, timeout_s: float) -> None:
        self._members = members
        self._groups: dict[Purpose, dist.ProcessGroup] = {"data": _new_group(members, timeout_s)}
        if check_sizes:
            self._groups["sizes"] = _new_group(members, timeout_s)
        self._works: list[_GlooTicket] = []

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> _GlooTicket:
        """See `Wire.begin`."""
        del sequence  # gloo counts for itself
        self._works = [ticket for ticket in self._works if not ticket.work.is_completed()]
        ticket = _GlooTicket(exchange, self._groups[purpose])
        self._works.append(ticket)
        return ticket

    def split(self, check_sizes: bool, timeout_s: float) -> GlooWire:
        """See `Wire.split`."""
        return GlooWire(self._members, check_sizes, timeout_s)

    def release(self, reason: BaseException | None) -> None:
        """See `Wire.release`. Destroying a group waits for what is under way in it, so such groups are left alone."""
        del reason
        if all(ticket.work.is_completed() for ticket in self._works):
            for group in self._groups.values():
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        self._groups = {}


class _GlooTicket:
    """An all-to-all that gloo's own threads carry out."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup) -> None:
        sent_bytes, received_bytes = exchange.sent_bytes.copy(), exchange.received_bytes.copy()
        sent_bytes[exchange.rank] = received_bytes[exchange.rank] = exchange.kept_bytes
        source, target = exchange.source, exchange.target
        if exchange.incomplete:
            target = torch.empty(int(received_bytes.sum()), dtype=torch.uint8)
        if exchange.incomplete or exchange.operation == "all_gather":
            # Gloo wants the pieces one after the other, this rank's own included: a gathered block is repeated.
            starts = exchange.sent_at.tolist()
            sizes = sent_bytes.tolist()
            source = torch.cat([source.narrow(0, *piece) for piece in zip(starts, sizes, strict=True)])
        try:
            self.work = group.alltoall_base(
                target, source, received_bytes.tolist(), sent_bytes.tolist(), dist.AllToAllOptions()
            )
        except RuntimeError as error:
            raise _translate(error) from error

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        return self.work.is_completed() and self.block(1)

    def block(self, seconds: float) -> bool:
        """See `Ticket.block`. Waits in C++, without the interpreter lock."""
        try:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if not self.work.is_completed():
                return False
            raise _translate(error) from error
        return True

    def missing(self) -> None:
        """Gloo does not tell."""


def _new_group(members: list[int], timeout_s: float) -> dist.ProcessGroup:
    # Gloo's own deadline bounds how long its threads can keep a process from exiting after a failure.
    timeout = timedelta(seconds=timeout_s)
    try:
        group = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)
    except RuntimeError as error:
        raise _translate(error) from error
    assert isinstance(group, dist.ProcessGroup), "this process is a member"
    return group


def _translate(error: RuntimeError) -> TransportError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    kind = TransportTimeout if _TIMED_OUT.search(text) else TransportError
    return kind(f"gloo: {text}")
