"""One rank of two, of which rank 1 is late or dies while streams wait for it; streams are threads.

As a script: `python engine_faults.py ENGINE late|killed|disagrees|unready` on the ranks it was started on.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from freescale.transport import TransportError, connect
from freescale.transport.device_wire import DeviceWire, Engine
from freescale.transport.exchange import Exchange, plan_all_to_all
from freescale.transport.lane import HostTransport
from freescale.transport.staging import StagingEngine

from device_contract import set_deadline, threads_engine
from host_streams import HostStreams

PATIENCE_S = 120.0  # for what comes, or is told, without any deadline
LATE_S = 2.0


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
    print("raised nothing: all in order", flush=True)
    leave(rank)


def leave(rank: int) -> NoReturn:
    """End once the other rank has come to its end too, which may still look at this process, or copy from it."""
    folder = Path(tempfile.gettempdir())  # of this launch
    (folder / f"ended-{rank}").touch()
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / f"ended-{1 - rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)


def streams_of(engine: Engine) -> HostStreams:
    holder = engine._mover.slots if isinstance(engine, StagingEngine) and engine._mover else engine._windows  # type: ignore[attr-defined]  # a CopyEngine
    assert isinstance(holder.streams, HostStreams)
    return holder.streams


def main(name: str, how: str) -> None:
    torch.distributed.init_process_group("gloo")
    transport = connect("process_group", timeout_s=PATIENCE_S)
    assert isinstance(transport, HostTransport)
    rank = transport.rank
    engine: Engine = threads_engine(name, rank, 2, PATIENCE_S)
    wire = DeviceWire(transport._wire, engine, rank, 2, PATIENCE_S)
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
            leave(rank)
    if how == "late":
        set_deadline(engine, LATE_S)
    sizes = [1000, 1000] if how != "disagrees" or rank == 0 else [2000, 2000]
    deadline = time.monotonic() + PATIENCE_S / 2
    try:
        second = begin(engine, wire, rank, torch.zeros(sum(sizes)), sizes)
        assert second.join is not None
        second.join()  # ends, although nothing has arrived
        while time.monotonic() < deadline:
            engine.raise_failure()
            time.sleep(0.05)
    except TransportError as error:
        print(f"raised {type(error).__name__}: {error}", flush=True)
    if how == "disagrees":
        time.sleep(1.5)  # so that the other, most likely, hears of it from a process that lives
    if how != "late":
        os._exit(0)
    leave(rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
