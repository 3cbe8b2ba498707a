"""Embeddings between real processes: parity over every transport, checkpoints, DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest

import embedding_groups_rank
import embedding_rank
from rank_processes import launch

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize(("backend", "world_size"), [("process_group", 2), ("mpi", 3)])
def test_processes_train_as_the_synchronous_order_does(backend: str, world_size: int) -> None:
    done = launch(backend, world_size, Path(embedding_rank.__file__), [backend, "cpu", "6"], timeout_s=240)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == len(embedding_rank.CHECKS), done.explain()


def test_steps_are_those_of_torchrec() -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    script = Path(embedding_rank.__file__).with_name("embedding_torchrec_rank.py")
    done = launch("process_group", 2, script, timeout_s=240)
    assert done.returncode == 0, done.explain()
    assert all("passed check_torchrec" in output for output in done.outputs), done.explain()


def test_checkpoints_and_ddp(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    done = launch("process_group", 8, Path(embedding_groups_rank.__file__), [str(tmp_path)], timeout_s=280)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == 2, done.explain()
