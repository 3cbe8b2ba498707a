"""Channels get a place as soon as closed ones have given theirs back; torch's streams are made before others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freescale.transport import Transport, Unavailable, connect, pinned_slots, places, windows_opening
from freescale.transport.copy_engine import CopyEngine
from freescale.transport.device_wire import Engine
from freescale.transport.places import take_place
from freescale.transport.staging import StagingEngine

from device_contract import use_threads
from host_streams import HostStreams
from patience import PATIENCE_S
from rank_threads import run_in_threads

WINDOW_BYTES = 28 << 10  # no other test's, so that slots are not shared with it


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStreams, "most", 2)
    monkeypatch.setattr(HostStreams, "in_use", set())


def test_a_place_that_is_given_back_late_is_waited_for(two_places: None) -> None:
    first, second, third = (HostStreams() for _ in range(3))
    take_place(first)
    take_place(second)
    timer = threading.Timer(0.2, first.rest)
    timer.start()
    take_place(third)
    timer.join()
    assert HostStreams.in_use == {second, third}


def test_a_channel_too_many_is_refused_within_seconds(two_places: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_PATIENCE_S", 0.1)
    for _ in range(2):
        take_place(HostStreams())
    with pytest.raises(Unavailable, match="2 channels of this process move tensors already"):
        take_place(HostStreams())


def test_peers_are_told_within_their_deadline_that_there_is_no_place(
    two_places: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_PATIENCE_S", PATIENCE_S)
    for _ in range(2):
        take_place(HostStreams())
    begun = time.monotonic()
    with pytest.raises(Unavailable):
        take_place(HostStreams(), timeout_s=0.2)
    assert time.monotonic() - begun < PATIENCE_S


MADE: list[str] = []


class NotedStreams(HostStreams):
    """Streams that say when they register or pin memory, which may wait for all streams."""

    def register(self, address: int, size: int) -> int:
        """See `Streams.register`."""
        MADE.append("memory")
        return super().register(address, size)

    def pinned(self, size: int) -> Tensor:
        """See `Streams.pinned`."""
        MADE.append("memory")
        return super().pinned(size)


def make(device: int) -> HostStreams:
    return NotedStreams()


ENGINES: dict[str, Callable[[], Engine]] = {
    "segment": lambda: CopyEngine(0, [0], 60, "segment", WINDOW_BYTES, make),
    "staged": lambda: StagingEngine(0, 1, 60, WINDOW_BYTES, make),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_streams_of_torch_are_made_before_those_that_wait(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    for module in (windows_opening, pinned_slots):
        monkeypatch.setattr(module, "fill_pool", lambda device: MADE.append(f"torch's for {device}"))
    lane = use_threads(connect("local", timeout_s=60), ENGINES[engine]()).channel("lane")
    assert lane.all_to_all(torch.arange(9), [9], [9]).wait().tolist() == list(range(9))
    assert MADE[0] == "torch's for 0"
    assert "memory" in MADE
    lane.close()


def test_whoever_opens_and_closes_channels_does_not_run_out_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place of each rank is the first channel's; what is closed is given back some time later."""
    monkeypatch.setattr(HostStreams, "most", 4)
    monkeypatch.setattr(HostStreams, "in_use", set())
    run_in_threads(2, open_and_close)


def open_and_close(transport: Transport) -> None:
    ours = use_threads(transport, StagingEngine(transport.rank, 2, 60, WINDOW_BYTES + 4096, lambda _: HostStreams()))
    ours.all_gather(torch.zeros(1)).wait()
    for number in range(12):
        lane = ours.channel(f"lane {number}")
        rows = torch.arange(2000) + lane.rank
        lane.all_to_all(rows, [1000, 1000], [1000, 1000]).wait()
        lane.close()
    ours.all_gather(torch.zeros(1)).wait()
