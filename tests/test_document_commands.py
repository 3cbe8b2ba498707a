"""Shell blocks of the documents run as they stand, in a checkout as a reader has it; what does not run says why."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from document_blocks import LONG, NAMES, NOT_RUN, ROOT, Block, blocks_of
from reader_checkout import make_checkout, run_in_checkout

LIMIT_S, LONG_LIMIT_S = 300, 1500  # seconds of a block; a quiet machine needs 10 at most, and some minutes
# Why a block is not run, and what each of its commands must then be: what could run may not be marked.
REASONS = {
    "needs a GPU": r"bench\.(virtual_ranks|end_to_end|kernels|transport) .*--limit-s|bench\.trace_report|cuda_run\.py",
    "needs two GPUs": r"bench\.(embedding|end_to_end|virtual_ranks|kernels|transport) .*--limit-s|\"copy_engine\"",
    "needs RDMA hardware": r"\"verbs\"",
    "reads what GPUs have measured": r"(--read|--compute) out/",
    "runs the tests themselves": r"make (test|test-long|test-cuda|lint)\b",
}
ALONGSIDE = r"mkdir -p out|wait"
LONGER = {"takes a minute", "takes minutes"}
BLOCKS = [block for name in NAMES for block in blocks_of(name)]
SHELL = [block for block in BLOCKS if block.language == "bash"]
WITH_COMMANDS = sorted({block.document for block in SHELL if block.runs})
WITH_LONG_ONES = sorted({block.document for block in SHELL if block.mark.startswith(LONG)})


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader") / "checkout"
    make_checkout(folder)
    return folder


def run(blocks: list[Block], folder: Path, limit_s: float) -> None:
    """Run shell blocks one after another, as somebody who follows the page does."""
    for block in blocks:
        done = run_in_checkout(block.code, folder, limit_s)
        late = " (its time was over)" if done.returncode in (124, 137) else ""
        said = f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, f"{block}: status {done.returncode}{late}\n{block.code}\n{said}"
        assert "Traceback" not in done.stderr, f"{block}\n{said}"


@pytest.mark.multirank
@pytest.mark.timeout(5 * LIMIT_S)
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_of_a_document_run(name: str, tmp_path: Path) -> None:
    make_checkout(tmp_path)
    run([block for block in SHELL if block.document == name and block.runs], tmp_path, LIMIT_S)


@pytest.mark.long
@pytest.mark.multirank
@pytest.mark.timeout(4 * LONG_LIMIT_S)
@pytest.mark.parametrize("name", WITH_LONG_ONES)
def test_commands_of_a_document_that_take_minutes_run(name: str, tmp_path: Path) -> None:
    make_checkout(tmp_path)
    blocks = [block for block in SHELL if block.document == name and not block.mark.startswith(NOT_RUN)]
    run(blocks, tmp_path, LONG_LIMIT_S)


def test_every_block_says_what_it_is_and_code_is_not_passed_off_as_text() -> None:
    assert len(SHELL) > 20
    fences = [line for name in NAMES for line in re.findall(r"^ *(?:```|~~~).*$", (ROOT / name).read_text(), re.M)]
    assert len(fences) == 2 * len(BLOCKS), "a fence that is not seen hides its block"
    for block in BLOCKS:
        assert block.language in ("bash", "python", "text"), block
        if block.language != "text":
            continue
        assert not re.search(r"^\s*(python|make|pip|torchrun|mpiexec|source) ", block.code, re.MULTILINE), block
        with pytest.raises(SyntaxError):
            ast.parse(block.code)


def test_what_is_not_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [f"{block}: {block.mark}" for block in BLOCKS if not block.runs]
    with capsys.disabled():
        print("\n" + "\n".join(left_out))
    assert len(left_out) < len(BLOCKS) / 4


def test_what_is_not_run_says_a_reason_that_holds() -> None:
    for block in BLOCKS:
        if block.runs:
            continue
        if block.mark.startswith(LONG):
            assert block.mark.removeprefix(LONG) in LONGER, block
            assert block.language == "bash", block
            continue
        assert block.mark.startswith(NOT_RUN), f"{block} has a comment above it that is no mark: {block.mark}"
        assert (why := block.mark.removeprefix(NOT_RUN)) in REASONS, f"{block}: {why}"
        if block.language == "python":
            assert re.search(REASONS[why], block.code), f"{block} could run"
            continue
        for command in block.commands():
            assert re.search(f"{REASONS[why]}|^({ALONGSIDE})$", command), f"{block}: {command} could run"


def test_a_command_that_fails_in_the_middle_of_a_block_is_seen(fresh: Path) -> None:
    broken = Block("a.md", 3, "bash", "echo here\nfalse\necho there\n", "")
    with pytest.raises(AssertionError, match=r"a\.md:3: status 1"):
        run([broken], fresh, LIMIT_S)


def test_a_command_that_hangs_costs_its_limit(fresh: Path) -> None:
    hangs = Block("a.md", 3, "bash", "(sleep 600) & sleep 600\n", "")
    with pytest.raises(AssertionError, match="its time was over"):
        run([hangs], fresh, 1)


def test_pip_installs_into_the_checkouts_own_environment(fresh: Path) -> None:
    said = run_in_checkout("python -c 'import sys; print(sys.prefix)'; command -v pip; pip --version", fresh, LIMIT_S)
    assert said.stdout.splitlines()[:2] == [str(fresh / ".venv"), str(fresh / ".venv" / "bin" / "pip")]
    first = (fresh / ".venv" / "bin" / "pip").read_text().splitlines()[0]
    assert first == f"#!{fresh}/.venv/bin/python"


def test_blocks_are_found_with_their_marks_and_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        'a\n<!-- not run in CI: needs a GPU -->\n```bash\nx="1"\nrun $x \\\n  more  # why\n```\n```text\nb\n```\n'
    )
    with page.open("a") as file:
        file.write("- in a list\n\n  ```bash\n  cat <<'END'\n    more\n  END\n  ```\n")
    first, second, third = blocks_of(page)
    assert (first.line, first.language, first.mark, first.runs) == (4, "bash", "not run in CI: needs a GPU", False)
    assert first.commands() == ["run 1 more"]
    assert (second.line, second.language, second.runs) == (9, "text", True)
    assert (third.line, third.code) == (14, "cat <<'END'\n  more\nEND\n")
