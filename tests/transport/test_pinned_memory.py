"""Pinned memory of channels: a closed one's serves the next, a failed one's is freed when nobody holds the channel."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from freescale.transport import Transport, TransportError, pinned_slots
from freescale.transport.staging import StagingEngine

from device_contract import use_threads
from host_streams import HostStreams
from rank_threads import run_in_threads

WINDOW_BYTES = 24 << 10  # no other test's, so that slots are not shared with it


class CountedStreams(HostStreams):
    """Streams whose pinned memory is counted for as long as it is there."""

    made: list[weakref.ref[Tensor]] = []  # noqa: RUF012 - of all of them

    def pinned(self, size: int) -> Tensor:
        """See `Streams.pinned`."""
        memory = super().pinned(size)
        self.made.append(weakref.ref(memory))
        return memory


def num_pinned() -> int:
    gc.collect()
    return sum(each() is not None for each in CountedStreams.made)


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    CountedStreams.made.clear()


def staged(transport: Transport, timeout_s: float) -> Transport:
    engine = StagingEngine(transport.rank, 2, timeout_s, WINDOW_BYTES, lambda device: CountedStreams())
    return use_threads(transport, engine)


def exchange(lane: Transport) -> None:
    rows = torch.arange(2000) + lane.rank
    out = lane.all_to_all(rows, [1000, 1000], [1000, 1000]).wait()
    assert out[0] == 1000 * lane.rank


def await_given_back() -> None:
    """Threads of closed channels give their memory back soon; both ranks are in this process."""
    deadline = time.monotonic() + 60
    while len(pinned_slots._idle.get((0, 2, WINDOW_BYTES, 1), [])) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)


def await_failure(lane: Transport) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lane.raise_if_failed()
        time.sleep(0.01)


def test_channels_one_after_the_other_share_pinned_memory() -> None:
    def run(transport: Transport) -> None:
        ours = staged(transport, 60)
        for number in range(6):
            lane = ours.channel(f"lane {number}")
            exchange(lane)
            lane.close()
            await_given_back()
            ours.all_gather(torch.zeros(1)).wait()

    run_in_threads(2, run)
    assert num_pinned() <= 2 * 2 * 3  # of both ranks: that of the first channel and that of the others


def test_pinned_memory_of_a_channel_that_failed_goes_with_it() -> None:
    def run(transport: Transport) -> None:
        ours = staged(transport, 60.0)
        lane = ours.channel("late")
        exchange(lane)
        if transport.rank == 0:
            engine = lane._wire._engine  # type: ignore[attr-defined]  # a ThreadsWire
            engine._mover._lane.timeout_s = 0.5
            lane.all_to_all(torch.zeros(2000), [1000, 1000], [1000, 1000]).wait()
            with pytest.raises(TransportError):  # the streams have been let go, and what arrived is worthless
                await_failure(lane)
            has_failed.set()
        else:
            assert has_failed.wait(60)
        lane.close()
        ours.close()

    has_failed = threading.Event()
    run_in_threads(2, run)
    deadline = time.monotonic() + 60
    while num_pinned() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert num_pinned() == 0


class NoMemory(HostStreams):
    """Streams of a rank that gets no pinned memory."""

    def pinned(self, size: int) -> Tensor:
        """See `Streams.pinned`."""
        raise RuntimeError(f"no {size} bytes")


def test_a_rank_without_pinned_memory_is_known_to_all_before_any_deadline() -> None:
    said: dict[int, str] = {}

    def run(transport: Transport) -> None:
        streams: type[HostStreams] = NoMemory if transport.rank == 1 else CountedStreams
        engine = StagingEngine(transport.rank, 2, 600, WINDOW_BYTES + 4096, lambda device: streams())
        lane = use_threads(transport, engine).channel("lane")
        with pytest.raises(TransportError) as caught:
            exchange(lane)
        said[transport.rank] = str(caught.value)
        with pytest.raises(TransportError, match="failed before"):
            exchange(lane)

    run_in_threads(2, run, timeout_s=100)  # of 600 s
    assert "rank 1: RuntimeError: no" in said[0]
    assert "RuntimeError: no" in said[1]
    assert len(pinned_slots._idle[0, 2, WINDOW_BYTES + 4096, 1]) == 1, "rank 0 kept what it had made"
