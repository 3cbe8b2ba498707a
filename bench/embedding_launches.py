"""Runs the launches of a bench and collects what the ranks wrote, and their traces (section 5.2)."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from .launch import LaunchError, tracebacks

_START_S = 180.0  # importing TorchRec, on a machine that has just been started


class Saved(Protocol):
    """Settings of a launch: what they are is between the command and its ranks, but for "world_size"."""

    def save(self, path: Path) -> None:
        """Write them to a file, as a JSON object."""


class Launcher:
    """A process that forks the ranks of one launch after the other.

    Args:
        device: "cuda" or "cpu".
        folder: For its log.
        packages: A folder of packages that go before the installed ones.
        ranks: Module of this folder whose `run_rank(path, rank, port)` is a rank.

    Attributes:
        torchrec: Version of TorchRec there.
        supplied: Modules that FBGEMM lacks for that version, given from older ones.
    """

    def __init__(self, device: str, folder: Path, packages: Path | None = None, ranks: str = "embedding_rank") -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if packages is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(packages), *filter(None, [environment.get("PYTHONPATH")])])
        self._log = folder / f"launcher-{'installed' if packages is None else 'other'}.log"
        command = [sys.executable, "-W", "ignore", "-m", "freescale.bench.embedding_fork", device, ranks]
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.torchrec, self.supplied = "", list[str]()

    def await_ready(self) -> None:
        """Wait until everything is imported.

        Raises:
            LaunchError: It is not, in time.
        """
        said = self._answer(_START_S)
        self.torchrec, self.supplied = said["ready"], said["supplied"]

    def run(self, settings: Saved, folder: Path, timeout_s: float) -> tuple[list[dict[str, Any]], str | None]:
        """Run one launch.

        Args:
            settings: What the ranks do.
            folder: An empty one for this launch.
            timeout_s: After so many seconds it is ended.

        Returns:
            What all ranks recorded, and what went wrong, if anything did.
        """
        path = folder / "settings.json"
        settings.save(path)
        fault = None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{path}\n")
            self._process.stdin.flush()
            codes = self._answer(timeout_s)["codes"]
            if any(codes):
                fault = tracebacks(folder) or f"the ranks ended with exit statuses {codes}\n{self._tail()}"
        except (LaunchError, OSError) as error:
            fault = f"{error}\n{tracebacks(folder)}"
        return read_found(folder), fault

    def close(self) -> None:
        """End the process and what it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('{"ready"', '{"codes"')):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            said = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise LaunchError(f"no answer within {timeout_s:.0f} s\n{self._tail()}") from None
        if said is None:
            self._answers.put(None)
            raise LaunchError(f"the launcher ended\n{self._tail()}")
        return said

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").strip().splitlines()[-30:])


def read_found(folder: Path) -> list[dict[str, Any]]:
    """Read what the ranks of a launch recorded; a line that breaks off is left out."""
    found = []
    for path in sorted(folder.glob("found-*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def read_traces(
    found: list[dict[str, Any]],
    keep: Path | None = None,
    num_processes: int | None = None,
    reader: str = "freescale.bench.trace_report",
) -> None:
    """Replace the paths of traces by what they say, in place, several at a time.

    Args:
        found: What ranks recorded.
        keep: Folder for the traces of rank 0; others, and all without one, are removed.
        num_processes: How many to read at once; by default as many as there are cores, at most 16.
        reader: Module that prints what the trace at a path says, with `--json`.
    """
    traces = [each for each in found if each["kind"] == "trace"]
    with ThreadPoolExecutor(num_processes or min(16, len(os.sched_getaffinity(0)))) as pool:
        for each, times in zip(traces, pool.map(lambda t: _read_trace(Path(t["path"]), reader), traces), strict=True):
            path = Path(each.pop("path"))
            each.update(times)
            if keep is not None and each["rank"] == 0:
                path.rename(keep / f"{each['link'].replace(' ', '-')}-{time.time_ns()}-{path.name}")
            else:
                path.unlink()


def _read_trace(path: Path, reader: str) -> dict[str, Any]:
    """Read a trace in a process of its own: they are large, and reading is plain Python."""
    command = [sys.executable, "-m", reader, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"fault": done.stderr.strip()}
    times: dict[str, Any] = json.loads(done.stdout)
    return {"times": times}
