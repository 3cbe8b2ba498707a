"""Starts a script as several ranks, by mpiexec, torchrun or as forks, and brings back what each of them said."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from rank_forks import ForkedRank, RankForks

_MARK = "FREESCALE_TEST_LAUNCH"
_STACKS_S = 10.0  # for writing its stacks, before a process is killed
_TOGETHER_S = 2.0  # for the others to say what they saw when one has failed
# Redirects a rank's output to files named after it, then becomes the script, so that signals reach the script itself.
_REDIRECT = 'r=${OMPI_COMM_WORLD_RANK:-$RANK}; d=$1; shift; echo $$ >"$d/$r.pid"; exec "$@" >"$d/$r.out" 2>"$d/$r.err"'


@dataclass(frozen=True)
class Launched:
    """What became of a launch.

    Attributes:
        returncode: Exit status of the launcher; of the first rank that failed for "plain".
        seconds: How long it took.
        outputs: Standard output of each rank.
        errors: Standard error of each rank.
        launcher: What mpiexec or torchrun itself said.
        timed_out: The deadline passed and everything was killed.
        orphans: Processes that were still there some seconds after the launcher had ended.
        shared_memory: What Open MPI has left in /dev/shm by then.
    """

    returncode: int
    seconds: float
    outputs: list[str]
    errors: list[str]
    launcher: str
    timed_out: bool
    orphans: list[str]
    shared_memory: list[str]

    def explain(self) -> str:
        """All of it, for an assertion's message."""
        parts = [
            f"exit status {self.returncode} after {self.seconds:.1f} s, timed out: {self.timed_out}, "
            f"left: {self.orphans} {self.shared_memory}"
        ]
        for rank, (output, error) in enumerate(zip(self.outputs, self.errors, strict=True)):
            parts.append(f"--- rank {rank}\n{output[-3000:]}{error[-8000:]}")
        return "\n".join([*parts, f"--- launcher\n{self.launcher[-3000:]}"])


def launch(
    backend: str,
    world_size: int,
    script: Path | str,
    args: Sequence[str] = (),
    *,
    timeout_s: float = 400.0,
    recovery: bool = False,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Launched:
    """Run `python script *args` as `world_size` ranks on this machine and wait for them.

    Ranks may share cores: OMP_NUM_THREADS is 1, and mpiexec may oversubscribe and run as root. Everything the ranks
    leave in /dev/shm and the temporary folder goes to folders of this launch, which are removed. At the deadline all
    processes of this launch, and no others, write the stacks of their threads and are killed, stopped ones too; they
    are known by a variable in their environment.

    Args:
        backend: "mpi" (mpiexec), "torchrun", "process_group" (as torchrun sets things up, and all ranks are ended when
            one fails), or "plain" (the same, but nobody watches: the other ranks go on when one fails).
        world_size: Number of ranks.
        script: Path of a Python file; for a module of the package give "-m" and the module's name in `args`.
        args: Its arguments.
        timeout_s: Deadline of the whole launch, in seconds.
        recovery: mpiexec leaves the other ranks alone when one dies.
        environment: Variables to add.
        fresh: Ranks are new processes; otherwise those of "process_group" and "plain" are forks (`rank_forks.py`),
            unless there are GPUs.

    Example:
        done = launch("mpi", 4, __file__, ["--steps", "3"], timeout_s=30)
        assert done.returncode == 0, done.explain()
    """
    mark = uuid.uuid4().hex
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    logs = Path(tempfile.mkdtemp(prefix="freescale-test-"))
    segments = Path(tempfile.mkdtemp(prefix="freescale-test-", dir=shared))
    variables = {**os.environ, **_variables(logs, segments), **(environment or {}), _MARK: mark}
    command = [str(script), *args]
    forks = not fresh and backend in ("process_group", "plain") and not torch.cuda.is_available()
    sessions = set[int]()
    try:
        with (logs / "launcher").open("wb") as said:
            processes: list[subprocess.Popen[bytes] | ForkedRank] = []
            for start, more in _start_commands(backend, world_size, command, logs, recovery, forks):
                process = (
                    _forks.start(start, variables | more, logs / more["RANK"])
                    if forks
                    else subprocess.Popen(start, stdout=said, stderr=said, env=variables | more, start_new_session=True)
                )
                sessions.add(process.pid)
                processes.append(process)
            begun = time.monotonic()  # what forks are forks of has started by now
            launch = _Launch(mark, sessions)
            timed_out = _wait(processes, begun + timeout_s, launch, ends_together=backend == "process_group")
        seconds = time.monotonic() - begun
        returncode = next((p.returncode for p in processes if p.returncode), 0)
        return Launched(
            returncode=returncode,
            seconds=seconds,
            outputs=[_read(logs / f"{rank}.out") for rank in range(world_size)],
            errors=[_read(logs / f"{rank}.err") for rank in range(world_size)],
            launcher=_read(logs / "launcher"),
            timed_out=timed_out,
            orphans=_orphans(launch),
            shared_memory=sorted(path.name for path in segments.rglob("*")),
        )
    finally:
        _kill(_Launch(mark, sessions))
        shutil.rmtree(segments, ignore_errors=True)
        shutil.rmtree(logs, ignore_errors=True)


def support_path() -> str:
    """PYTHONPATH for scripts that import others from here; the package is still found where it is not installed."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def _variables(logs: Path, segments: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl_sm_backing_directory": str(segments),
        # One host: Open MPI need not look for networks, which takes it a second.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "TMPDIR": str(logs),
    }


def _start_commands(
    backend: str, world_size: int, script: list[str], logs: Path, recovery: bool, forks: bool
) -> list[tuple[list[str], dict[str, str]]]:
    """What to start, with the variables of each."""
    folder = Path(sys.executable).parent
    command = script if forks else ["sh", "-c", _REDIRECT, "sh", str(logs), sys.executable, *script]
    if backend == "mpi":
        options = ["--oversubscribe", "--bind-to", "none", *(["--enable-recovery"] if recovery else [])]
        return [([str(folder / "mpiexec"), "-n", str(world_size), *options, *command], {})]
    if backend == "torchrun":
        options = ["--standalone", f"--nproc-per-node={world_size}", "--no-python"]
        return [([str(folder / "torchrun"), *options, *command], {})]
    if backend not in ("process_group", "plain"):
        raise ValueError(f"backend must be mpi, torchrun, process_group or plain, got {backend!r}")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world_size)]


def free_port() -> int:
    """One below those that the system gives to connections, which could take it before rank 0 does; each given once."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a count has no end")


@dataclass(frozen=True)
class _Launch:
    """How to know its processes.

    Attributes:
        mark: In the environment of what was started.
        sessions: Of its processes: forks have the environment of what they are forks of.
    """

    mark: str
    sessions: set[int]

    def processes(self) -> dict[int, str]:
        """Those that run, and their names."""
        wanted, found = f"{_MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z" and (
                    int(session) in self.sessions or wanted in (folder / "environ").read_bytes().split(b"\0")
                ):
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
        return found


def _wait(
    processes: Sequence[subprocess.Popen[bytes] | ForkedRank], deadline: float, launch: _Launch, ends_together: bool
) -> bool:
    """Wait for all; kill everything at the deadline, or when only stopped ranks are left. True at the deadline."""
    failed_at: float | None = None
    while left := [process for process in processes if process.poll() is None]:
        late = time.monotonic() > deadline
        if ends_together and failed_at is None and any(process.returncode for process in processes):
            failed_at = time.monotonic()
        fails = failed_at is not None and time.monotonic() > failed_at + _TOGETHER_S
        if late or fails or all(_is_stopped(process.pid) for process in left):
            if late:
                _show_stacks(launch)
            _kill(launch)
            for process in left:
                process.wait(60)
            return late
        time.sleep(0.02)
    return False


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _orphans(launch: _Launch) -> list[str]:
    """Who is left. Workers of a DataLoader look every five seconds whether their parent is there."""
    deadline = time.monotonic() + 30
    while (found := launch.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(found.values())


def _show_stacks(launch: _Launch) -> None:
    """Let Python's handler of SIGABRT write the stacks of all threads of all processes, which end by that."""
    for pid in launch.processes():
        with suppress(OSError):
            os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + _STACKS_S
    while any(not _is_stopped(pid) for pid in launch.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _kill(launch: _Launch) -> None:
    """Kill what is this launch's."""
    for pid in launch.processes():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


_forks = RankForks()
_ports = itertools.count(random.randrange(12_000, 30_000))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
