"""Who copies for whom when two ranks meet: the later one for both, or each for itself when both are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from noted_streams import NotedStreams

from freescale.transport import SizeMismatch, TransportTimeout, meetings
from freescale.transport.cuda_streams import RECEIVE, SEND
from freescale.transport.exchange import Exchange, plan_all_to_all
from freescale.transport.meetings import RING, Meeting, Meetings, book_bytes
from freescale.transport.segment import FOLDER, Segment

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")


class Rank:
    def __init__(self, rank: int, segment: Segment, first: int, patience_s: float | None) -> None:
        self.rank, self.streams = rank, NotedStreams()
        self.meetings = Meetings(rank, [0, 1], self.streams, segment, 0, segment.data_at, first, patience_s)
        self.exchange = self.plan([1, 3] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [3, 1])

    def plan(self, sent: list[int], received: list[int]) -> Exchange:
        return plan_all_to_all(self.rank, 2, torch.zeros(sum(sent)), sent, received, None)

    def come(self, deadline_s: float = 60.0) -> Meeting:
        (meeting,) = self.meetings.enqueue(self.exchange, [1 - self.rank], time.monotonic() + deadline_s)
        return meeting


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(2, 0, book_bytes(2))
    yield made
    made.unlink()


def piece(sender: Rank, receiver: Rank) -> tuple[int, int, int]:
    """The copy that brings a piece from one tensor to the other."""
    source = sender.exchange.source.data_ptr() + int(sender.exchange.sent_at[receiver.rank])
    target = receiver.exchange.target.data_ptr() + int(receiver.exchange.received_at[sender.rank])
    return target, source, int(sender.exchange.sent_bytes[receiver.rank])


@pytest.mark.parametrize("earlier", [0, 1])
def test_the_later_rank_copies_both_pieces(segment: Segment, earlier: int) -> None:
    ranks = [Rank(rank, segment, 2**32 - 2, 0.0) for rank in range(2)]
    first, second = ranks[earlier], ranks[1 - earlier]
    for _ in range(5):
        assert first.come().is_first
        assert not second.come().is_first
        assert first.streams.copies == []
        assert second.streams.copies == [piece(second, first), piece(first, second)]
        second.streams.copies.clear()


def test_the_later_rank_copies_small_pieces_in_one_stream_and_large_ones_in_two(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Rank(rank, segment, 0, 0.0) for rank in range(2))
    both_pieces = 4 * (3 + 2)
    for most, used, flags in ((both_pieces, [SEND, SEND], 1), (both_pieces - 1, [SEND, RECEIVE], 2)):
        monkeypatch.setattr(meetings, "ONE_STREAM_BYTES", most)
        second.streams.streams.clear()
        first.streams.num_flags = second.streams.num_flags = 0
        met = first.come()
        second.come()
        assert second.streams.streams == used
        assert len(first.meetings.flags_to_wait_for([met])) == flags
        assert (first.streams.num_flags, second.streams.num_flags) == (1, 2 * flags), "each takes the host microseconds"


def test_ranks_that_come_together_copy_a_piece_each(segment: Segment) -> None:
    ranks = [Rank(rank, segment, 0, 60.0) for rank in range(2)]
    met: list[Meeting] = []
    waiting = threading.Thread(target=lambda: met.append(ranks[0].come()), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert ranks[1].come().both_here
    waiting.join(60)
    assert met[0].both_here
    assert ranks[0].streams.copies == [piece(ranks[0], ranks[1])]
    assert ranks[1].streams.copies == [piece(ranks[1], ranks[0])]


def test_who_waits_in_vain_again_and_again_waits_less_and_tries_again_later(segment: Segment) -> None:
    rank, other = (Rank(rank, segment, 0, None) for rank in range(2))
    for each in (rank, other):
        each.exchange.sent_bytes[1 - each.rank] = each.exchange.received_bytes[1 - each.rank] = 1 << 30
    patience = []
    for _ in range(40):
        patience.append(rank.meetings._patience(rank.exchange, [1]))
        assert rank.come().is_first
    assert patience == [400e-6] * 8 + [pytest.approx(40e-6)] * 24 + [400e-6] * 8
    for _ in range(40):
        other.come()
    rank.meetings._patience_s = other.meetings._patience_s = 60.0  # whoever comes first
    waiting = threading.Thread(target=rank.come, daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert other.come().both_here
    waiting.join(60)
    assert rank.meetings._num_missed == 0, "they met"


def test_sizes_that_differ_are_an_error_and_nothing_is_copied(segment: Segment) -> None:
    ranks = [Rank(rank, segment, 0, 0.0) for rank in range(2)]
    ranks[0].come()
    ranks[1].exchange = ranks[1].plan([2, 1], [4, 1])
    text = "rank 1 sends 8 bytes to rank 0 and expects 16, which sends 12 and expects 8"
    with pytest.raises(SizeMismatch, match=text):
        ranks[1].come()
    assert ranks[1].streams.copies == []


def test_a_rank_far_ahead_waits_for_the_other_until_the_deadline(segment: Segment) -> None:
    ranks = [Rank(rank, segment, 7, 0.0) for rank in range(2)]
    for _ in range(RING):
        ranks[0].come()
    with pytest.raises(TransportTimeout, match=f"rank 1 is {RING} exchanges behind rank 0"):
        ranks[0].come(deadline_s=0.05)


def test_a_record_is_not_written_over_before_the_other_has_made_up_its_mind(segment: Segment) -> None:
    """It was: a rank held up between its two looks took the other for absent, which counted on it, and both waited."""
    slow, fast = (Rank(rank, segment, 7, 0.0) for rank in range(2))
    source, target = slow.meetings._export(slow.exchange.source), slow.meetings._export(slow.exchange.target)
    came = slow.meetings._come(slow.exchange, 1, source, target, time.monotonic() + 60)
    assert fast.come().both_here
    for _ in range(RING - 1):
        fast.come()
    with pytest.raises(TransportTimeout, match=f"rank 0 is {RING} exchanges behind rank 1"):
        fast.come(deadline_s=0.05)
    assert slow.meetings._settle(slow.exchange, came).both_here
