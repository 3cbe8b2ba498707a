"""A checkpoint that a full disk cuts short is an error, and the one before it stays whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from freescale.embedding import PrioritizedEmbeddingCollection, Sgd, Table
from freescale.transport import connect


@contextmanager
def no_file_longer_than(size_bytes: int) -> Iterator[None]:
    """As on a disk that is nearly full: writes fail from there on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    tables = PrioritizedEmbeddingCollection([Table("item", 4000, 8)], connect("local"), optimizer=Sgd(lr=0.1))
    tables.save_sharded(tmp_path)
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    tables({"item": torch.arange(50)})["item"].sum().backward()
    with no_file_longer_than(20_000), pytest.raises(OSError, match=r"File too large: .*rank_0_of_1"):
        tables.save_sharded(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0_of_1.pt"]
    after = {name: value.clone() for name, value in tables.state_dict().items()}
    tables.load_sharded(tmp_path)
    for name, value in tables.state_dict().items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, after[name])
    tables.close()
