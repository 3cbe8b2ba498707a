"""Every example runs on two ranks, by each of the commands that its first lines have, as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from document_blocks import blocks_of
from reader_checkout import make_checkout, run_in_checkout

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {
    "wrap_dataloader.py": "done after 8 steps",
    "datapipe.py": "done after 5 steps",
    "nodes.py": "epoch 1, 4 steps",
    "own_partitioner.py": "done",
    "ddp_training.py": "loss ",
    "mixed_precision_training.py": "loss ",
    "torchrec_training.py": "45 steps, loss ",
    "lightning_training.py": "50 steps, loss ",
    "prioritized_embeddings.py": "60 steps",
    "staged_pipeline.py": "60 steps, loss ",
    "resume.py": "1000 over all ranks",
}
LIMIT_S = 250


def commands(name: str) -> list[str]:
    """What the first lines of an example say to type."""
    said = (FOLDER / name).read_text().partition('"""')[2].partition('"""')[0]
    return re.findall(r"^    ((?:torchrun|mpiexec) .*)$", said, re.MULTILINE)


def once_each() -> list[object]:
    """All commands; the second of an example, and those that the README's test runs, in `make test-long` alone."""
    elsewhere = " ".join(command for block in blocks_of("README.md") if block.runs for command in block.commands())
    found: list[object] = []
    for index, name in enumerate(EXAMPLES):
        told = commands(name)
        for command in told:
            again = command in elsewhere or command != told[(index + 1) % len(told)]
            found.append(pytest.param(command, marks=pytest.mark.long) if again else command)
    return found


def test_every_example_is_tested_and_says_how_to_launch_it() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES)
    for name in EXAMPLES:
        launched_by = [command.split()[0] for command in commands(name)]
        takes_a_backend = "sys.argv" in (FOLDER / name).read_text()
        assert launched_by == (["torchrun", "mpiexec"] if takes_a_backend else ["torchrun"]), name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    make_checkout(folder)
    return folder


@pytest.mark.multirank
@pytest.mark.parametrize("command", once_each())
def test_an_example_runs_on_two_ranks(command: str, checkout: Path) -> None:
    done = run_in_checkout(command, checkout, LIMIT_S)
    said = f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert done.returncode == 0, said
    (expected,) = (end for name, end in EXAMPLES.items() if f"examples/{name}" in command)
    for rank in range(2):
        assert re.search(rf"rank {rank}: .*{re.escape(expected)}", done.stdout), said


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_alone_runs_or_says_how_to_launch_it(name: str) -> None:
    command = [sys.executable, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if EXAMPLES[name].endswith("loss "):  # trainers that need several ranks
        assert done.returncode == 1
        said = done.stderr.splitlines()[-1]
        needy = "TorchRec needs ranks to shard over" if "torchrec" in name else "DDP needs several ranks"
        assert said == f"{needy}: torchrun --nproc-per-node 2 examples/{name}"
        return
    assert done.returncode == 0, done.stderr
    assert "rank 0: " in done.stdout
    if name == "own_partitioner.py":
        before, after = re.findall(r"greedy_batch_size: straggler ([\d.]+) % -> ([\d.]+) %", done.stdout)[0]
        assert float(after) < 1 < float(before), "alone there would be nothing to balance"


def test_the_readme_names_every_example() -> None:
    readme = (FOLDER.parent / "README.md").read_text()
    assert [name for name in EXAMPLES if f"(examples/{name})" not in readme] == []
