"""Communicators end side by side, and whoever closes one, or ends its process, does not wait for ever."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
from nccl_model import begin, make_engine, model_of_nccl

from freescale.transport import TransportClosed, TransportTimeout
from freescale.transport import nccl as nccl_engine

from patience import wait_until
from rank_processes import support_path


def num_threads() -> int:
    return sum(thread.name == "freescale end of NCCL" for thread in threading.enumerate())


def test_communicators_whose_peer_is_gone_are_aborted_side_by_side_at_their_deadlines() -> None:
    with model_of_nccl() as device:
        device.answers = False
        engines = [make_engine(0.3) for _ in range(3)]
        exchanges = [begin(engine) for engine in engines]
        wait_until(lambda: device.done.count("aborted") == 3, "all were aborted")
        assert "hung" not in device.done
        for engine, exchange in zip(engines, exchanges, strict=True):
            with pytest.raises(TransportTimeout, match=r"all_to_all #7: rank 0 of 1: NCCL has not moved"):
                engine.raise_failure()
            assert exchange.join is not None
            with pytest.raises(TransportTimeout):
                exchange.join()
            with pytest.raises(TransportTimeout):
                begin(engine)
        wait_until(lambda: num_threads() == 0, "their threads ended")


def test_an_idle_communicator_is_gone_when_its_channel_is_closed() -> None:
    with model_of_nccl() as device:
        engine = make_engine(60)
        begin(engine)
        assert num_threads() == 1
        engine.release(None)
        assert device.done[-1] == "aborted"
        wait_until(lambda: num_threads() == 0, "its thread ended")
        with pytest.raises(TransportClosed):
            begin(engine)


def test_what_an_exchange_brought_is_kept_no_longer_than_until_the_next_one() -> None:
    with model_of_nccl() as device:
        device.answers = False
        engine = make_engine(60)
        begin(engine)
        device.end()
        works = [weakref.ref(device.launched[-1])]
        device.launched.clear()
        begin(engine)
        assert works[0]() is None
        device.end()
        engine.release(None)


def test_what_is_under_way_when_a_channel_is_closed_comes_to_its_end_first() -> None:
    with model_of_nccl() as device:
        device.answers = False
        engine = make_engine(60)
        begin(engine)
        begun = time.monotonic()
        engine.release(None)
        time.sleep(5 * nccl_engine._NAP_S)
        assert "aborted" not in device.done, "a peer may need it"
        device.end()
        wait_until(lambda: "aborted" in device.done, "it was aborted")
        assert time.monotonic() - begun < 60, "not by its deadline"


def test_who_closes_an_idle_channel_waits_seconds_at_most_for_another_ones_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_engine, "_PATIENCE_S", 0.2)
    with model_of_nccl() as device:
        idle, busy = make_engine(60), make_engine(60)
        begin(idle)
        device.answers = False
        begin(busy)
        idle.release(None)
        assert "aborted" not in device.done
        assert device.is_running()
        device.end()
        wait_until(lambda: "aborted" in device.done, "it was aborted")
        busy.release(None)


def test_a_communicator_that_nobody_closes_goes_with_its_engine() -> None:
    with model_of_nccl() as device:
        engine = make_engine(60)
        begin(engine)
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        wait_until(lambda: gone() is None, "the watch had looked")
        wait_until(lambda: "aborted" in device.done, "it was aborted")


def test_torch_makes_its_streams_before_a_kernel_waits_for_a_peer() -> None:
    with model_of_nccl() as device:
        engines = [make_engine(60) for _ in range(2)]
        for engine in engines:
            begin(engine)
        made = [each for each in device.done if each == "communicator" or each.startswith("stream")]
        assert made[:3] == ["stream 0", "stream -1", "communicator"]
        assert made.count("communicator") == 2
        for engine in engines:
            engine.release(None)


ENDS = """
import sys
import time
import torch
from nccl_model import begin, make_engine, model_of_nccl
from freescale.embedding.departure import leave_at_exit
from freescale.embedding import lanes as kinds

class Channel:
    def __init__(self, engine):
        self.engine = engine

    def close(self):
        self.engine.release(None)

class Tables:
    def finish(self):
        deadline = time.monotonic() + kinds.LAST_PATIENCE_S
        for lane in lanes:
            lane.finish(deadline)

    def leave(self):
        for lane in lanes:
            lane.transport.close()
        for lane in lanes:
            lane.close()

kinds._PATIENCE_S, kinds.LAST_PATIENCE_S = 0.2, 0.5
model = model_of_nccl()
device = model.__enter__()
device.answers = False
engines = [make_engine(1000) for _ in range(2)]
lanes = [kinds.StreamLane(Channel(engine), torch.device("cuda", 0), urgent=True) for engine in engines]
for engine in engines:
    begin(engine)
tables = Tables()
leave_at_exit(tables)
print("under way", flush=True)
if "raise" in sys.argv:
    raise RuntimeError("on fire")
"""


@pytest.mark.parametrize("how", ["raise", "return"])
def test_a_process_whose_kernels_wait_for_a_peer_that_is_gone_ends_long_before_their_deadline(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, how],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": support_path()},
    )
    assert done.stdout == "under way\n", done.stderr
    assert ("RuntimeError: on fire" in done.stderr) == (how == "raise"), done.stderr
    assert "without waiting longer" not in done.stderr
    assert done.returncode == (how == "raise"), done.stderr
