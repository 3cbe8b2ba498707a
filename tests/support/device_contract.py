"""The transport contract for tensors that an engine moves: on GPUs, or with threads in place of streams.

As a script: `python device_contract.py HOST ENGINE` runs it on the ranks it was started on. HOST carries host tensors
("process_group" or "mpi"). ENGINE is "nccl", "peer", "segment" or "staged" on GPUs, "threads-peer" and so on without.
The checks are the cases of `case_report.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from freescale.transport import CopyOptions, Pending, Transport, connect, meetings
from freescale.transport.copy_engine import CopyEngine, Via
from freescale.transport.device_wire import DeviceWire, Engine
from freescale.transport.exchange import Exchange, plan_all_to_all
from freescale.transport.hosts import Hosts, HostsEngine
from freescale.transport.lane import HostTransport
from freescale.transport.layouts import Splits
from freescale.transport.staging import StagingEngine
from freescale.transport.wire import Purpose, Ticket, Wire

from case_report import run_cases
from contract_channels import check_threads_make_channels_at_once_in_any_order
from host_streams import HostStreams
from transport_contract import CHECKS

SMALL_WINDOW = 64 << 10
MOST_CHANNELS = 10  # that may be open at once where streams are threads; those of "hosts" count twice


class ThreadsWire(DeviceWire):
    """Gives every tensor to the engine, whose streams are threads.

    But for a channel's name, which is first; so an engine begins with the first exchange, in the thread that makes it.
    """

    devices: tuple[str, ...] = ("cpu",)

    def begin(self, exchange: Exchange, sequence: int, purpose: Purpose) -> Ticket:
        if purpose == "data" and (sequence or self.size_check == "always"):
            return self._engine.begin(exchange, sequence, self._meet)
        return self._host.begin(exchange, sequence, purpose)

    def split(self, check_sizes: bool, timeout_s: float) -> Wire:
        rank, world_size, _ = self._place
        host, engine = self._host.split(check_sizes, timeout_s), self._engine.split(timeout_s)
        return ThreadsWire(host, engine, rank, world_size, timeout_s)


def use_threads(host: Transport, engine: Engine) -> HostTransport:
    """The host's transport, with an engine for all tensors."""
    assert isinstance(host, HostTransport)
    host._wire = ThreadsWire(host._wire, engine, host.rank, host.world_size, host.timeout_s)
    return host


class OnDevice(HostTransport):
    """Moves what the checks send by way of the GPU, on a stream of each channel's own.

    Channels in several threads would otherwise share one stream, which waits for the transfers of all of them in an
    order that differs between ranks.
    """

    def __init__(self, inner: HostTransport, device: torch.device) -> None:
        self.__dict__ = inner.__dict__
        self.stream = torch.cuda.Stream(device)

    def all_gather(self, block: Tensor, sizes: Splits | None = None, out: Tensor | None = None) -> Pending:
        device = self.stream.device
        with torch.cuda.stream(self.stream):
            theirs = None if out is None else out.to(device)
            return Back(super().all_gather(block.to(device), sizes, theirs), out, self.stream)

    def all_to_all(
        self, rows: Tensor, sent_splits: Splits, received_splits: Splits, out: Tensor | None = None
    ) -> Pending:
        device = self.stream.device
        with torch.cuda.stream(self.stream):
            theirs = None if out is None else out.to(device)
            return Back(super().all_to_all(rows.to(device), sent_splits, received_splits, theirs), out, self.stream)

    def channel(self, name: str, check_sizes: bool | None = None) -> Transport:
        made = super().channel(name, check_sizes)
        assert isinstance(made, HostTransport)
        make_ready(made, self.stream.device)
        on_device = OnDevice(made, self.stream.device)
        self._channels.discard(made)  # stands for it, also when it is closed
        self._channels.add(on_device)
        return on_device


def make_ready(lane: HostTransport, device: torch.device) -> None:
    """Let the engine make what it needs: registering memory waits for streams, which may wait for other threads."""
    wire, ones = lane._wire, [1] * lane.world_size
    assert isinstance(wire, DeviceWire)
    rows = torch.zeros(lane.world_size, device=device)
    exchange = plan_all_to_all(lane.rank, lane.world_size, rows, ones, ones, None, ("cuda",))
    wire._engine.begin(exchange, 0, wire._meet)
    assert exchange.join is not None
    exchange.join()
    torch.cuda.synchronize(device)


class Back(Pending):
    """Brings what arrived back to the host."""

    def __init__(self, inner: Pending, out: Tensor | None, stream: torch.cuda.Stream) -> None:
        self._inner, self._out, self._stream = inner, out, stream

    def test(self) -> bool:
        return self._inner.test()

    def wait(self) -> Tensor:
        with torch.cuda.stream(self._stream):
            arrived = self._inner.wait()
            done = self._stream.record_event()
        # A copy to memory that is not pinned would block the CUDA calls of other threads for as long as it waits.
        deadline = time.monotonic() + 60
        while not done.query():
            assert time.monotonic() < deadline, "nothing arrived"
            time.sleep(0.0002)
        got = arrived.cpu()
        return got if self._out is None else self._out.copy_(got)


def threads_engine(name: str, rank: int, world_size: int, timeout_s: float) -> Engine:
    """An engine whose streams are threads; counts are about to pass 31 or 32 bits. For "hosts", two hosts."""

    def make(device: int) -> HostStreams:
        return HostStreams(delay_s=0.0003 if name == "segment" else 0.0)

    staging = StagingEngine(rank, world_size, timeout_s, SMALL_WINDOW, make, first_count=2**31 - 5)
    if name == "staged":
        return staging
    hosts = Hosts(tuple(int(name == "hosts" and peer >= world_size // 2) for peer in range(world_size)))
    via: Via = "segment" if name == "segment" else "peer"
    members = hosts.members(hosts.hosts[rank])
    meetings.ONE_STREAM_BYTES = 256  # pieces are on both sides of it
    inside = CopyEngine(
        rank, members, timeout_s, via, SMALL_WINDOW, make, first_count=2**32 - 5, direct_from=16, patience_s=0.0005
    )
    return HostsEngine(rank, hosts, inside, staging) if name == "hosts" else inside


def set_deadline(engine: Engine, seconds: float) -> None:
    """Of what is exchanged from now on."""
    engine._timeout_s = seconds  # type: ignore[attr-defined]  # all engines of ours have one
    if isinstance(engine, StagingEngine) and engine._mover is not None:
        engine._mover._lane.timeout_s = seconds


def make_transport(host: str, engine: str, timeout_s: float) -> HostTransport:
    kind, _, name = engine.rpartition("-")
    if kind == "threads":
        HostStreams.most = MOST_CHANNELS
        transport = connect(host, timeout_s=timeout_s)
        return use_threads(transport, threads_engine(name, transport.rank, transport.world_size, timeout_s))
    if engine == "nccl":
        assert host == "process_group"
        return _lane(connect(host, timeout_s=timeout_s))
    if engine in ("staged", "hosts"):
        return _lane(connect(host, timeout_s=timeout_s, copies=CopyOptions("staged")))
    through = connect(host, timeout_s=timeout_s)
    inside: Via = "peer" if engine == "peer" else "segment"
    return _lane(connect("copy_engine", through=through, timeout_s=timeout_s, copies=CopyOptions(inside)))


def _lane(transport: Transport) -> HostTransport:
    assert isinstance(transport, HostTransport)
    return transport


def checks_for(engine: str) -> list[Callable[[Transport], None]]:
    """What an engine has to do. NCCL asks for one order of all channels, on all ranks."""
    left_out = [check_threads_make_channels_at_once_in_any_order] if engine == "nccl" else []
    return [check for check in CHECKS if check not in left_out]


def main(host: str, engine: str) -> None:
    transport = connect_device(host, engine, 60)
    if not engine.startswith("threads"):
        transport = OnDevice(transport, torch.device("cuda", torch.cuda.current_device()))
    run_cases({check.__name__: partial(timed, check, transport) for check in checks_for(engine)})
    print("all passed", transport.world_size, flush=True)
    transport.close()
    if host == "process_group":
        torch.distributed.destroy_process_group()


def timed(check: Callable[[HostTransport], None], transport: HostTransport) -> None:
    """Run a check and say how long it took. No check finds channels that the ones before have left open."""
    transport.all_gather(torch.zeros(1)).wait()
    for channel in list(transport._channels):
        channel.close()
    begun = time.monotonic()
    check(transport)
    print(f"passed {check.__name__} in {time.monotonic() - begun:.2f} s", flush=True)


def connect_device(host: str, engine: str, timeout_s: float) -> HostTransport:
    """Take a GPU where the engine needs one, and connect."""
    if host == "process_group":
        torch.distributed.init_process_group("gloo")
    if not engine.startswith("threads"):
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return make_transport(host, engine, timeout_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
