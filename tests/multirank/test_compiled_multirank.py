"""torch.compile and DDP, around each other, on batches whose sizes differ between ranks and steps."""

from pathlib import Path

import pytest

from rank_processes import launch


@pytest.mark.multirank
def test_a_compiled_model_trains_on_balanced_batches_as_one_that_is_not() -> None:
    done = launch("process_group", 2, Path(__file__).with_name("compiled_rank.py"), [])
    assert done.returncode == 0, done.explain()
    assert all(f"rank {rank}: 6 steps, compiled as not" in output for rank, output in enumerate(done.outputs))
