"""Every example runs on two ranks, as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rank_processes import launch

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {
    "wrap_dataloader.py": ("mpi", "done after 8 steps"),
    "datapipe.py": ("process_group", "done after 5 steps"),
    "nodes.py": ("mpi", "epoch 1, 4 steps"),
    "own_partitioner.py": ("process_group", "done"),
    "ddp_training.py": ("process_group", "loss "),
    "mixed_precision_training.py": ("process_group", "loss "),
    "torchrec_training.py": ("process_group", "45 steps, loss "),
    "lightning_training.py": ("process_group", "50 steps, loss "),
    "prioritized_embeddings.py": ("process_group", "60 steps"),
    "staged_pipeline.py": ("process_group", "60 steps, loss "),
    "resume.py": ("mpi", "1000 over all ranks"),
}


def test_every_example_is_tested_and_says_how_to_launch_it() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    assert set(found) == set(EXAMPLES)
    for name, text in found.items():
        assert f"torchrun --nproc-per-node 2 examples/{name}" in text, name
        if EXAMPLES[name][0] == "mpi":
            assert f"mpiexec -n 2 python examples/{name} mpi" in text, name


@pytest.mark.multirank
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_two_ranks(name: str) -> None:
    backend, said = EXAMPLES[name]
    done = launch(backend, 2, FOLDER / name, [backend])
    assert done.returncode == 0, done.explain()
    for rank, output in enumerate(done.outputs):
        assert f"rank {rank}: " in output, done.explain()
        assert said in output, done.explain()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_alone_runs_or_says_how_to_launch_it(name: str) -> None:
    command = [sys.executable, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if EXAMPLES[name][1].endswith("loss "):  # trainers that need several ranks
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
