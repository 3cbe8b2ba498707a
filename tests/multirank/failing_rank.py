"""One rank of three, of which rank 1 fails in the way that the test names, once the others are there to see it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from freescale.transport import Transport, TransportError, connect

from patience import PATIENCE_S, hurry_gloo, is_over_gloo, is_still, wait_until


def say(rank: int, what: str) -> None:
    """The folder for temporary files is the launch's own."""
    (Path(tempfile.gettempdir()) / f"{what}-{rank}").touch()


def wait_for(ranks: list[int], what: str) -> None:
    names = [f"{what}-{rank}" for rank in ranks]
    wait_until(lambda: all((Path(tempfile.gettempdir()) / name).exists() for name in names), f"ranks said {names}")


def fail(how: str, transport: Transport) -> None:
    """What rank 1 does instead of the second exchange."""
    if how in ("raise", "raise before a channel"):
        raise ValueError("the loader broke")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stop inside":
        lane = trusting_channel(transport, 4)
        wait_for([0, 2], "ready")
        lane.all_gather(torch.zeros(1 << 20))
        say(1, "begun")
        if lane.check_sizes:  # which gloo compares anyhow
            wait_for([0, 2], "at data")
        os.kill(os.getpid(), signal.SIGSTOP)
    if how in ("stop unchecked", "kill unchecked"):
        lane = trusting_channel(transport)
        lane.all_gather(torch.zeros(1)).wait()
        os.kill(os.getpid(), signal.SIGSTOP if how.startswith("stop") else signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    if how == "thread":
        thread = threading.Thread(target=lambda: transport.all_gather(torch.zeros(1), [9, 9, 9]).wait())
        thread.start()
        thread.join()
    if how == "mismatch":
        transport.all_gather(torch.zeros(1), [2, 1, 1]).wait()
    if how == "gone before a channel":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fork":
        for ending in (lambda: sys.exit(0), lambda: 1 / 0, lambda: transport.all_gather(torch.zeros(1))):
            if (child := os.fork()) == 0:
                ending()
            print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        transport.all_gather(torch.zeros(1)).wait()
    if how == "unchecked mismatch":
        transport.channel("trusting", check_sizes=False).all_gather(torch.zeros(712), [536, 712, 536]).wait()
    if how == "stuck thread":
        lane = transport.channel("never answered")
        threading.Thread(target=lambda: lane.all_gather(torch.zeros(1)).wait(), daemon=False).start()
        raise ValueError("the main thread broke")


def connect_without(dead: int, rank: int, timeout_s: float) -> None:
    """A rank dies before it connects, and the others catch the error."""
    print("begun", flush=True)
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        connect("mpi", timeout_s=timeout_s)
    except TransportError as error:
        print(f"reported {type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}", flush=True)


def make_channel_without(transport: Transport) -> None:
    """A rank is dead, and the others catch the error."""
    begun = time.monotonic()
    try:
        transport.channel("incomplete")
    except TransportError as error:
        print(f"reported {type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}", flush=True)


def trusting_channel(transport: Transport, later_s: float = 0) -> Transport:
    """It gives up when the transport would, or so much later; made with patience, but over MPI, which goes by that."""
    deadline_s, lane_s = transport.timeout_s, transport.timeout_s + later_s
    transport.timeout_s = max(lane_s, PATIENCE_S) if is_over_gloo(transport) else lane_s
    lane = transport.channel("trusting", check_sizes=False)
    transport.timeout_s, lane.timeout_s = deadline_s, lane_s
    hurry_gloo(lane, lane_s)
    return lane


def exchange_with_stopped(transport: Transport, pid: int) -> None:
    """Rank 1 has begun an exchange, and takes no part in moving its data.

    Over gloo it has given its sizes, and stops before it would look at those of the others. Over MPI it stops before
    the others begin: they can take out of its memory what is too large for a message, but not give it theirs.
    """
    lane = trusting_channel(transport, 4)  # gloo itself gives up long after the deadline
    say(transport.rank, "ready")
    wait_for([1], "begun")
    if lane.check_sizes:
        pending = lane.all_gather(torch.zeros(1 << 20))
        wait_until(lambda: pending.test() or pending._data is not None, "sizes are known")  # type: ignore[attr-defined]  # a HostPending
        say(transport.rank, "at data")
    else:
        wait_until(lambda: is_still(pid), "rank 1 has stopped")
        pending = lane.all_gather(torch.zeros(1 << 20))
    lane.timeout_s = transport.timeout_s
    pending.wait()


def main(backend: str, how: str, timeout_s: str) -> None:
    if backend == "process_group":
        import freescale.transport.process_group  # not while others wait

        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    else:
        from mpi4py import MPI

        import freescale.transport.mpi  # noqa: F401

        MPI.COMM_WORLD.Barrier()  # some ranks take seconds to start, more than the deadline
        if how == "gone before connecting":
            return connect_without(1, MPI.COMM_WORLD.Get_rank(), float(timeout_s))
    deadline_s = float(timeout_s)
    transport = connect(backend, timeout_s=deadline_s if backend == "mpi" else max(deadline_s, PATIENCE_S))
    pids = transport.all_gather(torch.tensor([os.getpid()])).wait().tolist()
    transport.timeout_s = deadline_s
    hurry_gloo(transport, deadline_s + 4)  # whose own deadline runs from the call, and not from the wait
    if how == "stuck thread" and transport.rank != 1:
        transport.timeout_s = PATIENCE_S  # how long rank 1 is kept goes by its own
    print("begun", flush=True)
    begun = time.monotonic()
    try:
        if transport.rank == 1:
            fail(how, transport)
        elif how == "stuck thread":
            transport.channel("never answered")
        elif how == "raise before a channel":
            transport.channel("incomplete")
        elif how == "gone before a channel":
            return make_channel_without(transport)
        elif how == "stop inside":
            exchange_with_stopped(transport, pids[1])
        elif how in ("stop unchecked", "kill unchecked"):
            lane = trusting_channel(transport)
            for _ in range(3):
                lane.all_gather(torch.zeros(1)).wait()
        elif how == "fork":
            transport.all_gather(torch.zeros(1)).wait()
        elif how == "unchecked mismatch":
            transport.channel("trusting", check_sizes=False).all_gather(torch.zeros(536)).wait()
        transport.all_gather(torch.zeros(1)).wait()
        transport.all_gather(torch.zeros(1)).wait()
    except TransportError as error:
        print(f"reported {type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}", flush=True)
        raise
    print("ended normally", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
