"""What ranks on two machines check over RDMA; each function is run by every rank, see rdma_runner.py."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from freescale.balancer import JaggedBatch, balance, greedy_batch_size, read_parquet
from freescale.transport import (
    ChunkEvent,
    RdmaOptions,
    Transport,
    TransportError,
    TransportTimeout,
    connect,
    draw_trace,
)
from freescale.transport.exchange import plan_all_to_all
from freescale.transport.lane import HostTransport
from freescale.transport.verbs.device import find_port
from freescale.transport.verbs.wire import VerbsWire

import transport_contract
from known_rows import column, expected_rows, make_rows, make_splits, same_bytes

OUT = Path("/out")
ACK_TIMEOUT = 17  # 0.5 s, 7 times: on a busy machine a living peer may not come to run for a second
SHORT_ACK_TIMEOUT = 16
MOST_LOSSY_ROUNDS = 12  # that nothing of some twenty packets a rank is lost in all of them: not once in 10^8


@dataclass(frozen=True)
class Check:
    """What to run.

    Attributes:
        world_size: Number of ranks, on both machines together.
        body: Called by each rank with a transport between the ranks that is not RDMA.
        timeout_s: Deadline of the check.
        launcher: "fork", or "mpi" (two ranks, one a machine, with MPI over UCX over verbs).
    """

    world_size: int
    body: Callable[[Transport], None]
    timeout_s: float = 200.0
    launcher: str = "fork"


def find_gid_index() -> int:
    """Of the address that the machines reach each other by."""
    return find_port(None, 1, None).gid_index


def over_rdma(through: Transport, binding: str, timeout_s: float = 60.0, **options: object) -> HostTransport:
    """Connect; all options of RdmaOptions."""
    rdma = RdmaOptions(binding=binding, **{"ack_timeout": ACK_TIMEOUT, **options})  # type: ignore[arg-type]  # of any type
    made = connect("verbs", through=through, rdma=rdma, timeout_s=timeout_s)
    assert isinstance(made, HostTransport)
    return made


def keep_contract(through: Transport, binding: str | None) -> None:
    """Run the contract of transports, over `through` itself if no binding is named."""
    transport = through if binding is None else over_rdma(through, binding)
    for check in transport_contract.CHECKS:
        begun = time.monotonic()
        check(transport)
        print(f"passed {check.__name__} in {time.monotonic() - begun:.2f} s", flush=True)
    if binding is not None:
        transport.close()


def be_late(through: Transport, binding: str) -> None:
    """Run the part of the contract that leaves transfers unfinished."""
    transport = over_rdma(through, binding)
    for check in transport_contract.LATE_CHECKS:
        check(transport)
        print(f"passed {check.__name__}", flush=True)
    transport.close()


def exchange_a_lot(transport: Transport, seed: int, most_rows: int) -> None:
    """Uneven pieces of many chunks, some of them empty, and blocks that go around the ring."""
    rank, n = transport.rank, transport.world_size
    splits = [[size * most_rows // 5 for size in row] for row in make_splits(seed, n)]
    splits[0][n - 1] = most_rows
    rows, expected = expected_rows(seed, splits, rank, (3,), torch.int32)
    assert same_bytes(transport.all_to_all(rows, splits[rank], column(splits, rank)).wait(), expected)
    sizes = [(1 + (peer * 7) % 3) * most_rows // 3 for peer in range(n)]
    sizes[-1] = 5
    blocks = [make_rows(seed + peer, size) for peer, size in enumerate(sizes)]
    assert same_bytes(transport.all_gather(blocks[rank], sizes).wait(), torch.cat(blocks))


def survive_packet_loss(through: Transport, binding: str) -> None:
    """Everything arrives, exactly, over a wire that loses packets."""
    transport = over_rdma(through, binding, timeout_s=100, ack_timeout=SHORT_ACK_TIMEOUT)
    _traffic_control("add", "netem", "loss", "1%")
    try:
        lost = torch.zeros(1, dtype=torch.int64)
        for seed in range(MOST_LOSSY_ROUNDS):  # two, but for chance
            exchange_a_lot(transport, seed, 40_000)
            lost[0] = _count_lost_packets()
            if transport.all_gather(lost).wait().min() > 0 and seed > 0:
                break
    finally:
        _traffic_control("del")
    print("packets lost:", int(lost), flush=True)
    transport.all_gather(torch.zeros(1)).wait()
    transport.close()


def _count_lost_packets() -> int:
    said = _traffic_control("-s", "show")
    dropped = re.search(r"dropped (\d+)", said)
    assert dropped, said
    return int(dropped[1])


def _traffic_control(*words: str) -> str:
    what = ["-s", "qdisc", "show", "dev", "eth0"] if words[0] == "-s" else ["qdisc", words[0], "dev", "eth0", "root"]
    rest = [] if words[0] == "-s" else list(words[1:])
    return subprocess.run(["tc", *what, *rest], capture_output=True, text=True, timeout=60, check=True).stdout


def lose_a_killed_peer(through: Transport, binding: str) -> None:
    """Rank 1 is killed while rank 0 waits for it: an error that names it, long before the deadline."""
    transport = over_rdma(through, binding, timeout_s=60, ack_timeout=SHORT_ACK_TIMEOUT)
    transport.all_gather(torch.zeros(1)).wait()
    if transport.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"all_gather #2 on .*rank 1 cannot be reached: RETRY_EXC_ERR") as caught:
        transport.all_gather(torch.zeros(1)).wait()
    print(f"reported after {time.monotonic() - begun:.1f} s: {caught.value}", flush=True)
    assert not isinstance(caught.value, TransportTimeout)
    transport.close()
    os._exit(0)  # the group of torch.distributed has lost a member


def outwait_a_stopped_peer(through: Transport, binding: str) -> None:
    """Rank 1 stands still: its card still answers, so only the deadline helps. It then learns that rank 0 has left."""
    transport = over_rdma(through, binding)
    large = torch.zeros(200_000)
    transport.all_gather(large).wait()
    transport.timeout_s = 2.0
    if transport.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(TransportError, match=r"rank 0 has left: all_gather #2 .* waited 2 s"):
            transport.all_gather(large).wait()
    else:
        with pytest.raises(TransportTimeout, match=r"rank 0 of 2 waited 2 s, moving data; missing: ranks \[1\]"):
            transport.all_gather(large).wait()
    through.all_gather(torch.zeros(1)).wait()


def hear_of_a_peer_that_raises(through: Transport, binding: str) -> None:
    """Rank 1 ends by an exception, without closing anything: rank 0 is told at once."""
    transport = over_rdma(through, binding, timeout_s=60)
    transport.all_gather(torch.zeros(1)).wait()
    if transport.rank == 1:
        raise ValueError("the loader broke")
    begun = time.monotonic()
    with pytest.raises(TransportError, match="rank 1 has left: its process ended"):
        transport.all_gather(torch.zeros(1)).wait()
    print(f"reported after {time.monotonic() - begun:.1f} s", flush=True)
    transport.close()
    os._exit(0)


def refuse_different_bindings(through: Transport) -> None:
    """Libraries may write tags in another byte order."""
    with pytest.raises(TransportError, match="all ranks must name the same binding"):
        over_rdma(through, "pyverbs" if through.rank else "ibverbs")


def live_beside_forks(through: Transport, binding: str) -> None:
    """Neither workers of a DataLoader nor a child that drops what it has disturb the connections."""
    transport = over_rdma(through, binding)
    exchange_a_lot(transport, 1, 4000)
    numbers = TensorDataset(torch.arange(8))
    assert len(list(DataLoader(numbers, num_workers=1, multiprocessing_context="fork"))) == 8
    if (child := os.fork()) == 0:
        transport.close()
        del transport
        gc.collect()
        os._exit(0)  # gloo, which is here too, does not survive more
    for seed in range(2, 4):
        exchange_a_lot(transport, seed, 4000)
    assert os.waitpid(child, 0)[1] == 0
    exchange_a_lot(transport, 5, 4000)
    transport.close()


def pass_chunks_on_around_the_ring(through: Transport, binding: str) -> None:
    """Figure 6: a rank passes the first chunks of a block on while the last ones are still coming."""
    trace: list[ChunkEvent] = []
    transport = over_rdma(through, binding, chunk_bytes=2**16, trace=trace)
    rank, n = transport.rank, transport.world_size
    for sizes in ([2**17] * n, [2**17] + [5] * (n - 1)):  # 1 MiB, 16 chunks
        blocks = [make_rows(peer, size) for peer, size in enumerate(sizes)]
        trace.clear()
        out = transport.all_gather(blocks[rank], sizes).wait()
        assert same_bytes(out, torch.cat(blocks))
        assert {event.peer for event in trace if event.step == "on the wire"} <= {(rank + 1) % n}
        arrived = {e[4:6]: e.time_ns for e in trace if e.step == "arrived"}
        sent = {e[4:6]: e.time_ns for e in trace if e.step == "on the wire"}
        assert all(sent[chunk] >= arrived[chunk] for chunk in sent if chunk[0] != rank)
        assert len(arrived) == 16 * sum(size > 5 for peer, size in enumerate(sizes) if peer != rank)
        (OUT / f"trace.{rank}.{sizes[-1]}").write_text(draw_trace(trace))
    if 0 < rank < n - 1:
        assert sent[0, 0] < arrived[0, 15 * 2**16], "passed on while the rest of its block was coming"
    transport.close()


class _Filling:
    """A source that becomes ready chunk by chunk, as a copy from a GPU makes it; each when asked for the third time."""

    def __init__(self, source: Tensor, contents: Tensor, chunk_bytes: int) -> None:
        self._source, self._contents, self._chunk_bytes = source, contents, chunk_bytes
        self._num_asked = 0
        self.ready_ns: list[int] = []
        self.landed_bytes = 0

    def is_ready(self, start: int, stop: int) -> bool:
        if start == len(self.ready_ns) * self._chunk_bytes:
            self._num_asked += 1
            if self._num_asked % 3 == 0:
                self._source[start:stop] = self._contents[start:stop]
                self.ready_ns.append(time.monotonic_ns())
        return stop <= len(self.ready_ns) * self._chunk_bytes

    def landed(self, start: int, stop: int) -> None:
        self.landed_bytes += stop - start


def send_while_the_source_fills(through: Transport, binding: str) -> None:
    """Chunk k is on the wire before chunk k + 1 is there; memory that is kept registered is not copied."""
    trace: list[ChunkEvent] = []
    transport = over_rdma(through, binding, chunk_bytes=2**16, trace=trace)
    rank, wire = transport.rank, transport._wire
    assert isinstance(wire, VerbsWire)
    contents = [make_rows(peer, 8 * 2**16, dtype=torch.uint8) for peer in (0, 1)]
    source, out = torch.zeros_like(contents[0]), torch.zeros_like(contents[0])
    wire.keep(source.numpy())
    wire.keep(out.numpy())
    sent, received = ([0, len(out)], [0, len(out)]) if rank == 0 else ([len(out), 0], [len(out), 0])
    exchange = plan_all_to_all(rank, 2, source, sent, received, out)
    filling = exchange.chunks = _Filling(source, contents[rank], 2**16)
    ticket = wire.begin(exchange, 1_000_000, "data")
    deadline = time.monotonic() + 60
    while not ticket.block(1.0):
        assert time.monotonic() < deadline
    assert torch.equal(out, contents[1 - rank])
    assert filling.landed_bytes == len(out)
    sent_ns = [event.time_ns for event in trace if event.step == "on the wire" and event.sequence == 1_000_000]
    assert len(sent_ns) == 8
    assert all(at < ready for at, ready in zip(sent_ns, filling.ready_ns[1:], strict=False))
    assert wire._landing is None and wire._staging is None, "straight from and to memory that is kept"  # noqa: PT018
    (OUT / f"filling.{rank}").write_text(draw_trace(e for e in trace if e.sequence == 1_000_000))
    transport.all_gather(torch.zeros(1)).wait()
    transport.close()


def describe_samples(batch: JaggedBatch) -> list[str]:
    """One line for each sample, with all its values."""
    columns = {name: batch[name].to_list() for name in sorted(batch.names)}
    return [json.dumps([columns[name][i] for name in columns]) for i in range(batch.batch_size)]


def balance_parquet(through: Transport, binding: str) -> None:
    """Every row of the file comes out of exactly one rank, whole; the test compares with the file."""
    transport = over_rdma(through, binding)
    path = Path(f"/tmp/data-{transport.rank}.parquet")
    shutil.copy(OUT / "data.parquet", path)
    source = read_parquet(path, 16, rank=transport.rank, world_size=transport.world_size)
    loader = balance(source, transport, "page", greedy_batch_size)
    samples, before, after = [], [], []
    for batch, report in loader.with_reports():
        samples += describe_samples(batch)
        before.append(report.straggler_before)
        after.append(report.straggler_after)
    (OUT / f"samples.{transport.rank}").write_text("\n".join(samples))
    print(f"straggler {np.mean(before):.1f} % -> {np.mean(after):.1f} %", flush=True)
    transport.close()


def run_over_mpi(through: Transport) -> None:
    """MPI itself runs over UCX over verbs, and RDMA of our own connects through it."""
    keep_contract(through, None)
    transport = over_rdma(through, "ibverbs")
    exchange_a_lot(transport, 3, 4000)
    transport.close()
    from mpi4py import MPI

    print("MPI is", MPI.Get_library_version().split(",")[0], flush=True)


CHECKS: dict[str, Check] = {
    "contract-2-pyverbs": Check(2, partial(keep_contract, binding="pyverbs"), 300),
    "contract-3": Check(3, partial(keep_contract, binding="ibverbs"), 300),
    "late": Check(3, partial(be_late, binding="ibverbs"), 300),
    "loss": Check(2, partial(survive_packet_loss, binding="ibverbs"), 300),
    "killed-pyverbs": Check(2, partial(lose_a_killed_peer, binding="pyverbs")),
    "killed-ibverbs": Check(2, partial(lose_a_killed_peer, binding="ibverbs")),
    "stopped": Check(2, partial(outwait_a_stopped_peer, binding="ibverbs")),
    "raising": Check(2, partial(hear_of_a_peer_that_raises, binding="ibverbs")),
    "bindings-pyverbs": Check(2, refuse_different_bindings),
    "children-pyverbs": Check(2, partial(live_beside_forks, binding="pyverbs")),
    "children-ibverbs": Check(2, partial(live_beside_forks, binding="ibverbs")),
    "ring": Check(4, partial(pass_chunks_on_around_the_ring, binding="ibverbs")),
    "filling-pyverbs": Check(2, partial(send_while_the_source_fills, binding="pyverbs")),
    "parquet": Check(4, partial(balance_parquet, binding="ibverbs"), 300),
    "mpi": Check(2, run_over_mpi, 300, "mpi"),
    "contract-4": Check(4, partial(keep_contract, binding="ibverbs"), 300),
}
