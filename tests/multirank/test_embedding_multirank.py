"""Embeddings between real processes: parity over every transport, checkpoints, DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest

import embedding_device_rank
import embedding_groups_rank
import embedding_rank
from rank_processes import launch

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize(("backend", "world_size"), [("process_group", 2), ("mpi", 3)])
def test_processes_train_as_the_synchronous_order_does(backend: str, world_size: int) -> None:
    done = launch(backend, world_size, Path(embedding_rank.__file__), [backend, "cpu", "6"], timeout_s=500)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == len(embedding_rank.CHECKS), done.explain()


def test_steps_are_those_of_torchrec() -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    script = Path(embedding_rank.__file__).with_name("embedding_torchrec_rank.py")
    done = launch("process_group", 2, script, timeout_s=500)
    assert done.returncode == 0, done.explain()
    assert all("passed check_torchrec" in output for output in done.outputs), done.explain()


def test_checkpoints_and_ddp(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    done = launch("process_group", 8, Path(embedding_groups_rank.__file__), [str(tmp_path)], timeout_s=500)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == 2, done.explain()


def check_on_devices(engine: str, environment: dict[str, str], timeout_s: float) -> None:
    script = Path(embedding_device_rank.__file__)
    done = launch("process_group", 2, script, [engine], timeout_s=timeout_s, environment=environment)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == len(embedding_device_rank.CHECKS), done.explain()


def test_what_is_checked_on_gpus_runs_without_them() -> None:
    check_on_devices("cpu", {embedding_device_rank.FEW_STEPS: "6"}, timeout_s=500)


@pytest.mark.gpus(shared=True)
@pytest.mark.parametrize("engine", ["peer", "segment", "staged", pytest.param("nccl", marks=pytest.mark.gpus)])
def test_tables_on_gpus_keep_parity_and_memory_and_do_not_wait(engine: str) -> None:
    check_on_devices(engine, {}, timeout_s=500)


@pytest.mark.gpus(shared=True)
def test_steps_on_a_gpu_are_those_of_torchrecs_unpooled_tables() -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    script = Path(embedding_rank.__file__).with_name("embedding_torchrec_rank.py")
    done = launch("process_group", 1, script, ["cuda"], timeout_s=500)
    assert done.returncode == 0, done.explain()
    assert "passed check_torchrec" in done.outputs[0], done.explain()
