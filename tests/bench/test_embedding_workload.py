"""The bench's batches collide as often as asked, and are otherwise alike."""

from __future__ import annotations

import pytest
import torch

from freescale.bench.collision_ratio import collisions
from freescale.bench.embedding_workload import NUM_CLASSES, Workload, bytes_a_step


def small(ratio: float, world_size: int = 2, num_tables: int = 1, recurring: str = "spread") -> Workload:
    return Workload(60, ratio, world_size, 16, 40_000, num_tables, median=30.0, recurring=recurring)


def test_collisions_are_counted_by_rows_requests_and_occurrences() -> None:
    batch = [torch.tensor([7, 7, 7, 2]), torch.tensor([7, 5])]
    found = collisions(batch, [torch.tensor([], dtype=torch.int64), torch.tensor([7, 5, 9])], rows_per_rank=6)
    assert (found.num_rows, found.num_requests, found.num_occurrences) == (3, 4, 6)
    assert found.rows == pytest.approx(2 / 3)  # 7 and 5, not 2
    assert found.requests == pytest.approx(3 / 4)  # 7 of either rank, 5
    assert found.occurrences == pytest.approx(5 / 6)
    assert found.remote_requests == [1, 1]  # 7 lies on rank 1, 5 on rank 0


def test_empty_batches_do_not_collide() -> None:
    nothing = [torch.tensor([], dtype=torch.int64)]
    assert collisions(nothing, nothing).rows == 0
    assert collisions([torch.tensor([1])], nothing).requests == 0


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.05, 0.25, 1.0])
@pytest.mark.parametrize("recurring", ["spread", "popular"])
def test_the_share_of_distinct_rows_that_recur_is_the_one_asked_for(ratio: float, recurring: str) -> None:
    workload = small(ratio, world_size=3, recurring=recurring)
    for step in (0, 3, NUM_CLASSES * 5 - 1):
        found = workload.collisions(step)
        assert found.rows == pytest.approx(ratio, abs=1 / found.num_rows)


def test_rows_that_do_not_recur_are_not_in_any_of_the_next_three_batches() -> None:
    workload = small(0.0)
    for later in range(1, NUM_CLASSES):
        assert collisions(list(workload.global_ids(5)), list(workload.global_ids(5 + later))).rows == 0


def test_popular_rows_recur_in_many_occurrences_and_spread_ones_in_about_as_many_as_rows() -> None:
    spread = small(0.25).collisions()
    popular = small(0.25, recurring="popular").collisions()
    assert spread.occurrences == pytest.approx(0.25, abs=0.1)
    assert popular.occurrences > 0.5


def test_all_steps_and_ranks_carry_the_same_lengths_and_as_many_rows() -> None:
    workload = small(0.1)
    lengths = [workload.lengths(step, rank) for step in range(3) for rank in range(2)]
    assert all(torch.equal(each.sort().values, workload.sorted_lengths) for each in lengths)
    assert not torch.equal(lengths[0], lengths[1])
    assert int(workload.sorted_lengths.max()) == 60
    assert len({len(workload.global_ids(step).unique()) for step in range(4)}) == 1
    assert int(workload.global_ids(1).max()) < workload.num_rows


def test_batches_do_not_change_between_runs_and_tables_differ() -> None:
    first, again = (small(0.1, num_tables=2) for _ in range(2))
    assert torch.equal(first.global_ids(5, 1), again.global_ids(5, 1))
    assert not torch.equal(first.global_ids(5, 0), first.global_ids(5, 1))


def test_urgent_bytes_are_gradients_out_and_rows_back() -> None:
    workload = small(1.0)
    found = workload.collisions()
    remote = sum(
        int((ids.unique() // workload.rows_per_rank != rank).sum()) for rank, ids in enumerate(workload.global_ids(0))
    )
    assert bytes_a_step([found], dim=16) == 2 * 4 * 16 * remote / 2


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio must be from 0 to 1, got 1\.5"):
        Workload(60, 1.5, world_size=2)
    with pytest.raises(ValueError, match="recurring must be"):
        Workload(60, 0.5, world_size=2, recurring="often")
