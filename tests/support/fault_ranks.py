"""Starts training runs in trouble, each of three processes, and writes down how they end and what they leave behind.

python fault_ranks.py FOLDER TIMEOUT_S TROUBLE…    forks the ranks of many runs from one process that has imported
                                                  everything, several runs at once, over gloo
mpiexec -n 3 python fault_ranks.py mpi TIMEOUT_S TROUBLE      is one rank of one run; likewise torchrun
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every rank

from freescale.transport import Transport, connect

from fault_training import report
from rank_processes import free_port

WORLD_SIZE = 3
AT_ONCE = 4
LIMIT_S = 150.0  # of a run
ORPHANS_S = 30.0  # workers of a DataLoader look every five seconds whether their parent is there


@dataclass
class Run:
    """A run under way: its ranks, how they ended (-9: by that signal), and when."""

    folder: Path
    pids: list[int]
    begun: float = field(default_factory=time.monotonic)
    codes: dict[int, int] = field(default_factory=dict)
    ended: float = 0.0
    timed_out: bool = False

    def look(self) -> None:
        """Reap what has ended. A rank that is stopped for good is killed once the others are through."""
        for pid in set(self.pids) - set(self.codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
                self.ended = time.monotonic()
        left = set(self.pids) - set(self.codes)
        self.timed_out = self.timed_out or (bool(left) and time.monotonic() - self.begun > LIMIT_S)
        if left and (self.timed_out or all(_state(pid) == "T" for pid in left)):
            for pid in left:
                os.kill(pid, signal.SIGKILL)

    def orphans(self) -> list[str]:
        """Processes of the ranks' sessions that are still there."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                name, _, rest = stat.read_text().rpartition(")")
                if int(rest.split()[3]) in self.pids and rest.split()[0] != "Z":
                    found.append(name)
        return found

    def write(self, orphans: list[str]) -> None:
        """Leave the result in the folder, for the test."""
        own = re.compile(rf"(?<!\d)({'|'.join(map(str, self.pids))})(?!\d)")  # names tell whose memory it is
        shared = [path.name for path in Path("/dev/shm").glob("*") if own.search(path.name)]
        result = {
            "codes": [self.codes[pid] for pid in self.pids],
            "said": [(self.folder / f"{rank}.txt").read_text(errors="replace") for rank in range(WORLD_SIZE)],
            "seconds": self.ended - self.begun,
            "timed_out": self.timed_out,
            "orphans": orphans,
            "shared_memory": shared,
        }
        (self.folder / "result.json").write_text(json.dumps(result))


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def start(folder: Path, timeout_s: float, body: Callable[[Transport], None], world_size: int = WORLD_SIZE) -> Run:
    """Fork the ranks of a run. In the children, which call `body`, this ends with the process."""
    folder.mkdir(parents=True)
    port = free_port()
    pids = []
    for rank in range(world_size):
        if (pid := os.fork()) == 0:
            body(become_rank(rank, world_size, port, folder, timeout_s))
            sys.exit(0)
        pids.append(pid)
    return Run(folder, pids)


def become_rank(rank: int, world_size: int, port: int, folder: Path, timeout_s: float) -> Transport:
    """What a forked process does first: it is like a rank that torchrun has started, in a session of its own."""
    os.setsid()
    said = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    faulthandler.dump_traceback_later(LIMIT_S - 5)
    torch.distributed.init_process_group("gloo")
    return connect("process_group", timeout_s=timeout_s)


def run_all(folder: Path, timeout_s: float, troubles: list[str]) -> None:
    """Runs and their ends."""
    waiting, running, over = list(enumerate(troubles)), list[Run](), list[Run]()
    while waiting or running or over:
        while waiting and len(running) < AT_ONCE:
            number, trouble = waiting.pop(0)
            place = folder / str(number)
            running.append(start(place, timeout_s, partial(report, said=trouble, folder=place)))
        for run in list(running):
            run.look()
            if len(run.codes) == WORLD_SIZE:
                running.remove(run)
                over.append(run)
        for run in list(over):
            orphans = run.orphans()
            if not orphans or time.monotonic() - run.ended > ORPHANS_S:
                over.remove(run)
                run.write(orphans)
        time.sleep(0.05)


def main(where: str, timeout_s: str, *troubles: str) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs in the background ignore it
    if where not in ("mpi", "process_group"):
        gc.freeze()  # what is imported stays shared between the ranks, and is not looked at again by each
        run_all(Path(where), float(timeout_s), list(troubles))
        return
    if where == "process_group":
        torch.distributed.init_process_group("gloo")
    else:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()  # some ranks take seconds to start
    report(connect(where, timeout_s=float(timeout_s)), troubles[0], Path(tempfile.gettempdir()))


if __name__ == "__main__":
    main(*sys.argv[1:])
