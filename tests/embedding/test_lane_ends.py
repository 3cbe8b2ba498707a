"""A lane on a GPU gives back its channel whatever becomes of its stream, and waits for it no longer than it has to."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from freescale.embedding import lanes
from freescale.embedding.lanes import StreamLane


class ModelStream:
    """A stream that is through after so many questions; with None it has failed, as the device has."""

    def __init__(self, questions: int | None) -> None:
        self.questions, self.asked = questions, 0

    def query(self) -> bool:
        self.asked += 1
        if self.questions is None:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.asked > self.questions


class Channel:
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def lane_on(stream: ModelStream, monkeypatch: pytest.MonkeyPatch) -> tuple[StreamLane, Channel]:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "Event", object)
    channel: Any = Channel()
    return StreamLane(channel, torch.device("cuda", 0), urgent=True), channel


def test_what_is_under_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ModelStream(20)
    lane, channel = lane_on(stream, monkeypatch)
    lane.finish(time.monotonic() + 60)
    assert (stream.asked, channel.num_closed) == (21, 1)
    lane.close()
    assert (stream.asked, channel.num_closed) == (21, 1), "it was closed before"


def test_a_stream_that_waits_for_a_peer_that_is_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_PATIENCE_S", 0.05)
    stream = ModelStream(10**9)
    lane, channel = lane_on(stream, monkeypatch)
    lane.close()
    assert stream.asked
    assert channel.num_closed == 1


def test_a_device_that_has_failed_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ModelStream(None)
    lane, channel = lane_on(stream, monkeypatch)
    lane.close()
    assert (stream.asked, channel.num_closed) == (1, 1)
