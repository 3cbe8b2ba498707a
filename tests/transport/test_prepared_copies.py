"""What a copy engine enqueues for splits that come again is worked out once, and is what it was the first time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from calls import calls_of
from noted_streams import NotedStreams

from freescale.transport.copy_engine import CopyEngine
from freescale.transport.cuda_streams import RECEIVE
from freescale.transport.exchange import Exchange, plan_all_to_all
from freescale.transport.layouts import Layouts
from freescale.transport.meetings import Meetings, book_bytes
from freescale.transport.segment import FOLDER, Segment
from freescale.transport.watch import Watch
from freescale.transport.windows import Windows

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")
SLOT_BYTES, DIRECT_FROM = 64, 200
OUTGOING, INCOMING = 1 << 50, 1 << 51  # no addresses of this process


class Rank:
    """Rank 0 of two of a copy engine; the other never comes."""

    def __init__(self, segment: Segment) -> None:
        self.streams, self.layouts = NotedStreams(), Layouts(0, 2)
        self.engine = CopyEngine(0, [0, 1], 600, "peer", 1 << 20, direct_from=DIRECT_FROM, patience_s=0.0)
        place = 0, [0, 1], self.streams, segment, segment.address
        self.engine._windows = Windows(*place, {1: OUTGOING}, {1: INCOMING}, SLOT_BYTES, 8, RECEIVE, 0)
        self.engine._meetings = Meetings(*place, segment.data_at, 0, 0.0)
        self.engine._device = 0

    def plan(self, sent: list[int], received: list[int]) -> Exchange:
        return plan_all_to_all(
            0, 2, torch.zeros(sum(sent), dtype=torch.uint8), sent, received, None, layouts=self.layouts
        )

    def enqueue(self, exchange: Exchange) -> list[tuple[object, ...]]:
        """What is copied: stream, bytes, and places within the tensors and within the slots."""
        self.streams.copies.clear()
        self.streams.streams.clear()
        self.engine._enqueue(exchange, "all_to_all #0")
        source, target = exchange.source.data_ptr(), exchange.target.data_ptr()
        copies: list[tuple[object, ...]] = []
        for stream, (into, out_of, size) in zip(self.streams.streams, self.streams.copies, strict=True):
            from_slot, to_slot = out_of >= INCOMING, OUTGOING <= into < INCOMING
            copies.append((stream, size, None if to_slot else into - target, None if from_slot else out_of - source))
        return copies


@pytest.fixture
def rank() -> Iterator[Rank]:
    segment = Segment.create(2, 0, book_bytes(2))
    yield Rank(segment)
    segment.unlink()


def test_splits_that_come_again_are_copied_as_before(rank: Rank) -> None:
    for sent, received in (([3, 100], [3, 70]), ([0, 5], [0, 64]), ([2, 0], [2, 0]), ([0, 300], [0, 4])):
        first, again, anew = rank.plan(sent, received), rank.plan(sent, received), rank.plan(sent, received)
        anew.layout = None
        copies = rank.enqueue(first)
        assert copies == rank.enqueue(again) == rank.enqueue(anew), (sent, received)
        own = [each for each in copies if None not in each]
        assert own == ([(RECEIVE, sent[0], 0, 0)] if sent[0] else [])
        if sent[1] < DIRECT_FROM:
            assert sum(int(str(each[1])) for each in copies if each[2] is None) == sent[1]
            assert sum(int(str(each[1])) for each in copies if each[3] is None) == received[1]
        else:
            assert not copies, "the other copies for both"
    assert len(rank.engine._prepared) == 4


def test_a_peer_that_disagrees_is_left_out_of_what_was_worked_out(rank: Rank) -> None:
    rank.enqueue(rank.plan([3, 100], [3, 70]))
    disagreeing = rank.plan([3, 100], [3, 70])
    disagreeing.skip(1)
    assert rank.enqueue(disagreeing) == [(RECEIVE, 3, 0, 0)]
    assert len(rank.enqueue(rank.plan([3, 100], [3, 70]))) == 5


def test_ever_new_splits_are_not_all_remembered(rank: Rank) -> None:
    for size in range(1, 50):
        rank.enqueue(rank.plan([0, size], [0, 1]))
    assert len(rank.engine._prepared) <= 8


def test_splits_that_come_again_take_fewer_calls(rank: Rank) -> None:
    counts: list[int] = []
    for _ in range(3):
        exchange = rank.plan([3, 30], [3, 30])
        counts.append(calls_of(partial(rank.engine._enqueue, exchange, "all_to_all #0")))
    assert counts[1] == counts[2] < counts[0]


def test_what_is_added_while_it_is_looked_at_is_looked_at_again() -> None:
    watch, looking, go_on = Watch(), threading.Event(), threading.Event()
    looks: list[bool] = []

    def look() -> bool:
        """Finds nothing, while something comes."""
        if not looks:
            looks.append(True)
            looking.set()
            go_on.wait(60)
        else:
            again.set()
        return False

    again = threading.Event()
    watch.add(look)
    assert looking.wait(60)
    watch.add(look)
    go_on.set()
    assert again.wait(60), "the second exchange would have no deadline"


def test_what_is_done_is_dropped_in_order_and_no_more_than_that(rank: Rank) -> None:
    engine, windows = rank.engine, rank.engine._windows
    assert windows is not None
    segment = windows.segment
    exchanges = [rank.plan([0, 5], [0, 5]), rank.plan([0, 300], [0, 300]), rank.plan([0, 5], [0, 5])]
    engine._under_way.extend(engine._enqueue(each, "all_to_all") for each in exchanges)
    under_way = list(engine._under_way)
    engine._drop_what_is_done(windows)
    assert list(engine._under_way) == under_way
    for flag in (segment.arrived(0, 1), segment.consumed(1, 0)):
        segment.write(flag, 1)
    engine._drop_what_is_done(windows)
    assert list(engine._under_way) == under_way[1:]
    for flag in (segment.arrived(0, 1), segment.consumed(1, 0)):
        segment.write(flag, 2)
    engine._drop_what_is_done(windows)
    assert list(engine._under_way) == under_way[1:], "the other has not copied yet"
    segment.write(segment.meeting(1, 1, 0), 1)
    engine._drop_what_is_done(windows)
    assert not engine._under_way
