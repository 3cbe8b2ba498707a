"""Weights, optimizer state and losses are those of the synchronous order, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from embedding_runs import Data, Trained, assert_equal, train
from freescale.embedding import Adam, RowwiseAdagrad, Sgd, Table
from rank_threads import run_in_threads

TABLES = [Table("item", 64, 8, ["clicked", "shown"]), Table("user", 5, 8), Table("shop", 40, 4)]
OPTIMIZERS = [Sgd(lr=0.05), RowwiseAdagrad(lr=0.05), Adam(lr=0.05)]


def run(world_size: int, data: Data, **options: Any) -> list[Trained]:
    return run_in_threads(world_size, lambda transport: train(transport, data, **options), timeout_s=60)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_weights_are_those_of_the_synchronous_order(world_size: int, optimizer: Any) -> None:
    data = Data(TABLES, steps=30, empty=[1])
    ours = run(world_size, data, optimizer=optimizer)
    assert_equal(ours, run(world_size, data, optimizer=optimizer, synchronous=True, ahead=0))
