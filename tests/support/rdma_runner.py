"""Runs checks on one of two machines: imports torch once, then forks the ranks of each check (see rdma_checks.py).

As a script: `python rdma_runner.py CHECK,CHECK…`, at the same time on both machines. Leaves in /out what each rank of
each check said, and in /out/results how it ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from freescale.transport import connect

import rdma_checks

OUT = Path("/out")
MACHINE = int(os.environ.get("MACHINE", "0"))
HANDOVER = "/tmp/handover"
_FIRST_PORT = 29600


def main(names: list[str]) -> None:
    """Run the checks that are named, in order."""
    gc.freeze()  # or else every child would copy all pages as soon as it collects garbage
    print(f"ready after {Path('/proc/uptime').read_text().split()[0]} s", flush=True)
    for number, name in enumerate(names):
        check = rdma_checks.CHECKS[name]
        meet(_FIRST_PORT + number)
        begun = time.monotonic()
        run = run_under_mpi if check.launcher == "mpi" else run_ranks
        statuses = run(name, check, _FIRST_PORT + 50 + number)
        seconds = round(time.monotonic() - begun, 1)
        with (OUT / "results").open("a") as results:
            results.write(json.dumps({"check": name, "statuses": statuses, "seconds": seconds}) + "\n")
        print(f"{name}: {statuses} after {seconds} s", flush=True)


def meet(port: int) -> None:
    """Wait until the other machine has come as far, so that no check begins while it still ends another."""
    deadline = time.monotonic() + 200
    if MACHINE == 0:
        with socket.create_server(("", port)) as door:
            door.settimeout(200)
            door.accept()[0].close()
        return
    while True:
        try:
            socket.create_connection(("10.77.0.1", port), timeout=200).close()
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def ranks_here(check: rdma_checks.Check) -> range:
    """Rank 0 is on machine 0; where they are more than two, machine 0 has the first half."""
    first = (check.world_size + 1) // 2
    return range(first) if MACHINE == 0 else range(first, check.world_size)


def run_ranks(name: str, check: rdma_checks.Check, port: int) -> dict[int, int | None]:
    """Fork the ranks of this machine; they find each other over gloo. Returns exit statuses, None at the deadline."""
    method = f"tcp://10.77.0.1:{port}"

    def connected(rank: int) -> None:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=check.world_size)
        through = connect("process_group", timeout_s=100)
        say("begun")
        check.body(through)
        say("done")
        through.close()
        dist.destroy_process_group()

    children = {rank: fork(f"{name}.{rank}", partial(connected, rank), check.timeout_s) for rank in ranks_here(check)}
    return wait_for(children, check.timeout_s)


def fork(name: str, body: Callable[[], None], timeout_s: float) -> int:
    """Run a function in a child whose output goes to a file of that name."""
    if pid := os.fork():
        return pid
    output = os.open(OUT / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    say("forked")
    faulthandler.dump_traceback_later(timeout_s - 1)
    failure: BaseException | None = None
    try:
        body()
        say("ended normally")
    except BaseException as error:
        traceback.print_exc()
        failure = error  # with all that its frames refer to, as in a program that ends by it
    # As a program ends, but for the interpreter's own objects, which take 7 s to tear down here.
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    sys.stdout.flush()
    os._exit(0 if failure is None else 1)


def say(what: str) -> None:
    """Print it with the seconds since power-on."""
    print(f"{Path('/proc/uptime').read_text().split()[0]} s: {what}", flush=True)


def wait_for(children: dict[int, int], timeout_s: float) -> dict[int, int | None]:
    """Wait for children; at the deadline they are killed. Returns exit statuses, None for those."""
    deadline = time.monotonic() + timeout_s
    statuses: dict[int, int | None] = {}
    left = dict(children)
    while left:
        late = time.monotonic() > deadline
        for rank, pid in list(left.items()):
            if late:
                note_where(pid)
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                statuses[rank] = None if late else os.waitstatus_to_exitcode(status)
                del left[rank]
        time.sleep(0.02)
    return statuses


def note_where(pid: int) -> None:
    """Say where in the kernel a process stands that does not end."""
    with suppress(OSError):  # it ends just now
        for task in Path(f"/proc/{pid}/task").iterdir():
            print(
                "stands in", *((task / name).read_text().strip() for name in ("comm", "wchan", "syscall")), flush=True
            )


def run_under_mpi(name: str, check: rdma_checks.Check, port: int) -> dict[int, int | None]:
    """Let mpirun on machine 0 start `hand_over` on both; each hands its environment to a fork of this process.

    So MPI's ranks are started by MPI, and need not import torch once more.
    """
    with suppress(FileNotFoundError):
        os.unlink(HANDOVER)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(HANDOVER)
        door.listen()
        door.settimeout(check.timeout_s)
        here = Path(__file__).with_name("rdma_launch.py")
        command = [sys.executable, "-S", "-E", str(here)]
        with (OUT / f"{name}.launcher").open("w") as said:
            if MACHINE == 1:
                launcher = subprocess.Popen([*command, "serve", str(port)], stdout=said, stderr=said)
            else:
                mpirun = [*mpirun_command(command, port), *command, "hand over", HANDOVER]
                launcher = subprocess.Popen(mpirun, stdout=said, stderr=said)
        try:
            inside, _ = door.accept()
            with inside:
                variables = json.loads(inside.makefile().readline())

                def as_rank() -> None:
                    os.environ.update(variables)
                    through = connect("mpi", timeout_s=100)
                    check.body(through)
                    through.close()

                statuses = wait_for({MACHINE: fork(f"{name}.{MACHINE}", as_rank, check.timeout_s)}, check.timeout_s)
                inside.sendall(f"{statuses[MACHINE]}\n".encode())
            if MACHINE == 0:
                launcher.wait(20)
        except (TimeoutError, subprocess.TimeoutExpired):
            statuses = {MACHINE: None}
        finally:
            launcher.kill()
            launcher.wait()
    return statuses


def mpirun_command(launch: list[str], port: int) -> list[str]:
    """Open MPI over UCX over verbs, and nothing else, on both machines."""
    variables = {
        "UCX_TLS": "rc_verbs,ud_verbs,self",
        "UCX_NET_DEVICES": "rxe0:1",
        "UCX_IB_GID_INDEX": str(rdma_checks.find_gid_index()),
        "OMP_NUM_THREADS": "1",
    }
    os.environ.update(variables, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    agent = " ".join([*launch, "agent", str(port)])
    options = ["-np", "2", "--host", "machine0:1,machine1:1", "--map-by", "node", "--bind-to", "none"]
    options += ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_keep_fqdn_hostnames", "1"]
    options += ["--mca", "pml", "ucx", *(part for name in variables for part in ("-x", name))]
    return [str(Path(sys.executable).with_name("mpirun")), *options]


if __name__ == "__main__":
    main(sys.argv[1].split(","))
