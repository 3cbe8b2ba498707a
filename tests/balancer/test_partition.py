"""Partitioners of equal counts: every sample once, counts, evenness, bytes, determinism, edges."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.balancer.metrics import bytes_moved, rank_loads, straggler_percentage
from freescale.balancer.partitioners.partition import (
    HomeBatchSize,
    fixed_batch_size,
    greedy_batch_size,
    home_batch_size,
)
from freescale.balancer.partitioners.swaps import even_out
from freescale.balancer.partitioners.workload import costliest_first, workload
from freescale.balancer.plan import Partitioner, WorldSamples, validate_plan

EQUAL_COUNTS: dict[str, Partitioner] = {
    "fixed": fixed_batch_size,
    "greedy": greedy_batch_size,
    "home": home_batch_size,
    "home, exact": home_batch_size(tolerance=0),
}
every = pytest.mark.parametrize("partitioner", EQUAL_COUNTS.values(), ids=EQUAL_COUNTS)


class Speeds:
    """A cost that knows how fast ranks are."""

    def __init__(self, speeds: list[float], overhead: float = 0.0) -> None:
        self._speeds, self._overhead = torch.tensor(speeds, dtype=torch.float64), overhead

    def __call__(self, world: WorldSamples) -> Tensor:
        return world.uih_lengths.double()

    def speeds(self, world: WorldSamples) -> Tensor:
        return self._speeds[world.first_rank : world.first_rank + world.world_size]

    def overhead(self, world: WorldSamples) -> float:
        return self._overhead


def world_of(lengths: list[int], world_size: int, rank: list[int] | None = None) -> WorldSamples:
    loaded = torch.tensor(rank) if rank is not None else torch.arange(len(lengths)) * world_size // max(len(lengths), 1)
    return WorldSamples(world_size, loaded.long(), torch.tensor(lengths, dtype=torch.int64))


def lognormal_world(world_size: int, batch_size: int, seed: int = 0, longest: int = 21000) -> WorldSamples:
    lengths = np.random.default_rng(seed).lognormal(np.log(6000), 0.9, world_size * batch_size)
    rank = torch.arange(world_size).repeat_interleave(batch_size)
    return WorldSamples(world_size, rank, torch.from_numpy(np.minimum(lengths, longest).astype(np.int64)))


def straggler(world: WorldSamples, owner: Tensor) -> float:
    return straggler_percentage(rank_loads(owner, world.uih_lengths, world.world_size))


@st.composite
def worlds(draw: st.DrawFn) -> WorldSamples:
    world_size = draw(st.integers(1, 9))
    pairs = draw(st.lists(st.tuples(st.integers(0, world_size - 1), st.integers(0, 50) | st.just(10**6)), max_size=60))
    pairs.sort(key=lambda pair: pair[0])
    return world_of([length for _, length in pairs], world_size, [rank for rank, _ in pairs])


@every
@given(world=worlds())
@settings(max_examples=60, deadline=None)
def test_every_sample_gets_one_owner_and_counts_differ_by_at_most_one(
    partitioner: Partitioner, world: WorldSamples
) -> None:
    before = world.rank.clone()
    owner = validate_plan(partitioner(world), world)
    counts = torch.bincount(owner, minlength=world.world_size)
    assert owner.dtype == torch.int64
    assert int(counts.max()) - int(counts.min()) <= 1
    assert torch.equal(partitioner(world), owner)
    assert torch.equal(world.rank, before)


@given(world=worlds(), speeds=st.lists(st.floats(0.25, 4), min_size=9, max_size=9), overhead=st.floats(0, 100))
@settings(max_examples=80, deadline=None)
def test_counts_stay_equal_on_ranks_of_any_speed(world: WorldSamples, speeds: list[float], overhead: float) -> None:
    for partitioner in (greedy_batch_size(cost=Speeds(speeds, overhead)), home_batch_size(cost=Speeds(speeds))):
        owner = validate_plan(partitioner(world), world)
        counts = torch.bincount(owner, minlength=world.world_size)
        assert int(counts.max()) - int(counts.min()) <= 1


@given(world=worlds(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_where_samples_were_loaded_does_not_change_a_fixed_or_greedy_plan(world: WorldSamples, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    relabelled = torch.randperm(world.world_size, generator=random)[world.rank]
    elsewhere = WorldSamples(world.world_size, relabelled, world.uih_lengths)
    for partitioner in (fixed_batch_size, greedy_batch_size):
        assert torch.equal(partitioner(world), partitioner(elsewhere))


def test_fixed_batch_size_deals_in_the_zig_zag_of_the_paper() -> None:
    owner = fixed_batch_size(world_of(list(range(20, 8, -1)), 4))
    assert owner.tolist() == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]


def test_greedy_gives_the_longest_sample_of_a_row_to_the_lightest_rank() -> None:
    # Rows (9, 6), (5, 4), (3, 1) by spread 3, 2, 1: loads 9|6, then 1|3 make 10|9, then 4|5 make 14|14.
    assert greedy_batch_size(world_of([3, 9, 4, 6, 5, 1], 2)).tolist() == [1, 0, 0, 1, 1, 0]


def deal_plainly(rows: list[list[tuple[int, list[int]]]], world_size: int) -> list[int]:
    """Deal rows of (length, samples), longest first: merged in pairs while 32 are left, then one by one."""
    rows = sorted(rows, key=lambda row: row[-1][0] - row[0][0])
    while world_size >= 16 and len(rows) >= 64:
        merged = []
        for first, second in zip(rows[::2], rows[1::2], strict=False):
            row = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
            merged.append(sorted(row, key=lambda part: -part[0]))
        rows = sorted(merged + rows[2 * len(merged) :], key=lambda row: row[-1][0] - row[0][0])
    ranks, loads = list(range(world_size)), [0] * world_size
    owners: dict[int, int] = {}
    for row in rows:
        for (length, samples), rank in zip(row, ranks, strict=True):
            owners |= dict.fromkeys(samples, rank)
            loads[rank] += length
        ranks.sort(key=loads.__getitem__)
    return [owners[sample] for sample in sorted(owners)]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 64), (15, 128), (16, 63), (32, 64), (32, 101), (64, 128)])
def test_greedy_deals_rows_by_spread_as_a_plain_loop_does(world_size: int, batch_size: int) -> None:
    world = lognormal_world(world_size, batch_size)
    lengths = world.uih_lengths.tolist()
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    parts = [(lengths[sample], [sample]) for sample in order]
    rows = [parts[start : start + world_size] for start in range(0, len(parts), world_size)]
    assert greedy_batch_size(world).tolist() == deal_plainly(rows, world_size)


@every
@pytest.mark.parametrize(
    ("lengths", "world_size"),
    [([], 1), ([], 4), ([5], 4), ([5, 0, 3], 4), ([0] * 10, 4), ([7] * 11, 4), ([3, 1, 2], 1), ([10**9] + [1] * 15, 4)],
    ids=["none, one rank", "none", "one sample", "fewer than ranks", "all zero", "all equal", "one rank", "one giant"],
)
def test_edges_are_planned(partitioner: Partitioner, lengths: list[int], world_size: int) -> None:
    world = world_of(lengths, world_size)
    counts = torch.bincount(validate_plan(partitioner(world), world), minlength=world_size)
    assert int(counts.sum()) == len(lengths)
    assert int(counts.max()) - int(counts.min()) <= 1


def test_a_giant_sample_is_left_with_the_shortest_company() -> None:
    lengths = [1000] + [10] * 3 + [1] * 4
    for partitioner in (greedy_batch_size, home_batch_size):
        owner = partitioner(world_of(lengths, 4))
        assert int(rank_loads(owner, torch.tensor(lengths), 4).max()) == 1001


@pytest.mark.parametrize("world_size", [64, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_leaves_five_thousandths_of_a_percent_of_stragglers(world_size: int, seed: int) -> None:
    world = lognormal_world(world_size, 128, seed)
    assert straggler(world, greedy_batch_size(world)) <= 0.005


def test_greedy_evens_out_lengths_that_are_not_cut() -> None:
    world = lognormal_world(64, 128, longest=10**9)
    assert straggler(world, fixed_batch_size(world)) > 1
    assert straggler(world, greedy_batch_size(world)) <= 0.011


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_home_moves_at_most_a_twentieth_of_the_bytes_for_half_a_percent_of_stragglers(seed: int) -> None:
    world = lognormal_world(64, 128, seed)
    total = int(world.payload_bytes.sum())
    owner = home_batch_size(world)
    assert straggler(world, owner) <= 0.5
    assert bytes_moved(world, owner) <= 0.05 * total
    assert bytes_moved(world, greedy_batch_size(world)) > 0.95 * total


def test_home_moves_nothing_when_all_is_even_enough() -> None:
    world = world_of([10, 10, 10, 10, 9, 11, 10, 10], 4)
    assert torch.equal(home_batch_size(tolerance=0.1)(world), world.rank)


def test_home_shares_out_the_batches_that_exhausted_ranks_lack() -> None:
    world = lognormal_world(8, 64)
    loaded = torch.where(world.rank >= 4, world.rank - 4, world.rank).sort().values
    owner = home_batch_size(WorldSamples(8, loaded, world.uih_lengths))
    assert torch.bincount(owner).tolist() == [64] * 8
    assert straggler(world, owner) <= 0.5
    assert int((owner[loaded < 4] == loaded[loaded < 4]).sum()) > 200


@pytest.mark.parametrize("world_size", [8, 64, 512])
@pytest.mark.parametrize("slow", ["one", "half", "all a little"])
def test_speeds_even_out_time_at_equal_counts(world_size: int, slow: str) -> None:
    speeds = [1.0] * world_size
    if slow == "one":
        speeds[3] = 1 / 1.3
    elif slow == "half":
        speeds = [0.5 if rank % 2 else 1.0 for rank in range(world_size)]
    else:
        speeds = np.random.default_rng(0).normal(1, 0.03, world_size).tolist()
    world = lognormal_world(world_size, 128)
    for partitioner, most in (
        (greedy_batch_size(cost=Speeds(speeds)), 0.02),
        (home_batch_size(cost=Speeds(speeds)), 0.5),
    ):
        owner = partitioner(world)
        times = rank_loads(owner, world.uih_lengths, world_size) / torch.tensor(speeds, dtype=torch.float64)
        assert torch.bincount(owner).tolist() == [128] * world_size
        assert straggler_percentage(times) <= most


@given(world=worlds(), speeds=st.lists(st.sampled_from([0.2, 1.0, 3.0]), min_size=9, max_size=9))
@settings(max_examples=200, deadline=None)
def test_swaps_never_slow_the_slowest_rank_nor_lift_another_over_the_limit(
    world: WorldSamples, speeds: list[float]
) -> None:
    load = workload(Speeds(speeds[: world.world_size]), world)
    before = world.rank.numpy().copy()
    after = even_out(before, load, tolerance=0.01)
    was, became = load.times(before), load.times(after)
    giant = max(load.costs / load.speeds[before], default=0)
    limit = max(giant, load.ideal_time / 0.99) * (1 + 1e-12)
    assert became.max() <= was.max() * (1 + 1e-12)
    assert ((became <= limit) | (became <= was * (1 + 1e-12))).all()
    assert np.array_equal(np.bincount(after, minlength=9), np.bincount(before, minlength=9))


def test_one_slow_rank_of_4096_is_relieved_though_no_other_has_much_room() -> None:
    speeds = [1.0] * 4096
    speeds[3] = 1 / 1.3
    world = lognormal_world(4096, 128)
    times = rank_loads(greedy_batch_size(cost=Speeds(speeds))(world), world.uih_lengths, 4096)
    assert straggler_percentage(times / torch.tensor(speeds, dtype=torch.float64)) <= 0.02


def test_an_overhead_that_slow_ranks_feel_more_is_made_up_for() -> None:
    world, cost = lognormal_world(16, 64), Speeds([0.8] + [1.0] * 15, overhead=100_000)
    owner = greedy_batch_size(cost=cost)(world)
    times = (rank_loads(owner, world.uih_lengths, 16) + 100_000) / cost.speeds(world)
    assert straggler_percentage(times) <= 0.02


@every
def test_a_cost_replaces_the_length(partitioner: Any) -> None:
    world = world_of([1, 2, 3, 4, 5, 6, 7, 8], 2)
    upside_down = partitioner(cost=lambda world: 9.0 - world.uih_lengths)
    flipped = world_of([8, 7, 6, 5, 4, 3, 2, 1], 2)
    assert torch.equal(upside_down(world), partitioner(flipped))


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda world: torch.ones(3), r"cost must give shape \[4\]"),
        (lambda world: torch.tensor([1.0, -2.0, 1.0, 1.0]), r"finite and not negative, got -2.0 for sample 1"),
        (lambda world: torch.tensor([1.0, 2.0, torch.nan, 1.0]), r"finite and not negative, got nan for sample 2"),
    ],
)
def test_a_wrong_cost_is_named(cost: Callable[[WorldSamples], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_batch_size(cost=cost)(world_of([1, 2, 3, 4], 2))


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_outside_its_range_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"tolerance must be in \[0, 1\)"):
        home_batch_size(tolerance=tolerance)


def test_options_give_a_copy_and_leave_the_original_alone() -> None:
    assert home_batch_size(tolerance=0.01) == HomeBatchSize(tolerance=0.01)
    assert home_batch_size.tolerance == 0.005


def test_partitioners_without_a_learning_cost_have_no_state() -> None:
    assert greedy_batch_size.state_dict() == {}
    assert greedy_batch_size.gather == ()
    greedy_batch_size.load_state_dict({})
    with pytest.raises(ValueError, match="keeps a state"):
        greedy_batch_size.load_state_dict({"x": 1})


@pytest.mark.parametrize("name", ["fixed", "greedy", "home"])
def test_planning_for_512_ranks_loops_no_more_than_for_8_and_needs_no_square_memory(name: str) -> None:
    partitioner, small, large = EQUAL_COUNTS[name], lognormal_world(8, 128), lognormal_world(512, 128)
    partitioner(small)
    assert calls_of(lambda: partitioner(large)) <= 2 * calls_of(lambda: partitioner(small)) + 200
    tracemalloc.start()
    try:
        partitioner(large)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 * large.num_samples


def test_the_number_of_threads_does_not_change_a_plan() -> None:
    world, threads = lognormal_world(64, 128), torch.get_num_threads()
    plans = []
    for number in (1, 4):
        torch.set_num_threads(number)
        plans.append([partitioner(world) for partitioner in EQUAL_COUNTS.values()])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*plans, strict=True))


@given(costs=st.lists(st.floats(0, 1e30) | st.integers(0, 10**7) | st.just(-0.0), max_size=50))
@settings(max_examples=100, deadline=None)
def test_costs_are_sorted_in_descending_order_with_ties_by_index(costs: list[float]) -> None:
    expected = sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))
    assert costliest_first(np.array(costs, dtype=np.float64)).tolist() == expected
