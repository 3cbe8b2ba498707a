"""Says in a file which case a process is at, so that whoever started it ends one that hangs and goes on with the rest.

A plugin for pytest (`-p case_report`), and `run_cases` for scripts. `case_runner.py` reads the file.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

REPORT, ONLY = "FREESCALE_CASE_REPORT", "FREESCALE_CASES_ONLY"


class Teller:
    """Appends a line for each event to the file that the environment names; without one it tells nobody."""

    def __init__(self) -> None:
        # What this process starts must not tell its own story there.
        path, only = os.environ.pop(REPORT, None), os.environ.pop(ONLY, None)
        self._path = None if path is None else Path(path)
        self._only = None if only is None else set(json.loads(Path(only).read_text()))

    def is_wanted(self, case: str) -> bool:
        return self._only is None or case in self._only

    def tell(self, event: str, case: str = "", text: str = "", cases: Sequence[str] = ()) -> None:
        if self._path is not None:
            line = json.dumps({"event": event, "case": case, "text": text, "cases": list(cases)})
            with self._path.open("a") as file:
                file.write(line + "\n")


def run_cases(cases: Mapping[str, Callable[[], object]]) -> list[str]:
    """Run what is asked for of a script's cases, in order, on every rank; rank 0 tells. Returns the names."""
    teller = Teller()
    tells = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")) == "0"
    wanted = [case for case in cases if teller.is_wanted(case)]
    if not tells:
        teller._path = None
    teller.tell("collected", cases=wanted)
    for case in wanted:
        teller.tell("began", case)
        try:
            cases[case]()
        except BaseException:
            teller.tell("failed", case, traceback.format_exc())
            raise
        teller.tell("passed", case)
    return wanted


class _Plugin:
    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._worst: tuple[str, str] = ("passed", "")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        dropped = [item for item in items if not self._teller.is_wanted(item.nodeid)]
        items[:] = [item for item in items if self._teller.is_wanted(item.nodeid)]
        config.hook.pytest_deselected(items=dropped)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._teller.tell("collected", cases=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst = ("passed", "")
        self._teller.tell("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self._worst[0] == "passed"):
            self._worst = (report.outcome, report.longreprtext)
        if report.when == "teardown":
            self._teller.tell(self._worst[0], report.nodeid, self._worst[1])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Plugin(Teller()), "freescale case report")
