"""Variable batch size: the best contiguous cut against brute force, and autotune in a closed loop."""

from __future__ import annotations

import io
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.balancer.metrics import rank_loads
from freescale.balancer.partitioners.cost import CostModel
from freescale.balancer.partitioners.cut import exact_cut, prefix_cut
from freescale.balancer.partitioners.variable import VariableBatchSize
from freescale.balancer.plan import WorldSamples, validate_plan
from freescale.bench.autotune import Cluster, closed_loop


def slowest(weights: list[float], cuts: list[int], speeds: list[float]) -> float:
    return max(sum(weights[a:b]) / speed for a, b, speed in zip(cuts[:-1], cuts[1:], speeds, strict=True))


def best_by_brute_force(weights: list[float], speeds: list[float]) -> float:
    inner = combinations(range(1, len(weights)), len(speeds) - 1)
    return min(slowest(weights, [0, *cuts, len(weights)], speeds) for cuts in inner)


@given(
    weights=st.lists(st.integers(0, 30), min_size=5, max_size=12),
    speeds=st.lists(st.sampled_from([0.5, 0.8, 1.0, 1.3]), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_the_exact_cut_is_the_best_contiguous_one_and_leaves_no_rank_empty(
    weights: list[int], speeds: list[float]
) -> None:
    descending = [float(weight) for weight in sorted(weights, reverse=True)]
    cuts = exact_cut(np.array(descending), np.array(speeds)).tolist()
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    assert all(b > a for a, b in pairwise(cuts))
    assert slowest(descending, cuts, speeds) <= best_by_brute_force(descending, speeds) * (1 + 1e-9)


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=0, max_size=40),
    speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=9),
)
@settings(max_examples=200, deadline=None)
def test_cuts_cover_all_samples_and_leave_no_rank_empty_without_need(weights: list[float], speeds: list[float]) -> None:
    for cut in (exact_cut, prefix_cut):
        cuts = cut(np.array(sorted(weights, reverse=True)), np.array(speeds))
        assert (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), len(speeds) + 1)
        assert (np.diff(cuts) >= (1 if len(weights) >= len(speeds) else 0)).all()
        assert (np.diff(cuts) <= 1).all() or len(weights) >= len(speeds)


def large_world(seed: int = 0) -> WorldSamples:
    return Cluster().batch(seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_cut_of_a_large_batch_is_a_thousandth_better(seed: int) -> None:
    world = large_world(seed)
    weights = np.sort(world.uih_lengths.double().numpy())[::-1]
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    loads = rank_loads(VariableBatchSize(1)(world), world.uih_lengths, 64)
    cap, start = float(loads.max()) * 0.999, 0
    for _ in range(64):  # the longest segments that a cap 0.1 % lower allows do not reach the end
        start = int(np.searchsorted(prefix, prefix[start] + cap, side="right")) - 1
    assert start < world.num_samples


def test_the_exact_cut_is_better_than_the_prefix_cut() -> None:
    world = large_world()
    exact, prefix = (
        float(rank_loads(VariableBatchSize(1, cut=cut)(world), world.uih_lengths, 64).max())
        for cut in ("exact", "prefix")
    )
    assert exact < prefix * 0.999


def test_segments_hold_samples_of_similar_length() -> None:
    world = large_world()
    owner = VariableBatchSize(1)(world)
    shortest = [int(world.uih_lengths[owner == rank].min()) for rank in range(64)]
    longest = [int(world.uih_lengths[owner == rank].max()) for rank in range(64)]
    assert all(above >= below for above, below in zip(shortest, longest[1:], strict=False))


def test_alpha_zero_counts_samples_and_alpha_two_weighs_squares() -> None:
    world = WorldSamples(2, torch.tensor([0, 0, 1, 1]), torch.tensor([10, 7, 7, 1]))
    assert VariableBatchSize(0)(world).tolist() == [0, 0, 1, 1]
    assert VariableBatchSize(2)(world).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("cut", ["exact", "prefix"])
@pytest.mark.parametrize(
    ("lengths", "world_size", "counts"),
    [
        ([], 3, [0, 0, 0]),
        ([5], 3, [1, 0, 0]),
        ([0] * 7, 3, None),
        ([4] * 6, 3, [2, 2, 2]),
        ([9, 1], 1, [2]),
        ([1000, 1, 1, 1], 3, None),
    ],
)
def test_edges_are_cut(cut: str, lengths: list[int], world_size: int, counts: list[int] | None) -> None:
    world = WorldSamples(world_size, torch.zeros(len(lengths), dtype=torch.int64), torch.tensor(lengths).long())
    owner = validate_plan(VariableBatchSize(1, cut=cut)(world), world)  # type: ignore[arg-type]  # parametrized text
    found = torch.bincount(owner, minlength=world_size).tolist()
    if counts is not None:
        assert found == counts
    elif len(lengths):
        assert min(found) >= 1
        assert max(found) <= -(-len(lengths) // world_size)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 4, 5])
def test_autotune_settles_within_five_percent_and_stays_there_for_a_hundred_steps(delay: int) -> None:
    found = closed_loop(VariableBatchSize(1, autotune=True), Cluster(delay=delay), steps=130)
    assert found[0] > 0.25
    assert max(found[30:]) <= 0.05


def test_autotune_makes_up_for_a_wrong_exponent() -> None:
    found = closed_loop(VariableBatchSize(1, autotune=True), Cluster(delay=3, square=1e-4), steps=130)
    assert found[0] > 0.5
    assert max(found[30:]) <= 0.05


def measured_world(seconds: list[float], step: int, world_size: int = 4) -> WorldSamples:
    lengths = torch.full((world_size * 8,), 100)
    rank = torch.arange(world_size).repeat_interleave(8)
    return WorldSamples(
        world_size,
        rank,
        lengths,
        seconds=torch.tensor(seconds, dtype=torch.float64),
        seconds_step=torch.full((world_size,), step),
        measured=WorldSamples(world_size, rank, lengths),
    )


def test_a_missing_measurement_keeps_the_last_estimate() -> None:
    partitioner = VariableBatchSize(1, autotune=True)
    for step in range(40):
        partitioner(measured_world([1.0, 2.0, 1.0, 1.0], step))
    before = partitioner.state_dict()["rank_speed"]
    partitioner(measured_world([1.0, float("nan"), 1.0, 1.0], 40))
    after = partitioner.state_dict()["rank_speed"]
    assert before[1] == pytest.approx(0.5, abs=0.01)
    assert after[1] == before[1]


def test_one_wild_measurement_changes_a_speed_by_a_tenth_at_most() -> None:
    partitioner = VariableBatchSize(1, autotune=True)
    partitioner(measured_world([1.0, 1000.0, 1.0, 1.0], 0))
    assert partitioner.state_dict()["rank_speed"].min() == pytest.approx(1 / 1.1)


def test_planning_the_same_world_again_learns_nothing_more() -> None:
    partitioner, world = VariableBatchSize(1, autotune=True), measured_world([1.0, 2.0, 1.0, 1.0], 0)
    first = partitioner(world)
    assert torch.equal(partitioner(world), first)


def test_a_restored_state_plans_on_alike_and_is_left_alone() -> None:
    original = VariableBatchSize(1, autotune=True)
    for step in range(5):
        original(measured_world([1.0, 3.0, 1.0, 1.0], step))
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kept = {name: value.clone() for name, value in state.items()}
    restored = VariableBatchSize(1, autotune=True)
    restored.load_state_dict(state)
    for step in range(5, 10):
        world = measured_world([1.0, 3.0, 1.0, 1.0], step)
        assert torch.equal(restored(world), original(world))
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="alpha must be finite and not negative, got -1"):
        VariableBatchSize(-1)
    with pytest.raises(ValueError, match='cut must be "exact" or "prefix"'):
        VariableBatchSize(1, cut="best")  # type: ignore[arg-type]  # the error is what is tested
    with pytest.raises(ValueError, match="alpha must be 1 and autotune False"):
        VariableBatchSize(1, autotune=True, cost=CostModel())


def test_weights_that_all_but_vanish_are_cut_too() -> None:
    for weights in ([5e-324, 0.0], [5e-324] * 5, [1e-323, 5e-324, 5e-324]):
        cuts = exact_cut(np.array(weights), np.array([2.0]))
        assert cuts.tolist() == [0, len(weights)]
        assert exact_cut(np.array([*weights, 0.0, 0.0]), np.array([2.0, 0.5]))[-1] == len(weights) + 2
