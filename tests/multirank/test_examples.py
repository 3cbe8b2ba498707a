"""Every example runs on two ranks, as its first lines say."""

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
    done = launch(backend, 2, FOLDER / name, [backend], timeout_s=90)
    assert done.returncode == 0, done.explain()
    for rank, output in enumerate(done.outputs):
        assert f"rank {rank}: " in output, done.explain()
        assert said in output, done.explain()
