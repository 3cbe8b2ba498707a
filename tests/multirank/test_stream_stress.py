"""Training with random delays on every stream and poison in free buffers ends with the weights of the plain order.

Threads stand for streams where there are no GPUs. The tests that are marked `gpus` do the same with CUDA streams, of
two ranks that may share a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import device_contract
from rank_processes import launch, support_path

pytestmark = pytest.mark.multirank
SCRIPT = Path(device_contract.__file__).with_name("stream_stress.py")
THREADS = ["threads-peer", "threads-segment", "threads-staged"]
# Checks have more channels open than trainers do. The C library fills what is freed.
VARIABLES = {"PYTHONPATH": support_path(), "CUDA_DEVICE_MAX_CONNECTIONS": "32", "MALLOC_PERTURB_": "255"}


def train_under_stress(world_size: int, steps: int, seed: int, engines: list[str], timeout_s: float) -> None:
    arguments = [str(steps), str(seed), *engines]
    done = launch(
        "process_group", world_size, SCRIPT, arguments, timeout_s=timeout_s, environment=VARIABLES, fresh=True
    )
    assert done.returncode == 0, done.explain()
    assert all(f"all passed {engines[-1]}" in output for output in done.outputs), done.explain()


def test_late_streams_and_spoiled_buffers_change_no_weight() -> None:
    train_under_stress(2, 7, 1, THREADS, timeout_s=500)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engine", THREADS)
def test_late_streams_and_spoiled_buffers_change_no_weight_in_many_steps(engine: str, seed: int) -> None:
    train_under_stress(3, 100, seed, [engine], timeout_s=500)


@pytest.mark.gpus(shared=True)
@pytest.mark.parametrize("engine", [pytest.param("nccl", marks=pytest.mark.gpus), "peer", "segment", "staged"])
def test_late_cuda_streams_and_spoiled_buffers_change_no_weight(engine: str) -> None:
    train_under_stress(2, 100, 1, [engine], timeout_s=500)
