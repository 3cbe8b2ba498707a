"""One rank of three over gloo: makes channels, or is gone in the middle of making one."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.transport import Transport, TransportError, connect
from freescale.transport.lane import HostTransport
from freescale.transport.process_group import GlooWire

_PATIENCE_S = 60.0  # for what surely comes, on any machine
_c10d: Any = dist
_PID = Path(tempfile.gettempdir()) / "pid"  # the folder is the launch's own


def wait_until(comes: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not comes():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def count_keys(transport: Transport) -> None:
    """How many keys the store has, before and after channels were made."""
    store = _c10d.distributed_c10d._get_default_store()
    counts = []
    for number in range(4):
        transport.channel(f"lane {number}").all_gather(torch.zeros(1)).wait()
        transport.all_gather(torch.zeros(1)).wait()
        counts.append(store.num_keys())
        transport.all_gather(torch.zeros(1)).wait()
    print(f"keys {counts}", flush=True)


def key_of_next_channel(transport: Transport) -> str:
    assert isinstance(transport, HostTransport)
    wire = transport._wire
    assert isinstance(wire, GlooWire)
    assert wire._place is not None
    return f"{wire._place.prefix}/{wire._num_channels + 1}/data/0/{transport.rank}"


def go_when_others_could_connect(how: str, transport: Transport) -> None:
    """Has told its address, and waits for those of the others."""
    store = _c10d.distributed_c10d._get_default_store().clone()
    key = key_of_next_channel(transport)

    def go() -> None:
        wait_until(lambda: bool(store.check([key])))
        _PID.with_name("part").write_text(str(os.getpid()))
        _PID.with_name("part").replace(_PID)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    threading.Thread(target=go, daemon=True).start()


def connect_when_rank_2_is_gone() -> None:
    make = _c10d.ProcessGroupGloo

    def wait_and_make(*arguments: object) -> object:
        wait_until(lambda: _PID.exists() and is_gone(int(_PID.read_text())))
        return make(*arguments)

    _c10d.ProcessGroupGloo = wait_and_make


def is_gone(pid: int) -> bool:
    """It has ended, or all of its threads are stopped."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)


def main(how: str, timeout_s: float) -> None:
    dist.init_process_group("gloo")
    transport = connect("process_group", timeout_s=timeout_s)
    if how == "keys":
        count_keys(transport)
        return
    if transport.rank == 2:
        go_when_others_could_connect(how, transport)
    else:
        connect_when_rank_2_is_gone()
    try:
        transport.channel("never made")
    except TransportError as error:
        print(f"reported {type(error).__name__}: {error}", flush=True)
    _PID.with_name(f"reported-{transport.rank}").touch()
    wait_until(lambda: all(_PID.with_name(f"reported-{rank}").exists() for rank in (0, 1)))  # who leaves is gone too
    os._exit(0)  # or else when gloo has given up


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
