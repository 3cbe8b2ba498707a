"""The commands of docs/evaluation.md, "Reproducing on …", are read by the benches as they stand."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
LIMITS_S = {"two GPUs": 1800, "one GPU": 900}


def commands(where: str) -> list[tuple[str, list[str]]]:
    """Module and arguments of every command in the section."""
    section = PAGE.partition(f"## Reproducing on {where}")[2]
    blocks = re.findall(r"^```bash\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    variables: dict[str, str] = {}
    found = []
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        if assigned := re.fullmatch(r'(\w)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
        words = shlex.split(re.sub(r"\$(\w)\b", lambda name: variables[name[1]], line).removesuffix("&"), comments=True)
        if "-m" in words and not assigned:
            found.append((words[words.index("-m") + 1], words[words.index("-m") + 2 :]))
    return found


@pytest.mark.parametrize(("module", "arguments"), [each for where in LIMITS_S for each in commands(where)])
def test_a_command_is_read_without_a_mistake(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    parser: Any = importlib.import_module(module)._parser()
    options = parser.parse_args(arguments)
    if "read" in options and "cells" in dir(importlib.import_module(module)) and not options.read:
        with_gpu = importlib.import_module(module)
        for name, default in with_gpu._DEFAULTS["cuda"].items():
            setattr(options, name, getattr(options, name) or default)
        cells = with_gpu.cells(options, "nvlink") if module.endswith(".embedding") else with_gpu.cells(options)
        assert cells
        assert len(set(cells)) == len(cells)


@pytest.mark.parametrize(("where", "least"), [("two GPUs", 8), ("one GPU", 3)])
def test_all_of_them_are_limited_and_fit_into_the_time_that_is_named(where: str, least: int) -> None:
    measuring = [
        arguments
        for module, arguments in commands(where)
        if not {"--read", "--check"} & {*arguments} and module != "freescale.bench.report"
    ]
    assert len(measuring) >= least
    limits = [float(arguments[arguments.index("--limit-s") + 1]) for arguments in measuring]
    assert sum(limits) <= LIMITS_S[where]
