"""RDMA's bookkeeping, and what it makes of faults, over a network of threads; tests/rdma has real ones.

See fake_rdma.py: the code under test is all of transport/verbs but the two files that call a library.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from freescale.transport import (
    ChunkEvent,
    Transport,
    TransportError,
    TransportTimeout,
    draw_trace,
)
from freescale.transport.exchange import plan_all_gather, plan_all_to_all
from freescale.transport.lane import HostTransport
from freescale.transport.verbs.binding import Address
from freescale.transport.verbs.messages import (
    CREDIT,
    DATA,
    LEFT,
    MESSAGE,
    Key,
    count_on,
    make_tag,
    split_tag,
    write_grants,
    write_record,
)
from freescale.transport.verbs.wire import VerbsWire

import transport_contract
from fake_rdma import FakePair, Network, connect_fakes
from known_rows import column, expected_rows, make_rows, make_splits, same_bytes
from rank_threads import run_in_threads


def wire_of(transport: Transport) -> VerbsWire:
    assert isinstance(transport, HostTransport)
    assert isinstance(transport._wire, VerbsWire)
    return transport._wire


def exchange_a_lot(transport: Transport, seed: int = 0, most_rows: int = 30_000) -> None:
    """Uneven pieces of many chunks, some empty, and blocks around the ring; several at once."""
    rank, n = transport.rank, transport.world_size
    splits = [[size * most_rows // 5 for size in row] for row in make_splits(seed, n)]
    rows, expected = expected_rows(seed, splits, rank)
    sizes = [(peer * 7 + seed) % 4 * most_rows // 3 for peer in range(n)]
    blocks = [make_rows(seed + peer, size) for peer, size in enumerate(sizes)]
    first = transport.all_to_all(rows, splits[rank], column(splits, rank))
    second = transport.all_gather(blocks[rank], sizes)
    third = transport.all_to_all(rows, splits[rank], column(splits, rank))
    assert same_bytes(third.wait(), expected)
    assert same_bytes(second.wait(), torch.cat(blocks))
    assert same_bytes(first.wait(), expected)


def count_no_files(check: Callable[[Transport], None]) -> bool:
    """Whether a check may run here: ranks that are threads of one process have its files in common."""
    return "hold_nothing" not in check.__name__ and "given_back" not in check.__name__


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_contract_holds(world_size: int) -> None:
    network = Network()

    def run(transport: Transport) -> None:
        for check in filter(count_no_files, transport_contract.CHECKS):
            check(transport)

    transports = connect_fakes(network, world_size)
    run_in_threads(world_size, run, transports=transports)
    for transport in transports:
        transport.close()
    assert not network.regions
    assert not network.pairs


def test_late_ranks_are_timeouts() -> None:
    def run(transport: Transport) -> None:
        for check in filter(count_no_files, transport_contract.LATE_CHECKS):
            check(transport)

    run_in_threads(3, run, transports=connect_fakes(Network(), 3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk_bytes", [4096, 10_007, 2**20])
def test_many_chunks_arrive_where_they_belong(world_size: int, chunk_bytes: int) -> None:
    def run(transport: Transport) -> None:
        for seed in range(3):
            exchange_a_lot(transport, seed)

    run_in_threads(world_size, run, transports=connect_fakes(Network(), world_size, chunk_bytes=chunk_bytes))


def test_many_exchanges_under_way_wait_for_room_in_the_ring_of_messages() -> None:
    def run(transport: Transport) -> None:
        if transport.rank:
            time.sleep(0.1)
        pending = [transport.all_gather(torch.full((300,), step)) for step in range(100)]
        for step, each in enumerate(pending):
            assert each.wait().tolist() == [step] * 600

    run_in_threads(2, run, transports=connect_fakes(Network(), 2))


def test_a_chunk_is_passed_on_before_its_block_is_complete() -> None:
    traces: list[list[ChunkEvent]] = [[] for _ in range(3)]
    wires = [wire_of(transport) for transport in connect_fakes(Network(), 3, traces=traces)]
    sizes = [2**17, 5, 5]  # one block of 16 chunks, two that need none
    blocks = [make_rows(rank, sizes[rank]) for rank in range(3)]
    exchanges = [plan_all_gather(rank, 3, blocks[rank], sizes, None) for rank in range(3)]
    tickets = [wire.begin(exchange, 99, "data") for wire, exchange in zip(wires, exchanges, strict=True)]
    for _ in range(1000):
        done = [ticket.poll() for ticket in tickets]  # in turn, as ranks of one speed
        if all(done):
            break
    assert all(same_bytes(exchange.out, torch.cat(blocks)) for exchange in exchanges)
    chunks = [(0, start) for start in range(0, 2**20, 2**16)]
    for rank, trace in enumerate(traces):
        sent = {e[4:6]: e.time_ns for e in trace if e.sequence == 99 and e.step == "on the wire"}
        arrived = {e[4:6]: e.time_ns for e in trace if e.sequence == 99 and e.step == "arrived"}
        assert list(sent) == ([] if rank == 2 else chunks)
        assert list(arrived) == ([] if rank == 0 else chunks)
        assert {e.peer for e in trace if e.step == "on the wire"} <= {rank + 1}
    passed_on = {e.start: e.time_ns for e in traces[1] if e.step == "on the wire"}
    received = {e.start: e.time_ns for e in traces[1] if e.step == "arrived"}
    assert all(passed_on[start] >= received[start] for _, start in chunks)
    assert passed_on[0] < received[15 * 2**16]
    assert len(draw_trace(e for e in traces[1] if e.owner == 0 and e.size == 2**16).splitlines()) == 32


def test_memory_that_is_kept_is_registered_once_and_never_copied() -> None:
    network = Network()

    def run(transport: Transport) -> None:
        wire = wire_of(transport)
        rows, out = torch.zeros(300_000), torch.zeros(300_000)
        wire.keep(rows.view(torch.uint8).numpy())
        wire.keep(out.view(torch.uint8).numpy())
        wire.keep(rows.view(torch.uint8).numpy()[8:])  # registered already
        other = 1 - transport.rank
        splits = [0, len(rows)] if other else [len(rows), 0]
        for step in range(4):
            rows.fill_(10 * step + transport.rank)
            transport.all_to_all(rows, splits, splits, out).wait()
            assert torch.equal(out, torch.full_like(out, 10 * step + other))
        assert wire._landing is None
        assert wire._staging is None

    run_in_threads(2, run, transports=connect_fakes(network, 2))
    assert network.num_registered == 2 * 3


def test_thousands_of_exchanges_of_varying_size_register_nothing_more() -> None:
    network = Network()
    transports = connect_fakes(network, 2)

    def run(transport: Transport) -> None:
        for step in range(2500):
            size = 1 + (step * 7919) % 3000
            assert len(transport.all_gather(torch.zeros(size)).wait()) == 2 * size

    run_in_threads(2, run, transports=transports)
    assert network.num_registered == 2 * 3
    for transport in transports:
        wire = wire_of(transport)
        assert [len(wire._tickets), len(wire._places), len(wire._early)] == [0, 0, 0]
        assert all(link.num_granted == link.num_under_way == 0 for link in wire.links.values())


class Slow:
    """A source that becomes ready from its end."""

    def __init__(self) -> None:
        self.ready_from, self.landed_bytes = 2**62, 0

    def is_ready(self, start: int, stop: int) -> bool:
        return start >= self.ready_from

    def landed(self, start: int, stop: int) -> None:
        self.landed_bytes += stop - start


def test_what_is_not_ready_is_not_sent_and_what_is_ready_does_not_wait_for_it() -> None:
    together = threading.Barrier(3, timeout=250)

    def run(transport: Transport) -> None:
        wire, rank = wire_of(transport), transport.rank
        rows = make_rows(rank, 30_000, dtype=torch.uint8)
        sent = [10_000, 10_000, 10_000]
        exchange = plan_all_to_all(rank, 3, rows, sent, sent, None)
        slow = exchange.chunks = Slow()
        ticket = wire.begin(exchange, 77, "data")
        slow.ready_from = 20_000  # what goes to rank 2
        while slow.landed_bytes < 20_000 and rank == 2:
            ticket.block(0.1)
        assert not ticket.block(0.3)
        together.wait()
        assert slow.landed_bytes == (20_000 if rank == 2 else 0)
        together.wait()
        slow.ready_from = 0
        assert ticket.block(60)
        assert slow.landed_bytes == 20_000
        expected = [
            make_rows(peer, 30_000, dtype=torch.uint8)[10_000 * rank : 10_000 * (rank + 1)] for peer in range(3)
        ]
        assert torch.equal(exchange.out, torch.cat(expected))
        transport.all_gather(torch.zeros(1)).wait()

    run_in_threads(3, run, transports=connect_fakes(Network(), 3))


def test_a_peer_that_dies_with_nothing_on_its_way_to_it_is_an_error_that_names_it() -> None:
    is_through = threading.Event()

    def run(transport: Transport) -> None:
        transport.all_gather(torch.zeros(1)).wait()
        if transport.rank == 0:
            is_through.set()
        if transport.rank == 1:
            assert is_through.wait(60)
            time.sleep(0.3)  # what rank 0 sends is delivered
            for link in wire_of(transport).links.values():
                link.pair.close()  # as the kernel does when a process ends
            return
        with pytest.raises(TransportError, match=r"rank 1 cannot be reached: RETRY_EXC_ERR") as caught:
            transport.all_gather(torch.zeros(1)).wait()
        assert not isinstance(caught.value, TransportTimeout)

    run_in_threads(2, run, transports=connect_fakes(Network(), 2))


def test_a_peer_that_dies_while_others_exchange_does_not_stop_these() -> None:
    is_gone = threading.Event()

    def run(transport: Transport) -> None:
        n, rank = transport.world_size, transport.rank
        wire = wire_of(transport)
        if rank == 2:
            wire.abandon()
            is_gone.set()
            return
        assert is_gone.wait(60)
        pending = transport.all_to_all(make_rows(rank, 3 * 20_000), [20_000] * n, [20_000] * n)
        with pytest.raises(TransportError, match="rank 2 cannot be reached"):
            pending.wait()

    run_in_threads(3, run, transports=connect_fakes(Network(), 3))


def test_the_first_failure_of_a_connection_is_told_and_not_that_the_rest_was_flushed() -> None:
    network = Network()
    transports = connect_fakes(network, 2)
    network.refuse = lambda _pair, size, _tag: 9 if size > 4096 else 0

    def run(transport: Transport) -> None:
        with pytest.raises(TransportError, match=r"cannot be reached: REM_INV_REQ_ERR|has left: .*REM_INV_REQ_ERR"):
            transport.all_gather(torch.zeros(100_000)).wait()

    run_in_threads(2, run, transports=transports)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda size, tag: (size - (tag >> 30 == DATA), tag), r"to place \d+, which is not its"),
        (lambda size, tag: (size, tag + 1000) if tag >> 30 == DATA else (size, tag), r"to place \d+, which is not its"),
        (lambda size, tag: (size, make_tag(MESSAGE, 5)) if tag >> 30 == MESSAGE else (size, tag), "out of turn"),
        (lambda size, tag: (12, tag) if tag >> 30 == MESSAGE else (size, tag), "a message that is none"),
        (lambda size, tag: (size, make_tag(CREDIT, 77)) if tag >> 30 == MESSAGE else (size, tag), "says it read"),
    ],
    ids=["size", "place", "slot", "short", "credit"],
)  # fmt: skip
def test_nothing_from_a_peer_is_trusted(alter: object, message: str) -> None:
    network = Network()
    transports = connect_fakes(network, 2)
    first = wire_of(transports[0]).links[1].pair.number
    assert callable(alter)

    def bend(pair: FakePair, size: int, tag: int | None) -> tuple[int, int | None]:
        return (size, tag) if pair.number != first or tag is None else alter(size, tag)

    network.alter = bend
    said: list[str] = []

    def run(transport: Transport) -> None:
        try:
            transport.all_gather(torch.zeros(100_000)).wait()
        except TransportError as error:
            said.append(str(error))

    run_in_threads(2, run, transports=transports)
    assert any(re.search(message, each) for each in said), said


@pytest.mark.parametrize(
    "lie",
    [
        write_record(Key(0, 1), np.array([1, 0, 5, 5, 8]), b"12"),
        write_record(Key(0, 1), np.array([1, 0, -5, 5, 8]), b""),
        write_grants(Key(0, 1), []),
    ],
    ids=["too little", "negative", "places for nothing"],
)
def test_messages_that_lie_about_what_follows_are_refused(lie: bytes) -> None:
    transports = connect_fakes(Network(), 2)
    link = wire_of(transports[1]).links[0]
    link.send(lie)
    with pytest.raises(TransportError, match="rank 1 broke the protocol"):
        transports[0].all_gather(torch.zeros(5, dtype=torch.int64)).wait()


def test_ranks_do_not_connect_to_what_cannot_be_a_queue_pair() -> None:
    for wrong in (Address(0, 0, 0, 5, bytes(16)), Address(1, 2**24, 0, 5, bytes(16)), Address(1, 0, 0, 6, bytes(16))):
        with pytest.raises(TransportError, match="which cannot be"):
            wrong.check()


def test_tags_hold_kind_and_number_and_counts_go_on_past_30_bits() -> None:
    for kind in (DATA, MESSAGE, CREDIT, LEFT):
        assert split_tag(make_tag(kind, 2**30 + 7)) == (kind, 7)
    assert count_on(2**30 - 2, 3) == 2**30 + 3
    assert count_on(5 * 2**30 + 9, 9) == 5 * 2**30 + 9


def test_closing_tells_whoever_waits_and_a_failure_tells_why() -> None:
    def run(transport: Transport) -> None:
        lane = transport.channel("left")
        if transport.rank == 0:
            transport.all_gather(torch.zeros(1)).wait()
            lane.close()
        else:
            pending = lane.all_gather(torch.zeros(1))
            transport.all_gather(torch.zeros(1)).wait()
            with pytest.raises(TransportError, match="rank 0 has left: it closed the channel"):
                pending.wait()

    run_in_threads(2, run, transports=connect_fakes(Network(), 2))


def test_a_channel_can_be_closed_by_another_thread_while_one_waits() -> None:
    transports = connect_fakes(Network(), 2)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            transports[0].all_gather(torch.zeros(1)).wait()
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    transports[0].close()
    thread.join(60)
    assert "was closed" in str(errors[0])


def test_more_than_2_gib_arrive() -> None:
    rows = 2**31 + 4096

    def run(transport: Transport) -> None:
        sent, received = ([0, rows], [0, 100]) if transport.rank == 0 else ([100, 0], [rows, 0])
        source = torch.zeros(sum(sent), dtype=torch.int8)
        source[:100] = 1
        source[-100:] += 2
        out = transport.all_to_all(source, sent, received).wait()
        if transport.rank == 0:
            assert out.tolist() == [3] * 100
        else:
            assert (out[:100].tolist(), out[-100:].tolist()) == ([1] * 100, [2] * 100)
            assert not out[100:-100].any()

    transports = connect_fakes(Network(), 2, timeout_s=250, chunk_bytes=2**23)
    run_in_threads(2, run, timeout_s=250, transports=transports)
