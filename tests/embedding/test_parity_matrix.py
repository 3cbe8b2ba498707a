"""Weights, optimizer state and losses of 200 steps, bit for bit, for every world size, ratio and optimizer together."""

from __future__ import annotations

from typing import Any

import pytest

from freescale.embedding import Adam, RowwiseAdagrad, Sgd, Table
from freescale.transport import Transport

from embedding_runs import Data, Trained, assert_equal, train
from rank_threads import run_in_threads

TABLES = [Table("item", 96, 8, ["clicked", "shown"]), Table("user", 5, 8), Table("shop", 40, 4)]
STEPS = 200


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.05), RowwiseAdagrad(lr=0.05), Adam(lr=0.05)], ids=lambda o: type(o).__name__
)
@pytest.mark.parametrize("collision", [0.0, 0.01, 0.05, 0.25, 1.0], ids=lambda ratio: f"{100 * ratio:g}_percent")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8], ids=lambda size: f"{size}_ranks")
def test_two_hundred_steps_are_those_of_the_synchronous_order(
    world_size: int, collision: float, optimizer: Any
) -> None:
    """Three tables in two groups, a rank without ids in every third batch, a learning rate that falls each step."""
    data = Data(TABLES, steps=STEPS, collision=collision, empty=[1])

    def run(**options: Any) -> list[Trained]:
        def rank(transport: Transport) -> Trained:
            return train(transport, data, optimizer=optimizer, look=lambda step: step % 40 == 13, **options)

        return run_in_threads(world_size, rank, timeout_s=400)

    assert_equal(run(), run(ahead=0, synchronous=True))
