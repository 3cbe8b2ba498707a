"""Weights, optimizer state and losses are those of the synchronous order, bit for bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from freescale.embedding import Adam, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table
from freescale.transport import Transport

from embedding_runs import Data, Trained, assert_equal, train
from rank_threads import run_in_threads

TABLES = [Table("item", 64, 8, ["clicked", "shown"]), Table("user", 5, 8), Table("shop", 40, 4)]
OPTIMIZERS = [Sgd(lr=0.05), RowwiseAdagrad(lr=0.05), Adam(lr=0.05)]


def run(world_size: int, data: Data, **options: Any) -> list[Trained]:
    return run_in_threads(world_size, lambda transport: train(transport, data, **options))


def assert_parity(world_size: int, data: Data, **options: Any) -> None:
    ours = run(world_size, data, **options)
    assert_equal(ours, run(world_size, data, **options | {"ahead": 0}, synchronous=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_weights_are_those_of_the_synchronous_order(world_size: int, optimizer: Any) -> None:
    data = Data(TABLES, steps=24 if world_size == 8 else 40, empty=[1])
    assert_parity(world_size, data, optimizer=optimizer)


@pytest.mark.parametrize("collision", [0.0, 0.01, 0.05, 0.25, 1.0])
def test_two_hundred_steps_make_no_difference(collision: float) -> None:
    data = Data([Table("item", 200, 4), Table("user", 30, 4)], steps=200, num_ids=30, collision=collision)
    assert_parity(2, data, optimizer=OPTIMIZERS[int(collision * 100) % 3])


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_batches_may_be_prefetched_far_ahead_or_not_at_all(ahead: int) -> None:
    data = Data(TABLES, steps=15)
    assert_parity(3, data, optimizer=Adam(lr=0.05), ahead=ahead, look=lambda step: step % 4 == 2)


def test_what_is_saved_between_any_two_steps_is_synchronous() -> None:
    assert_parity(2, Data(TABLES, steps=12), optimizer=Adam(lr=0.05), look=lambda step: True)


def test_tables_may_have_optimizers_of_their_own() -> None:
    optimizer = {"item": Adam(lr=0.05), "user": Sgd(lr=0.1), "shop": Sgd(lr=0.1)}
    assert_parity(2, Data(TABLES, steps=20), optimizer=optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_tables_and_a_narrow_wire_keep_parity(dtype: torch.dtype) -> None:
    wire = torch.bfloat16 if dtype == torch.float32 else None
    data = Data([Table("item", 64, 8, dtype=dtype)], steps=25)
    assert_parity(2, data, optimizer=RowwiseAdagrad(lr=0.05), wire_dtype=wire)


def test_hot_rows_are_summed_alike() -> None:
    data = Data([Table("item", 12, 3)], steps=8, num_ids=4000, collision=0.6)
    assert_parity(2, data, optimizer=RowwiseAdagrad(lr=0.001))


def test_a_row_of_the_batches_before_and_after_is_updated_in_between() -> None:
    """Row 3 is in batches 0 and 2, not in 1: its deferred update of 0 comes before the early lookup for 2."""
    batches = [torch.tensor(ids) for ids in ([3, 1], [1, 2], [3, 2], [1])]

    def follow(transport: Transport) -> list[float]:
        table = Table("item", 6, 1, init_fn=lambda rows: rows.fill_(1.0))
        tables = PrioritizedEmbeddingCollection([table], transport, optimizer=Sgd(lr=0.5), gradient_division=False)
        seen = []
        for current, upcoming in pairwise(batches):
            tables.prefetch({"item": upcoming})
            rows = tables({"item": current})["item"]
            seen.append(rows[0].item())
            rows.sum().backward()
        tables.close()
        return seen

    for world_size in (1, 2):
        for seen in run_in_threads(world_size, follow):
            assert seen == [1.0, 1 - 0.5 * world_size, 1 - 0.5 * world_size]
