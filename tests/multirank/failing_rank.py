"""One rank of three, of which rank 1 fails in the way that the test names, once the others are there to see it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from freescale.transport import Transport, TransportError, connect

_PATIENCE_S = 60.0  # for what surely comes, on any machine


def wait_until(comes: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not comes():
        assert time.monotonic() < deadline, f"waited {_PATIENCE_S} s until {what}"
        time.sleep(0.01)


def say_ready(rank: int) -> None:
    """The folder for temporary files is the launch's own."""
    (Path(tempfile.gettempdir()) / f"ready-{rank}").touch()


def are_ready(ranks: list[int]) -> bool:
    return all((Path(tempfile.gettempdir()) / f"ready-{rank}").exists() for rank in ranks)


def is_stopped(pid: int) -> bool:
    """All threads of a process are."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # a thread that ends
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def fail(how: str, transport: Transport) -> None:
    """What rank 1 does instead of the second exchange."""
    if how in ("raise", "raise before a channel"):
        raise ValueError("the loader broke")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stop inside":
        lane = transport.channel("trusting", check_sizes=False)
        wait_until(lambda: are_ready([0, 2]), "the others have the channel too")
        lane.all_gather(torch.zeros(1 << 20))
        time.sleep(0.5)  # gloo's thread then has sent the sizes, most likely, so that the others wait for the data
        os.kill(os.getpid(), signal.SIGSTOP)
    if how in ("stop unchecked", "kill unchecked"):
        lane = transport.channel("trusting", check_sizes=False)
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


def exchange_with_stopped(transport: Transport, pid: int) -> None:
    """Rank 1 has begun an exchange in which the others find it stopped: it receives nothing that they send.

    Over gloo it has not sent its data either, as it has not seen their sizes; over MPI they can take what is too large
    for a message out of its memory, but not give it theirs.
    """
    lane = transport.channel("trusting", check_sizes=False)
    say_ready(transport.rank)
    wait_until(lambda: is_stopped(pid), "rank 1 has stopped")
    lane.all_gather(torch.zeros(1 << 20)).wait()


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
    transport = connect(backend, timeout_s=float(timeout_s))
    if how == "stuck thread" and transport.rank != 1:
        transport.timeout_s = _PATIENCE_S  # how long rank 1 is kept goes by its own
    pids = transport.all_gather(torch.tensor([os.getpid()])).wait().tolist()
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
            try:
                transport.channel("incomplete")
            except TransportError as error:
                print(f"reported {type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}", flush=True)
                return
        elif how == "stop inside":
            exchange_with_stopped(transport, pids[1])
        elif how in ("stop unchecked", "kill unchecked"):
            lane = transport.channel("trusting", check_sizes=False)
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
