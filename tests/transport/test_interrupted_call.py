"""A call that an exception interrupts keeps its place among the calls: later ones meet the right calls of peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freescale.transport import Transport
from freescale.transport.staging import StagingEngine

from device_contract import use_threads
from host_streams import HostStreams
from rank_threads import run_in_threads

WINDOW_BYTES = 29 << 10  # no other test's, so that slots are not shared with it


class Interrupted(BaseException):
    """As Control-C, but no other thread's."""


def test_a_call_that_is_interrupted_keeps_its_place() -> None:
    run_in_threads(2, interrupt_rank_0)


def interrupt_rank_0(transport: Transport) -> None:
    engine = StagingEngine(transport.rank, 2, 60, WINDOW_BYTES, lambda _: HostStreams())
    ours = use_threads(transport, engine)
    rows, splits = torch.arange(4) + 100 * ours.rank, [2, 2]
    ours.all_to_all(rows, splits, splits).wait()
    if ours.rank == 0:
        wire: Any = ours._wire
        begin = wire.begin

        def interrupted(*arguments: Any) -> Any:
            wire.begin = begin
            raise Interrupted

        wire.begin = interrupted
        with pytest.raises(Interrupted):
            ours.all_to_all(rows, splits, splits)
    else:
        ours.all_to_all(rows, splits, splits)
    found = ours.all_to_all(-rows, splits, splits).wait().tolist()
    assert found == ([0, -1, -100, -101], [-2, -3, -102, -103])[ours.rank]
