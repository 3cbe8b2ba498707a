"""Which byte crosses the network between hosts, and who passes it on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from freescale.transport.device_wire import Enqueued, Meet
from freescale.transport.exchange import Exchange, plan_all_gather, plan_all_to_all
from freescale.transport.hosts import Hosts, HostsEngine
from freescale.transport.lane import HostTransport

PLACES = [(0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 0, 1, 1), (0, 0, 0, 1, 2, 2), (0, 1, 2, 3)]


class Recorded:
    """An engine that notes what it was given, and moves nothing. Several may write one story."""

    def __init__(self, story: list[str] | None = None) -> None:
        self.exchanges: list[Exchange] = []
        self.story: list[str] = [] if story is None else story

    def open(self, device: int, meet: Meet) -> None:
        self.story.append("open")

    def begin(self, exchange: Exchange, sequence: int, meet: Meet) -> Enqueued:
        self.story.append("begin")
        self.exchanges.append(exchange)
        return Enqueued()

    def split(self, timeout_s: float) -> Recorded:
        return Recorded()

    def raise_failure(self) -> None:
        pass

    def release(self, reason: BaseException | None) -> None:
        pass


def never() -> HostTransport:
    raise AssertionError("nothing to meet for")


def begin(hosts: Hosts, rank: int, exchange: Exchange) -> tuple[list[Exchange], list[Exchange]]:
    inside, between = Recorded(), Recorded()
    HostsEngine(rank, hosts, inside, between).begin(exchange, 0, never)
    return inside.exchanges, between.exchanges


@pytest.mark.parametrize("places", PLACES)
def test_a_gathered_block_crosses_the_network_once_for_each_other_host(places: tuple[int, ...]) -> None:
    hosts, n = Hosts(places), len(places)
    sizes = [3 * rank % 5 + 1 for rank in range(n)]
    crossed = np.zeros((n, n), dtype=np.int64)
    for rank in range(n):
        block = torch.full((sizes[rank],), rank, dtype=torch.uint8)
        _, (between,) = begin(hosts, rank, plan_all_gather(rank, n, block, sizes, None))
        crossed[rank] = between.sent_bytes
    for rank in range(n):
        for host in set(places):
            expected = 0 if host == places[rank] else sizes[rank]
            assert crossed[rank, hosts.members(host)].sum() == expected


@pytest.mark.parametrize("places", PLACES)
def test_every_rank_gets_every_block_once(places: tuple[int, ...]) -> None:
    """Follows each part: what one side says to send the other says to receive, and at the end all is there."""
    hosts, n = Hosts(places), len(places)
    sizes = [3 * rank % 5 + 1 for rank in range(n)]
    parts = []
    for rank in range(n):
        block = torch.full((sizes[rank],), rank + 1, dtype=torch.uint8)
        out = torch.zeros(sum(sizes), dtype=torch.uint8)
        inside, between = begin(hosts, rank, plan_all_gather(rank, n, block, sizes, out))
        parts.append([*between, *inside])
    assert len({len(each) for rank, each in enumerate(parts) if places[rank] == places[0]}) == 1
    for number in range(max(len(each) for each in parts)):
        for a in range(n):
            for b in range(n):
                if number < len(parts[a]) and number < len(parts[b]):
                    source, target = parts[a][number], parts[b][number]
                    assert source.sent_bytes[b] == target.received_bytes[a]
                    if source.sent_bytes[b]:
                        target.incoming(a).copy_(source.outgoing(b))
    expected = torch.cat([torch.full((size,), rank + 1, dtype=torch.uint8) for rank, size in enumerate(sizes)])
    for each in parts:
        assert torch.equal(each[0].out, expected)


def test_an_all_to_all_is_divided_and_nothing_travels_twice() -> None:
    hosts, n = Hosts((0, 0, 1, 1)), 4
    for rank in range(n):
        rows = torch.arange(n * 2)
        whole = plan_all_to_all(rank, n, rows, [2] * n, [2] * n, None)
        (inside,), (between,) = begin(hosts, rank, replace(whole))
        assert (inside.sent_bytes + between.sent_bytes == whole.sent_bytes).all()
        assert (inside.received_bytes + between.received_bytes == whole.received_bytes).all()
        here = [peer for peer in range(n) if hosts.hosts[peer] == hosts.hosts[rank]]
        assert not between.sent_bytes[here].any()
        assert between.kept_bytes == 0


def test_blocks_of_which_sizes_are_compared_go_to_each_rank_by_itself() -> None:
    hosts = Hosts((0, 1, 1))
    exchange = plan_all_gather(0, 3, torch.zeros(4), None, None)
    exchange.checked = True
    _, (between,) = begin(hosts, 0, exchange)
    assert between.sent_bytes.tolist() == [0, 16, 16]


def test_both_engines_have_what_they_need_before_either_lets_a_stream_wait() -> None:
    story: list[str] = []
    engine = HostsEngine(0, Hosts((0, 0, 1)), Recorded(story), Recorded(story))
    engine.begin(plan_all_to_all(0, 3, torch.zeros(3), [1] * 3, [1] * 3, None), 0, never)
    assert story == ["open", "open", "begin", "begin"]
