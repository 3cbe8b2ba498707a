"""One rank of two, of which rank 1 is late or dies while streams wait for it; streams are threads.

As a script: `python engine_faults.py ENGINE late|killed|disagrees|unready` on the ranks it was started on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
from torch import Tensor

from freescale.transport import TransportError, connect
from freescale.transport.device_wire import DeviceWire, Engine
from freescale.transport.exchange import Exchange, plan_all_to_all
from freescale.transport.lane import HostTransport
from freescale.transport.staging import StagingEngine

from device_contract import threads_engine
from host_streams import HostStreams


def begin(engine: Engine, wire: DeviceWire, rank: int, rows: Tensor, splits: list[int]) -> Exchange:
    exchange = plan_all_to_all(rank, 2, rows, splits, splits, None)
    engine.begin(exchange, 7, wire._meet)
    assert exchange.join is not None
    return exchange


def exchange_what_is_not_ready_yet(engine: Engine, wire: DeviceWire, rank: int) -> None:
    """Rows are written by the stream, long after the call; whoever copies them must wait."""
    for step in range(4):
        rows = torch.full((2000,), -1)
        streams = streams_of(engine)
        written = threading.Event()

        def write(rows: Tensor = rows, written: threading.Event = written, step: int = step) -> None:
            if not written.is_set():
                time.sleep(0.4)
                rows.copy_(torch.arange(2000) + 10 * rank + step)
                written.set()

        if (rank + step) % 2 == 0:  # each rank is the first, and the second, to come
            streams.before_ready = write
        else:
            time.sleep(0.1)
            rows.copy_(torch.arange(2000) + 10 * rank + step)
        exchange = begin(engine, wire, rank, rows, [1000, 1000])
        assert exchange.join is not None
        exchange.join()
        expected = torch.cat([torch.arange(1000) + 1000 * rank + 10 * peer + step for peer in range(2)])
        expected[1000 * rank : 1000 * rank + 1000] = exchange.out[1000 * rank : 1000 * rank + 1000]  # this rank's own
        assert torch.equal(exchange.out, expected), step
    print("raised nothing after 0.0 s: all in order", flush=True)
    time.sleep(0.5)
    os._exit(0)


def streams_of(engine: Engine) -> HostStreams:
    holder = engine._mover.slots if isinstance(engine, StagingEngine) and engine._mover else engine._windows  # type: ignore[attr-defined]  # a CopyEngine
    assert isinstance(holder.streams, HostStreams)
    return holder.streams


def main(name: str, how: str) -> None:
    torch.distributed.init_process_group("gloo")
    transport = connect("process_group", timeout_s=3.0)
    assert isinstance(transport, HostTransport)
    rank, timeout_s = transport.rank, 2.0 if how == "late" else 30.0
    engine: Engine = threads_engine(name, rank, 2, timeout_s)
    wire = DeviceWire(transport._wire, engine, rank, 2, 3.0 if name == "staged" else timeout_s)
    first = begin(engine, wire, rank, torch.tensor([10 * rank, 10 * rank + 1]), [1, 1])
    assert first.join is not None
    first.join()
    assert first.out.tolist() == [rank, 10 + rank]
    engine.raise_failure()
    if how == "unready":
        exchange_what_is_not_ready_yet(engine, wire, rank)
    if rank == 1:
        if how == "killed":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(7)
            os._exit(0)
    sizes = [1000, 1000] if how != "disagrees" or rank == 0 else [2000, 2000]
    begun = time.monotonic()
    try:
        second = begin(engine, wire, rank, torch.zeros(sum(sizes)), sizes)
        assert second.join is not None
        second.join()  # ends, although nothing has arrived
        while time.monotonic() < begun + 8:
            engine.raise_failure()
            time.sleep(0.05)
    except TransportError as error:
        print(f"raised {type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}", flush=True)
    if how == "disagrees":
        time.sleep(1.5)  # so that the other hears of it from a process that lives
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
