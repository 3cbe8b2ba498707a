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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from .launch import LaunchError, tracebacks

_START_S = 180.0  # importing TorchRec, on a machine that has just been started
_LATE_S = 30.0  # more than a launch may take after its time is over


class Saved(Protocol):
    """Settings of a launch, a dataclass: what else there is, is between the command and its ranks."""

    @property
    def cells(self) -> Sequence[Any]:
        """Workloads, most important first."""

    @property
    def contenders(self) -> Sequence[str]:
        """What is timed in each, in this order."""

    @property
    def until(self) -> float:
        """No measurement starts after that time."""

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
        self._environment = dict(os.environ, OMP_NUM_THREADS="1")
        self._environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if packages is not None:
            places = [str(packages), *filter(None, [self._environment.get("PYTHONPATH")])]
            self._environment["PYTHONPATH"] = os.pathsep.join(places)
        self._log = folder / f"launcher-{'installed' if packages is None else 'other'}.log"
        self._command = [sys.executable, "-W", "ignore", "-m", "freescale.bench.embedding_fork", device, ranks]
        self.torchrec, self.supplied = "", list[str]()
        self._start()

    def _start(self) -> None:
        with self._log.open("a") as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def await_ready(self) -> None:
        """Wait until everything is imported.

        Raises:
            LaunchError: It is not, in time.
        """
        said = self._answer(_START_S)
        self.torchrec, self.supplied = said["ready"], said["supplied"]

    def run(self, settings: Saved, folder: Path, timeout_s: float) -> tuple[list[dict[str, Any]], str | None]:
        """Run one launch. After one that did not end in time, the next starts the process anew.

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
            if self._process.poll() is not None:
                self.close()
                self._start()
                self.await_ready()
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


def run_all(launcher: Launcher, settings: Saved, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a launch; where it breaks off, run what it left over, without what broke it, until its time is over.

    Args:
        launcher: Starts the ranks.
        settings: What they do.
        folder: An empty one.

    Returns:
        What all ranks recorded, and what went wrong.
    """
    found: list[dict[str, Any]] = []
    faults: list[str] = []
    waiting = [settings]
    while waiting and (not faults or time.time() < settings.until):
        now = waiting.pop(0)
        place = folder / f"part-{len(faults)}-{len(waiting)}"
        place.mkdir()
        new, fault = launcher.run(now, place, now.until - time.time() + _LATE_S)
        found += new
        if fault is not None:
            faults.append(fault)
            waiting = left_over(now, new) + waiting
    return found, faults


def left_over(settings: Saved, found: Sequence[dict[str, Any]]) -> list[Saved]:
    """What a launch that broke off did not come to.

    Args:
        settings: Of the launch.
        found: What its ranks recorded: of each workload "begun" and, once it is made, "workload"; of each contender
            "built" and "measurement".

    Returns:
        Settings of launches: the other contenders in the workload in which it broke, then all in the later workloads,
        the one that broke it last. After a check that broke: the same without. Nothing where no rank came so far.
    """
    own = [each for each in found if each["rank"] == 0]
    begun = [each["cell"] for each in own if each["kind"] == "begun"]
    if not begun:
        if getattr(settings, "check", False):
            return [_changed(settings)]
        built = {each["contender"] for each in own if each["kind"] == "built"}
        others = _without_first(settings.contenders, built) if built else []
        return [_changed(settings, contenders=others)] if others else []
    last = [vars(cell) for cell in settings.cells].index(begun[-1])
    later, rest = list(settings.contenders), settings.cells[last + 1 :]
    parts = []
    if any(each["kind"] == "workload" and each["cell"] == begun[-1] for each in own):
        of_cell = [each for each in own if each["kind"] == "measurement" and each["cell"] == begun[-1]]
        measured = {each["contender"] for each in of_cell}
        broke = next((name for name in later if name not in measured), None)
        later.sort(key=lambda name: name == broke)
        others = [name for name in _without_first(settings.contenders, measured) if name not in measured]
        parts = [_changed(settings, cells=[settings.cells[last]], contenders=others)] if others else []
    return parts + ([_changed(settings, cells=rest, contenders=later)] if rest else [])


def _without_first(contenders: Sequence[str], done: set[str]) -> list[str]:
    """All but the first that is not done."""
    first = next((name for name in contenders if name not in done), None)
    return [name for name in contenders if name != first]


def _changed(settings: Saved, **changes: Any) -> Saved:
    if hasattr(settings, "check"):  # once is enough
        changes["check"] = False
    changed: Saved = replace(cast(Any, settings), **changes)
    return changed


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
    """Replace the paths of traces by what they say, in place, several at a time, those of all ranks together.

    Args:
        found: What ranks recorded.
        keep: Folder for the traces of rank 0; others, and all without one, are removed.
        num_processes: How many to read at once; by default as many as there are cores, at most 16.
        reader: Module that prints what the trace at a path says, with `--json`.
    """
    together: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        if each["kind"] == "trace":
            together.setdefault(json.dumps([each["link"], each["cell"], each["contender"]]), []).append(each)
    with ThreadPoolExecutor(num_processes or min(16, len(os.sched_getaffinity(0)))) as pool:
        read = list(
            pool.map(lambda ranks: _read_traces([Path(each["path"]) for each in ranks], reader), together.values())
        )
    for ranks, said in zip(together.values(), read, strict=True):
        for each, times in zip(ranks, said, strict=True):
            path = Path(each.pop("path"))
            each.update(times)
            if keep is not None and each["rank"] == 0:
                path.rename(keep / f"{each['link'].replace(' ', '-')}-{time.time_ns()}-{path.name}")
            else:
                path.unlink()


def _read_traces(paths: Sequence[Path], reader: str) -> list[dict[str, Any]]:
    """Read the traces of all ranks in a process of their own: they are large, and reading is plain Python.

    One that cannot be read leaves the others without what only all of them tell.
    """
    command = [sys.executable, "-m", reader, "--json", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [{"times": json.loads(line)} for line in done.stdout.splitlines()]
    if len(paths) == 1:
        return [{"fault": done.stderr.strip()}]
    return [each for path in paths for each in _read_traces([path], reader)]
