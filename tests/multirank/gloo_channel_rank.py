"""One rank of three over gloo: makes channels, or is gone in the middle of making one."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.transport import Transport, TransportError, connect
from freescale.transport.lane import HostTransport
from freescale.transport.process_group import GlooWire

from patience import PATIENCE_S, is_still, wait_until

_c10d: Any = dist
_PID = Path(tempfile.gettempdir()) / "pid"  # the folder is the launch's own


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
        wait_until(lambda: bool(store.check([key])), "the store has this address")
        _PID.with_name("part").write_text(str(os.getpid()))
        _PID.with_name("part").replace(_PID)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    threading.Thread(target=go, daemon=True).start()


def connect_when_rank_2_is_gone() -> None:
    make = _c10d.ProcessGroupGloo

    def wait_and_make(*arguments: object) -> object:
        wait_until(lambda: _PID.exists() and is_still(int(_PID.read_text()), "TZX"), "rank 2 is gone")
        return make(*arguments)

    _c10d.ProcessGroupGloo = wait_and_make


def main(how: str, timeout_s: float) -> None:
    dist.init_process_group("gloo")
    transport = connect("process_group", timeout_s=max(timeout_s, PATIENCE_S))
    transport.timeout_s = timeout_s
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
    reports = [_PID.with_name(f"reported-{rank}") for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in reports), "both have reported")  # who leaves is gone too
    os._exit(0)  # or else when gloo has given up


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
