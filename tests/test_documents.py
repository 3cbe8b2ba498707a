"""Documents are true: their Python runs, their links lead somewhere, the commands and tests they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from document_blocks import DOCUMENTS, NAMES, ROOT, python_of

LINK = re.compile(r"\]\(([^)\s]+)\)")
WITH_PYTHON = [name for name in NAMES if python_of(name)]


def anchors_of(path: Path) -> set[str]:
    """The anchors that a Markdown viewer gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_is_python_in_the_documents_that_users_start_from() -> None:
    start = ("dataloader", "torchrec", "lightning", "parquet", "worth_it", "partitioners", "embedding", "operating")
    assert {"README.md", *(f"docs/{name}.md" for name in start)} <= set(WITH_PYTHON)


def test_the_index_leads_to_every_page_and_the_readme_to_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    pages = {link.partition("#")[0] for link in LINK.findall(index.read_text())}
    assert {path.name for path in index.parent.glob("*.md")} - {"README.md"} <= pages
    assert "docs/README.md" in LINK.findall((ROOT / "README.md").read_text())


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder of its own. Warnings are errors, but for one with a test of its own, and torch's."""
    path = folder / "blocks.py"
    path.write_text(script)
    options = ["-W", "error::UserWarning", "-W", "ignore:ranks had :UserWarning"]
    options += ["-W", "ignore:Warning:UserWarning"]  # "Warning: Profiler clears events …": torch 2.11, at each profile
    options += ["-W", "ignore:Checkpoint directory :UserWarning"]  # Lightning's, at each resume into the same folder
    command = [sys.executable, *options, str(path)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_in_a_document_runs(name: str, tmp_path: Path) -> None:
    done = run(python_of(name), tmp_path)
    assert done.returncode == 0, f"{name}, line numbers as there:\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    for link in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = document.parent / place if place else document
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{name} links to {link}; there are {sorted(anchors_of(target))}"


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_and_modules_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= targets
    for module in re.findall(r"python -m freescale\.([\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_are_named_exist(name: str) -> None:
    named = set(re.findall(r"`((?:test|check)_\w+_\w+)`", (ROOT / name).read_text()))
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert named <= set(re.findall(r"def ((?:test|check)_\w+)\(", code))


def test_every_fault_that_others_have_met_leads_to_its_tests() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    places = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    named = set(re.findall(r"\[((?:test|check)_\w+)\](?!:)", text))
    assert named == set(places)
    for name, place in places.items():
        assert f"def {name}(" in (ROOT / "docs" / place).read_text(), name
    for row in re.findall(r"^\| .*$", text, re.MULTILINE):
        heading = row.startswith(("| ---", "| reported at", "| what "))
        assert heading or set(re.findall(r"\[(\w+)\]", row)) & named, f"no test: {row}"


def test_every_public_name_of_the_balancer_is_in_a_document() -> None:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    init = (ROOT / "balancer" / "__init__.py").read_text()
    public = set(re.findall(r'^    "(\w+)",$', init, re.MULTILINE))
    internal = {"Adapter", "BalancerIterDataPipe", "Cost", "ParquetSource", "Partitioner", "adapter_for"}
    missing = {name for name in public - internal if not re.search(rf"\b{name}\b", text)}
    assert public
    assert not missing


def test_every_command_and_every_extra_is_in_a_document() -> None:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    commands = [path.stem for path in (ROOT / "bench").glob("*.py") if 'prog="python -m' in path.read_text()]
    assert len(commands) > 15
    assert [name for name in commands if not re.search(rf"`[^`]*bench\.{name}\b", text)] == []
    extras = re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text().partition("extras_require]")[2], re.MULTILINE)
    readme = (ROOT / "README.md").read_text().partition("Extras: ")[2].partition("\n\n")[0]
    assert set(extras[: extras.index("bench") + 1]) == set(re.findall(r"`(\w+)`", readme))


def test_a_block_that_fails_is_seen_at_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.md"
    broken.write_text("text\n```python\nx = 1\n```\nmore\n```\nnot python\n```\n```python\nassert x == 3\n```\n")
    done = run(python_of(str(broken)), tmp_path)
    assert done.returncode != 0
    assert 'blocks.py", line 10' in done.stderr
