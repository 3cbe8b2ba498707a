"""One rank of two over gloo that ends without a word, in the way that it is told."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.transport import Transport, connect
from freescale.transport.leaving import leave_last

_PATIENCE_S = 60.0  # for what surely comes, on any machine
_PID = Path(tempfile.gettempdir()) / "pid"  # the folder is the launch's own


def say_who_is_left() -> None:
    """Prints how many threads gloo has when the channels have been left."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(f"left: {sum('gloo' in name for name in names)} threads", flush=True)


def begin_what_is_never_done(transport: Transport, closes: bool) -> None:
    """Rank 0 ends in the middle of an exchange that rank 1 does not join; rank 1 ends when rank 0 is gone."""
    if transport.rank == 0:
        transport.all_gather(torch.arange(1000))
        if closes:
            transport.close()
        _PID.with_name("part").write_text(str(os.getpid()))
        _PID.with_name("part").replace(_PID)
        return
    deadline = time.monotonic() + _PATIENCE_S
    while not (_PID.exists() and not Path(f"/proc/{_PID.read_text()}").exists()):
        assert time.monotonic() < deadline, "rank 0 does not end"
        time.sleep(0.01)


def fork_one_that_ends() -> None:
    if (child := os.fork()) == 0:
        sys.exit(0)
    deadline = time.monotonic() + _PATIENCE_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            raise AssertionError("the child does not end")
        time.sleep(0.01)
    assert ended[1] == 0, f"the child ended with {ended[1]}"


def main(how: str) -> None:
    leave_last(say_who_is_left)
    dist.init_process_group("gloo")
    transport = connect("process_group", timeout_s=300)
    kept.append(transport)
    channel = transport.channel("another")
    assert len(channel.all_gather(torch.arange(4)).wait()) == 8
    dist.destroy_process_group()
    if how == "forks":
        fork_one_that_ends()
    elif how != "idle":
        begin_what_is_never_done(transport, closes=how == "closed")


kept: list[Transport] = []  # as the variables of a script are, until Python takes them away at its end

if __name__ == "__main__":
    main(sys.argv[1])
