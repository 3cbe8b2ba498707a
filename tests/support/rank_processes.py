"""Starts a script as several ranks, by mpiexec, torchrun or by hand, and brings back what each of them said."""

from __future__ import annotations

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

_MARK = "FREESCALE_TEST_LAUNCH"
_STACKS_S = 2.0
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
    timeout_s: float = 250.0,
    recovery: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Launched:
    """Run `python script *args` as `world_size` ranks on this machine and wait for them.

    Ranks may share cores: OMP_NUM_THREADS is 1, and mpiexec may oversubscribe and run as root. Everything the ranks
    leave in /dev/shm and the temporary folder goes to folders of this launch, which are removed. At the deadline all
    processes of this launch, and no others, write the stacks of their threads and are killed, stopped ones too; they
    are known by a variable in their environment.

    Args:
        backend: "mpi" (mpiexec), "process_group" (torchrun, which ends all ranks as soon as one fails), or "plain"
            (as torchrun sets things up, but nobody watches: the other ranks go on when one fails).
        world_size: Number of ranks.
        script: Path of a Python file; for a module of the package give "-m" and the module's name in `args`.
        args: Its arguments.
        timeout_s: Deadline of the whole launch, in seconds.
        recovery: mpiexec leaves the other ranks alone when one dies.
        environment: Variables to add.

    Example:
        done = launch("mpi", 4, __file__, ["--steps", "3"], timeout_s=30)
        assert done.returncode == 0, done.explain()
    """
    mark = uuid.uuid4().hex
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    logs = Path(tempfile.mkdtemp(prefix="freescale-test-"))
    segments = Path(tempfile.mkdtemp(prefix="freescale-test-", dir=shared))
    variables = {**os.environ, **_variables(logs, segments), **(environment or {}), _MARK: mark}
    command = ["sh", "-c", _REDIRECT, "sh", str(logs), sys.executable, str(script), *args]
    begun = time.monotonic()
    try:
        with (logs / "launcher").open("wb") as said:
            starts = _start_commands(backend, world_size, command, recovery)
            processes = [
                subprocess.Popen(start, stdout=said, stderr=said, env=variables | more, start_new_session=True)
                for start, more in starts
            ]
            timed_out = _wait(processes, begun + timeout_s, mark)
        seconds = time.monotonic() - begun
        returncode = next((p.returncode for p in processes if p.returncode), 0)
        return Launched(
            returncode=returncode,
            seconds=seconds,
            outputs=[_read(logs / f"{rank}.out") for rank in range(world_size)],
            errors=[_read(logs / f"{rank}.err") for rank in range(world_size)],
            launcher=_read(logs / "launcher"),
            timed_out=timed_out,
            orphans=_orphans(mark),
            shared_memory=sorted(path.name for path in segments.rglob("*")),
        )
    finally:
        _kill(mark)
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
    backend: str, world_size: int, command: list[str], recovery: bool
) -> list[tuple[list[str], dict[str, str]]]:
    """What to start, with the variables of each."""
    folder = Path(sys.executable).parent
    if backend == "mpi":
        options = ["--oversubscribe", "--bind-to", "none", *(["--enable-recovery"] if recovery else [])]
        return [([str(folder / "mpiexec"), "-n", str(world_size), *options, *command], {})]
    if backend == "process_group":
        options = ["--standalone", f"--nproc-per-node={world_size}", "--no-python"]
        return [([str(folder / "torchrun"), *options, *command], {})]
    if backend != "plain":
        raise ValueError(f"backend must be mpi, process_group or plain, got {backend!r}")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
    return [(command, {**shared, "RANK": str(rank)}) for rank in range(world_size)]


def _free_port() -> int:
    """One below those that the system gives to connections, which could take it before rank 0 does."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = random.randrange(15_000, 30_000)
            probe.bind(("127.0.0.1", port))
            return port


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float, mark: str) -> bool:
    """Wait for all; kill everything at the deadline, or when only stopped ranks are left. True at the deadline."""
    while left := [process for process in processes if process.poll() is None]:
        late = time.monotonic() > deadline
        if late or all(_is_stopped(process.pid) for process in left):
            if late:
                _show_stacks(mark)
            _kill(mark)
            for process in left:
                process.wait(60)
            return late
        time.sleep(0.02)
    return False


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _marked(mark: str) -> dict[int, str]:
    """Processes of this launch that run, and their names."""
    wanted, found = f"{_MARK}={mark}".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def _orphans(mark: str) -> list[str]:
    """Who is left. Workers of a DataLoader look every five seconds whether their parent is there."""
    deadline = time.monotonic() + 30
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(found.values())


def _show_stacks(mark: str) -> None:
    """Let Python's handler of SIGABRT write the stacks of all threads of all processes, which end by that."""
    for pid in _marked(mark):
        with suppress(OSError):
            os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + _STACKS_S
    while any(not _is_stopped(pid) for pid in _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _kill(mark: str) -> None:
    """Kill what carries the mark of this launch."""
    for pid in _marked(mark):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
