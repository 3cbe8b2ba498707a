"""Ranks on several hosts: copies between the GPUs of a host, the network between hosts (paper, sections 3.3 and 5.3).

An all_to_all is divided: pieces for ranks of this host are copied, the others go over the network. A block of an
all_gather whose sizes need no check crosses the network once for each other host, to one rank there, which passes it on
inside; the ranks of a host share that work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from .copy_engine import CopyEngine
from .copy_options import CopyOptions
from .device_wire import DeviceWire, Engine, Enqueued, Meet, OpensFirst, host_of
from .exchange import Exchange
from .lane import HostTransport
from .staging import StagingEngine
from .windows_opening import gather_bytes, host_key

_KEY_BYTES = 96


@dataclass(frozen=True)
class Hosts:
    """Which rank is on which host.

    Attributes:
        hosts: Host of every rank, numbered in order of their first ranks.

    Example:
        >>> hosts = Hosts((0, 0, 1, 1, 1))
        >>> hosts.members(1), hosts.leader(0, 1), hosts.leader(1, 1), hosts.leader(4, 0)
        ([2, 3, 4], 2, 3, 0)
    """

    hosts: tuple[int, ...]

    def members(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, at in enumerate(self.hosts) if at == host]

    def leader(self, source: int, host: int) -> int:
        """Which rank of another host takes the block of `source` and passes it on."""
        members = self.members(host)
        return members[self.members(self.hosts[source]).index(source) % len(members)]

    def led(self, rank: int) -> list[int]:
        """The ranks of other hosts whose blocks a rank passes on."""
        here = self.hosts[rank]
        return [
            source
            for source in range(len(self.hosts))
            if self.hosts[source] != here and self.leader(source, here) == rank
        ]


class HostsEngine:
    """One engine inside the host, one between hosts.

    Args:
        rank: This rank.
        hosts: Where every rank is.
        inside: Exchanges between the ranks of this host.
        between: Exchanges between all ranks; used for those of other hosts.
    """

    def __init__(self, rank: int, hosts: Hosts, inside: OpensFirst, between: OpensFirst) -> None:
        self._rank, self._hosts, self._inside, self._between = rank, hosts, inside, between
        here = hosts.hosts[rank]
        self._members = hosts.members(here)
        self._is_here = np.array([host == here for host in hosts.hosts])
        self._stream: torch.cuda.Stream | None = None

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        """See `Engine.begin`."""
        # Both before either has a stream that waits: what the second registers would wait for it.
        for engine in (self._between, self._inside):
            engine.open(exchange.source.device.index or 0, meet)
        # Where sizes are compared, two ranks may disagree about a block that a third one waits for: pairs go on alone.
        combines = exchange.operation == "all_gather" and not exchange.checked
        parts = (self._begin_all_gather if combines else self._begin_all_to_all)(exchange, sequence, meet)
        exchange.join = lambda: [part.join() for part in parts if part.join is not None]
        return Enqueued()

    def split(self, timeout_s: float) -> HostsEngine:
        """See `Engine.split`."""
        return HostsEngine(self._rank, self._hosts, self._inside.split(timeout_s), self._between.split(timeout_s))

    def raise_failure(self) -> None:
        """See `Engine.raise_failure`."""
        self._inside.raise_failure()
        self._between.raise_failure()

    def release(self, reason: BaseException | None) -> None:
        """See `Engine.release`."""
        self._inside.release(reason)
        self._between.release(reason)

    def _begin_all_to_all(self, exchange: Exchange, sequence: int, meet: Meet) -> list[Exchange]:
        between = replace(
            exchange,
            sent_bytes=np.where(self._is_here, 0, exchange.sent_bytes),
            received_bytes=np.where(self._is_here, 0, exchange.received_bytes),
            kept_bytes=0,
        )
        inside = self._within(exchange)
        self._between.begin(between, sequence, meet)
        self._inside.begin(inside, sequence, meet)
        return [between, inside]

    def _begin_all_gather(self, exchange: Exchange, sequence: int, meet: Meet) -> list[Exchange]:
        hosts, rank = self._hosts, self._rank
        sent, received = np.zeros_like(exchange.sent_bytes), np.zeros_like(exchange.received_bytes)
        for host in set(hosts.hosts) - {hosts.hosts[rank]}:
            leader = hosts.leader(rank, host)
            sent[leader] = exchange.sent_bytes[leader]
        for source in hosts.led(rank):
            received[source] = exchange.received_bytes[source]
        between = replace(exchange, sent_bytes=sent, received_bytes=received, kept_bytes=0)
        inside = self._within(exchange)
        self._between.begin(between, sequence, meet)
        self._inside.begin(inside, sequence, meet)
        parts = [between, inside]
        ready = self._ready_after(between)
        for passed in self._passes():
            part = self._pass_on(exchange, passed, ready)
            self._inside.begin(part, sequence, meet)
            parts.append(part)
        return parts

    def _within(self, exchange: Exchange) -> Exchange:
        """The part of an exchange between ranks of this host, with what this rank keeps."""
        return replace(
            exchange,
            sent_bytes=np.where(self._is_here, exchange.sent_bytes, 0),
            received_bytes=np.where(self._is_here, exchange.received_bytes, 0),
        )

    def _passes(self) -> list[dict[int, int]]:
        """What members of this host pass on, one block each at a time: member → rank that the block is from."""
        led = {member: self._hosts.led(member) for member in self._members}
        return [
            {member: sources[number] for member, sources in led.items() if number < len(sources)}
            for number in range(max(len(sources) for sources in led.values()))
        ]

    def _pass_on(self, exchange: Exchange, passed: dict[int, int], ready: torch.cuda.Event | None) -> Exchange:
        """Members send the blocks that came to them to the other members."""
        sent, sent_at, received, received_at = (np.zeros_like(exchange.sent_bytes) for _ in range(4))
        for member, source in passed.items():
            size, at = exchange.received_bytes[source], exchange.received_at[source]
            if member != self._rank:
                received[member], received_at[member] = size, at
                continue
            for other in self._members:
                if other != self._rank:
                    sent[other], sent_at[other] = size, at
        return replace(
            exchange,
            operation="all_to_all",
            rows=exchange.out,
            sent_bytes=sent,
            sent_at=sent_at,
            received_bytes=received,
            received_at=received_at,
            kept_bytes=0,
            ready=ready,
            join=None,
        )

    def _ready_after(self, between: Exchange) -> torch.cuda.Event | None:
        """An event that comes when what other hosts sent is here."""
        if between.ready is None:  # no CUDA: the streams are threads, which wait here
            if between.join is not None:
                between.join()
            return None
        device = between.source.device
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            if between.join is not None:
                between.join()
            arrived: torch.cuda.Event = self._stream.record_event()
        return arrived


def find_hosts(lane: HostTransport) -> Hosts:
    """Find out which ranks share a host; collective."""
    keys = gather_bytes(lane, host_key().encode(), _KEY_BYTES)
    firsts = list(dict.fromkeys(keys))
    return Hosts(tuple(firsts.index(key) for key in keys))


def use_engines(lane: HostTransport, options: CopyOptions, hosts: Hosts | None = None) -> None:
    """Let a new channel of a host transport move CUDA tensors too; collective.

    Args:
        lane: The channel; carries host tensors as before, and CUDA tensors between hosts by way of pinned memory.
        options: How ranks of one host exchange.
        hosts: Where ranks are; None means to find out.
    """
    rank, world_size, timeout_s = lane.rank, lane.world_size, lane.timeout_s
    staging = StagingEngine(rank, world_size, timeout_s, options.window_bytes)
    engine: Engine = staging
    if options.inside != "staged":
        hosts = find_hosts(lane) if hosts is None else hosts
        members = hosts.members(hosts.hosts[rank])
        inside = CopyEngine(rank, members, timeout_s, options.inside, options.window_bytes)
        engine = inside if len(members) == world_size else HostsEngine(rank, hosts, inside, staging)
    lane.use_wire(lambda wire: DeviceWire(host_of(wire), engine, rank, world_size, timeout_s))
