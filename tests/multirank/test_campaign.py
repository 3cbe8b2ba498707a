"""The multiset of samples out equals the multiset in, for every face, partitioner, transport and number of ranks."""

from pathlib import Path

import pytest

from balancer_campaign import cases, run_campaign
from rank_processes import launch
from rank_threads import run_in_threads

EPOCHS = len(cases(1))


@pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_threads_exchange_every_sample_once(world_size: int) -> None:
    assert run_in_threads(world_size, run_campaign) == [EPOCHS] * world_size


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["mpi", "process_group"])
def test_processes_exchange_every_sample_once(backend: str, world_size: int) -> None:
    script = Path(__file__).parents[1] / "support" / "balancer_campaign.py"
    done = launch(backend, world_size, script, [backend])
    assert done.returncode == 0, done.explain()
    assert done.outputs == [f"checked {EPOCHS} epochs\n"] * world_size, done.explain()
