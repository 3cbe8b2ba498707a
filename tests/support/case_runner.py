"""Runs commands that tell which case they are at: one after another, each case with a deadline, nothing lost by a hang.

A command runs its cases in a process group of its own. When a case passes its deadline, all processes of the command,
launched ranks too, write the stacks of all their threads and are killed; when a case takes the process down, that is
noted. Either way the cases that are left run in new processes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from case_report import ONLY, REPORT

_MARK = "FREESCALE_CASE_RUN"
_LOOK_S = 0.05
_STACKS_S = 10.0  # for writing its stacks, before a process is killed
_TEXT_CHARS = 8000
GOOD = ("passed", "skipped")


@dataclass(frozen=True)
class Part:
    """A command and how long it may take.

    Attributes:
        name: What it is, in a table.
        command: Tells of its cases as `case_report.py` says; otherwise it is one case itself.
        case_s: Deadline of a case, in seconds; of the whole command where it does not tell.
        start_s: Until the first case begins, and from the last to the end, in seconds.
        gpus: GPUs that it needs.
        variables: More environment variables.
        tells: Whether the command tells of its cases.
    """

    name: str
    command: Sequence[str]
    case_s: float = 60.0
    start_s: float = 60.0
    gpus: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    tells: bool = True


@dataclass(frozen=True)
class Result:
    """What became of a case: "passed", "skipped", "failed", "hung", "crashed" or "not run", and why."""

    part: str
    case: str
    outcome: str
    seconds: float
    text: str = ""


class Runner:
    """Runs parts until a deadline.

    Args:
        folder: For logs, one file for each start of a command.
        deadline: When everything has to be over, by `time.monotonic`.
        on_result: Called with each result as it comes.
    """

    def __init__(self, folder: Path, deadline: float, on_result: Callable[[Result], object]) -> None:
        self._folder, self._deadline, self._on_result = folder, deadline, on_result
        self._num_starts = 0

    def run(self, part: Part) -> None:
        """Run all cases of a part, in as many processes as it takes."""
        left: list[str] | None = None
        while left is None or left:
            if time.monotonic() >= self._deadline:
                for case in left or ["(all)"]:
                    self._on_result(Result(part.name, case, "not run", 0.0, "the time limit was reached"))
                return
            self._num_starts += 1
            number = f"{self._num_starts:02d}-{''.join(c if c.isalnum() else '-' for c in part.name)}"
            left = _Start(part, self._folder / number, left, self._deadline, self._on_result).run()


class _Start:
    """One start of a command, for some of its cases."""

    def __init__(
        self,
        part: Part,
        stem: Path,
        only: list[str] | None,
        deadline: float,
        on_result: Callable[[Result], object],
    ) -> None:
        self._part, self._deadline, self._on_result = part, deadline, on_result
        self._mark = uuid.uuid4().hex
        self._report, self._log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        self._scratch = stem.with_suffix(".tmp")
        self._scratch.mkdir(parents=True)
        self._variables = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # stacks of all threads at SIGABRT, also while they are inside a library
            "TMPDIR": str(self._scratch.absolute()),
            **part.variables,
            _MARK: self._mark,
        }
        if part.tells:
            self._variables[REPORT] = str(self._report.absolute())
        if only is not None:
            names = stem.with_suffix(".only")
            names.write_text(json.dumps(only))
            self._variables[ONLY] = str(names.absolute())
        self._cases: list[str] | None = None if part.tells else [part.name]
        self._done: set[str] = set()
        self._case = "" if part.tells else part.name
        self._since, self._num_read, self._any_bad = time.monotonic(), 0, False

    def run(self) -> list[str]:
        """Run until the command ends or is ended. Returns the cases that are left."""
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                self._part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables,
                start_new_session=True,
                preexec_fn=_no_core_files,
            )
        try:
            hung = self._watch(process)
        finally:
            self._kill(process)
        self._read()
        self._conclude(process.returncode, hung)
        shutil.rmtree(self._scratch, ignore_errors=True)
        return [case for case in self._cases or [] if case not in self._done]

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end; true when a deadline came first."""
        while process.poll() is None:
            self._read()
            allowed = self._part.case_s if self._case else self._part.start_s
            if time.monotonic() > min(self._since + allowed, self._deadline):
                self._read()
                return True
            time.sleep(_LOOK_S)
        return False

    def _read(self) -> None:
        lines = self._report.read_text().split("\n")[:-1] if self._report.exists() else []
        for line in lines[self._num_read :]:
            told = json.loads(line)
            now, event = time.monotonic(), told["event"]
            if event == "collected":
                self._cases = told["cases"]
            elif event == "began":
                self._case = told["case"]
            else:
                self._note(told["case"], event, told["text"])
                self._case = ""
            self._since = now
        self._num_read = len(lines)

    def _note(self, case: str, outcome: str, text: str = "") -> None:
        self._done.add(case)
        self._any_bad = self._any_bad or outcome not in GOOD
        self._on_result(Result(self._part.name, case, outcome, time.monotonic() - self._since, text[-_TEXT_CHARS:]))

    def _conclude(self, status: int | None, hung: bool) -> None:
        """Say what the end means for the case under way, or for the command as a whole."""
        if not self._part.tells and not hung and status == 0:
            self._note(self._case, "passed")
        elif hung and time.monotonic() >= self._deadline:
            self._note(self._case or "(start)", "not run", "cut short by the time limit")
        elif self._case:
            self._note(self._case, "hung" if hung else "crashed", self._last_words(status))
        elif hung or self._cases is None or (status and not self._any_bad and self._cases):
            where = "(start)" if self._cases is None else "(end)"
            self._note(where, "hung" if hung else "crashed", self._last_words(status))
            self._cases = [] if where == "(start)" else self._cases
        left = [case for case in self._cases or [] if case not in self._done]
        if left and not self._case and not self._any_bad:  # it ended by itself before it was through: not again
            for case in left:
                self._note(case, "not run", f"the command ended with status {status} before")

    def _last_words(self, status: int | None) -> str:
        return f"exit status {status}; {self._log.name}:\n{self._log.read_text(errors='replace')[-_TEXT_CHARS:]}"

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Have everything that is left write its stacks, then kill it; keep what ranks wrote to files."""
        for pid in sorted(self._marked()):  # one after another, as they write to one file; launchers before ranks
            until = time.monotonic() + _STACKS_S
            with suppress(OSError):
                os.kill(pid, signal.SIGABRT)
            while pid in self._marked() and time.monotonic() < until:
                process.poll()
                time.sleep(_LOOK_S)
        for pid in self._marked():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        with self._log.open("a") as log:
            for path in sorted(self._scratch.rglob("*.err")):
                log.write(f"--- {path.name}\n{path.read_text(errors='replace')[-_TEXT_CHARS:]}")

    def _marked(self) -> list[int]:
        """Processes of this start that run: ranks have process groups of their own."""
        wanted, found = f"{_MARK}={self._mark}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def _no_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
