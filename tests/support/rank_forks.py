"""Ranks that are forks of a process in which everything slow to import is imported already, and not started anew.

That takes 20 ms and not two seconds of a processor for each rank. As a script it is that process: it reads what to
start from its standard input, a line of JSON each, and writes how each rank ended to a file.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_IMPORTED = (
    "torch.distributed.distributed_c10d",
    "torch._dynamo",  # optimizers import it at their first step
    "torch.nn.parallel",
    "torch.utils.data",
    "pytest",
    "freescale.balancer",
    "freescale.embedding",
    "freescale.transport.process_group",
)
_ENOUGH_S = 300.0
_LOOK_S = 0.02


class ForkedRank:
    """A rank, in the way of a Popen.

    Attributes:
        pid: Of its process, which is the first of a session.
        returncode: How it ended, negative for a signal; None before.
    """

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Look whether it has ended."""
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
            time.sleep(_LOOK_S)
        return code


class RankForks:
    """The process that ranks are forks of. It ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self, command: list[str], environment: Mapping[str, str], stem: Path) -> ForkedRank:
        """Start a script in a fork.

        Args:
            command: The script and its arguments.
            environment: All of its variables.
            stem: Standard output goes to `stem`.out, standard error to `stem`.err.
        """
        wanted = {"command": command, "environment": dict(environment), "stem": str(stem), "folder": os.getcwd()}
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                variables = {**os.environ, **one, "PYTHONFAULTHANDLER": "1"}
                self._process = subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=variables, start_new_session=True
                )
                atexit.register(self._process.communicate)  # it ends when nothing more can come
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
        begun, deadline = stem.with_suffix(".begun"), time.monotonic() + _ENOUGH_S
        while not begun.exists():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("the process that ranks are forks of does not answer")
            time.sleep(0.002)
        return ForkedRank(int(begun.read_text()), stem.with_suffix(".code"))


def _write(path: Path, number: int) -> None:
    """Whoever finds the file finds all of it."""
    path.with_suffix(".part").write_text(str(number))
    path.with_suffix(".part").rename(path)


def _become(wanted: dict[str, Any]) -> None:
    """What a started script would find."""
    os.setsid()
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY)] + [(f"{wanted['stem']}.{end}", os.O_CREAT | os.O_WRONLY) for end in ("out", "err")]
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    tempfile.tempdir = None
    sys.argv = wanted["command"]
    script = str(Path(sys.argv[0]).absolute().parent)
    paths = [script, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]


def _run(wanted: dict[str, Any]) -> None:
    """Run the script as the main module."""
    path = Path(wanted["command"][0])
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(path.read_text(), str(path), "exec"), main.__dict__)


def _reap(ranks: dict[int, Path]) -> None:
    for pid, code in list(ranks.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del ranks[pid]
            with suppress(OSError):  # nobody waits for it any more
                _write(code, os.waitstatus_to_exitcode(status))


def _serve() -> dict[str, Any] | None:
    """Fork what is asked for. In a fork, gives what it is to be; None at the end."""
    ranks: dict[int, Path] = {}
    waiting = b""
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:
            read = os.read(0, 1 << 20)
            if not read:
                return None
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                wanted = json.loads(line)
                if (pid := os.fork()) == 0:
                    _become(wanted)
                    return dict(wanted)
                stem = Path(wanted["stem"])
                ranks[pid] = stem.with_suffix(".code")
                with suppress(OSError):
                    _write(stem.with_suffix(".begun"), pid)
        _reap(ranks)


def main() -> None:
    """See the module's text."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.remove(str(Path(__file__).parent))
    for name in _IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.freeze()  # what is imported stays shared between the ranks
    if (wanted := _serve()) is not None:
        _run(wanted)


if __name__ == "__main__":
    main()
