"""Budgets, groups and keys that stay together, alone and nested."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.balancer import Column, JaggedBatch, balance
from freescale.balancer.metrics import rank_loads, straggler_percentage
from freescale.balancer.partitioners.constraints import capped, grouped, keep_together
from freescale.balancer.partitioners.cost import CostModel
from freescale.balancer.partitioners.partition import (
    GreedyBatchSize,
    fixed_batch_size,
    greedy_batch_size,
    home_batch_size,
)
from freescale.balancer.partitioners.variable import VariableBatchSize
from freescale.balancer.partitioners.workload import Ints
from freescale.balancer.plan import Partitioner, WorldSamples, validate_plan
from freescale.bench.autotune import Cluster
from freescale.transport import connect


def as_loaded(world: WorldSamples) -> Tensor:
    return world.rank


INNER: list[Partitioner] = [as_loaded, fixed_batch_size, greedy_batch_size, home_batch_size, VariableBatchSize(2)]


@st.composite
def worlds(draw: st.DrawFn) -> WorldSamples:
    world_size = draw(st.integers(1, 7))
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, world_size - 1), st.integers(0, 40), st.integers(0, 300), st.integers(-3, 3)),
            max_size=40,
        )
    )
    rank, lengths, size_bytes, key = zip(*sorted(rows), strict=True) if rows else ((), (), (), ())
    return WorldSamples(
        world_size,
        torch.tensor(rank, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        payload_bytes=torch.tensor(size_bytes, dtype=torch.int64),
        gathered={"session": torch.tensor(key, dtype=torch.int32)},
    )


@given(world=worlds(), inner=st.sampled_from(INNER), slack=st.floats(1, 2))
@settings(max_examples=150, deadline=None)
def test_no_rank_exceeds_its_budget_or_the_error_says_so(world: WorldSamples, inner: Partitioner, slack: float) -> None:
    tokens, size_bytes = world.uih_lengths, world.payload_bytes
    max_tokens = max(int(slack * int(tokens.sum()) / world.world_size), 1)
    max_bytes = max(int(2 * slack * int(size_bytes.sum()) / world.world_size), 1)
    partitioner = capped(inner, max_tokens=max_tokens, max_bytes=max_bytes)
    try:
        owner = validate_plan(partitioner(world), world)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "max_" in message or "no plan within the budget" in message
        return
    assert rank_loads(owner, tokens, world.world_size).max() <= max_tokens
    assert rank_loads(owner, size_bytes, world.world_size).max() <= max_bytes
    assert torch.equal(partitioner(world), owner)


@given(world=worlds(), inner=st.sampled_from(INNER))
@settings(max_examples=100, deadline=None)
def test_a_budget_with_room_for_the_largest_sample_beside_the_mean_is_always_kept(
    world: WorldSamples, inner: Partitioner
) -> None:
    tokens = world.uih_lengths
    longest = int(tokens.max()) if len(tokens) else 0
    budget = int(tokens.sum()) // world.world_size + longest + 1
    owner = capped(inner, max_tokens=budget)(world)
    assert rank_loads(owner, tokens, world.world_size).max() <= budget


def test_a_plan_within_the_budget_is_left_alone() -> None:
    world = Cluster(world_size=8, batch_size=16).batch(0)
    assert torch.equal(capped(greedy_batch_size, max_tokens=10**9)(world), greedy_batch_size(world))


def test_only_what_exceeds_the_budget_moves() -> None:
    world = WorldSamples(3, torch.tensor([0, 0, 0, 1, 2]), torch.tensor([5, 4, 3, 2, 1]))
    assert capped(as_loaded, max_tokens=9)(world).tolist() == [0, 0, 2, 1, 2]


def test_infeasible_budgets_give_the_numbers() -> None:
    world = WorldSamples(2, torch.tensor([0, 1, 1]), torch.tensor([6, 6, 6]))
    with pytest.raises(ValueError, match="sample 0 has 6 tokens; max_tokens=5"):
        capped(greedy_batch_size, max_tokens=5)(world)
    with pytest.raises(ValueError, match="has 18 tokens; max_tokens=8 allows 16 on 2 ranks"):
        capped(greedy_batch_size, max_tokens=8)(world)
    with pytest.raises(ValueError, match="found no plan within the budget: 18 tokens of at most 10 x 2 = 20"):
        capped(greedy_batch_size, max_tokens=10)(world)
    with pytest.raises(ValueError, match="has 144 bytes; max_bytes=50"):
        capped(greedy_batch_size, max_bytes=50)(world)


@given(world=worlds(), inner=st.sampled_from(INNER), group_size=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_samples_stay_in_their_group_of_ranks(world: WorldSamples, inner: Partitioner, group_size: int) -> None:
    owner = validate_plan(grouped(inner, group_size)(world), world)
    assert torch.equal(owner // group_size, world.rank // group_size)


def test_the_last_group_is_smaller_when_the_size_does_not_divide_the_world() -> None:
    seen = []

    def spy(world: WorldSamples) -> Tensor:
        seen.append((world.first_rank, world.world_size, world.rank.tolist(), world.uih_lengths.tolist()))
        return world.rank

    world = WorldSamples(5, torch.tensor([0, 1, 2, 4, 4]), torch.tensor([1, 2, 3, 4, 5]))
    assert torch.equal(grouped(spy, 2)(world), world.rank)
    assert seen == [(0, 2, [0, 1], [1, 2]), (2, 2, [0], [3]), (4, 1, [0, 0], [4, 5])]


def test_a_group_sees_its_own_measurements_candidates_and_columns() -> None:
    seen: list[WorldSamples] = []

    def spy(world: WorldSamples) -> Tensor:
        seen.append(world)
        return world.rank

    measured = WorldSamples(4, torch.tensor([0, 3, 2]), torch.tensor([7, 8, 9]))
    world = WorldSamples(
        4,
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([1, 2, 3, 4]),
        num_candidates=torch.tensor([1, 0, 2, 1]),
        candidate_lengths=torch.tensor([10, 20, 30, 40]),
        seconds=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        seconds_step=torch.tensor([5, 5, 6, 6]),
        measured=measured,
        gathered={"user": torch.tensor([9, 8, 7, 6])},
    )
    grouped(spy, 2)(world)
    second = seen[1]
    assert second.candidate_lengths.tolist() == [20, 30, 40]
    assert second.seconds_step.tolist() == [6, 6]
    assert second.seconds.tolist() == pytest.approx([0.3, 0.4])
    assert second.measured is not None
    assert (second.measured.rank.tolist(), second.measured.uih_lengths.tolist()) == ([1, 0], [8, 9])
    assert second.gathered["user"].tolist() == [7, 6]


@given(world=worlds(), inner=st.sampled_from(INNER))
@settings(max_examples=150, deadline=None)
def test_samples_of_a_key_stay_on_one_rank(world: WorldSamples, inner: Partitioner) -> None:
    owner = validate_plan(keep_together(inner, "session")(world), world)
    for key in world.gathered["session"].unique():
        assert len(owner[world.gathered["session"] == key].unique()) == 1


def test_a_unit_costs_the_sum_of_its_samples_costs_and_not_the_cost_of_their_sum() -> None:
    session = torch.tensor([0, 0, 0, 0, 1, 2])
    world = WorldSamples(
        2, torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([5, 5, 5, 5, 10, 1]), gathered={"s": session}
    )
    given: list[list[float]] = []

    class Shown(GreedyBatchSize):
        def plan(self, world: WorldSamples) -> Ints:
            assert world.cost is not None
            given.append(world.cost.tolist())
            return super().plan(world)

    for cost in (lambda world: world.uih_lengths.double(), lambda world: world.uih_lengths.double() ** 2):
        owner = keep_together(Shown(cost=cost), "s")(world)
        assert len(owner[:4].unique()) == 1
    assert given == [[20.0, 10.0, 1.0], [100.0, 100.0, 1.0]]


def test_a_unit_is_at_home_where_most_of_its_bytes_are() -> None:
    world = WorldSamples(
        3,
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([1, 1, 1, 1]),
        payload_bytes=torch.tensor([50, 30, 30, 10]),
        gathered={"session": torch.tensor([4, 4, 4, 9])},
    )
    assert keep_together(as_loaded, "session")(world).tolist() == [1, 1, 1, 2]


def test_merged_units_keep_candidates_and_totals() -> None:
    seen: list[WorldSamples] = []

    def spy(world: WorldSamples) -> Tensor:
        seen.append(world)
        return world.rank

    world = WorldSamples(
        2,
        torch.tensor([0, 0, 1]),
        torch.tensor([1, 2, 4]),
        num_candidates=torch.tensor([1, 2, 1]),
        candidate_lengths=torch.tensor([10, 20, 30, 40]),
        gathered={"session": torch.tensor([7, 8, 7])},
    )
    keep_together(spy, "session")(world)
    assert seen[0].uih_lengths.tolist() == [5, 2]
    assert seen[0].num_candidates.tolist() == [2, 2]
    assert seen[0].candidate_lengths.tolist() == [10, 40, 20, 30]


def test_a_missing_or_wrong_key_column_is_named() -> None:
    world = WorldSamples(2, torch.tensor([0, 1]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r'pass gather=\("session_id",\)'):
        keep_together(greedy_batch_size, "session_id")(world)
    floats = WorldSamples(2, world.rank, world.uih_lengths, gathered={"x": torch.tensor([0.5, 1.5])})
    with pytest.raises(ValueError, match=r'"x" must hold one integer a sample, got torch.float32'):
        keep_together(greedy_batch_size, "x")(floats)


def test_wrappers_nest_and_tell_what_they_need() -> None:
    nested = keep_together(capped(grouped(home_batch_size(cost=CostModel()), 4), max_tokens=10**7), "session")
    assert nested.gather == ("session",)
    assert "rank_speed" in nested.state_dict()
    cluster = Cluster(world_size=8, batch_size=16)
    world = cluster.batch(0)
    session = torch.arange(world.num_samples) // 2
    world = WorldSamples(8, world.rank, world.uih_lengths, gathered={"session": session})
    owner = validate_plan(nested(world), world)
    assert torch.equal(owner // 4, world.rank // 4)
    assert torch.equal(owner[::2], owner[1::2])
    assert straggler_percentage(rank_loads(owner, world.uih_lengths, 8)) < straggler_percentage(
        rank_loads(world.rank, world.uih_lengths, 8)
    )


def test_keep_together_has_to_be_outermost() -> None:
    together = keep_together(greedy_batch_size, "session")
    for wrap in (
        lambda: capped(together, max_tokens=1),
        lambda: grouped(together, 2),
        lambda: keep_together(together, "x"),
    ):
        with pytest.raises(ValueError, match="put keep_together outermost"):
            wrap()


def test_wrong_limits_are_named() -> None:
    with pytest.raises(ValueError, match="max_tokens, max_bytes or both"):
        capped(greedy_batch_size)
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        capped(greedy_batch_size, max_bytes=0)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        grouped(greedy_batch_size, 0)


def test_what_a_wrapped_partitioner_returns_is_checked() -> None:
    world = WorldSamples(2, torch.tensor([0, 1]), torch.tensor([1, 2]))
    wrong = [capped(lambda world: world.rank + 5, max_tokens=9), grouped(lambda world: world.rank + 5, 2)]
    for partitioner in wrong:
        with pytest.raises(ValueError, match=r"in \[0, 2\), got 5 for sample 0"):
            partitioner(world)


def test_groups_take_batches_whose_candidates_are_counted_by_another_column_than_the_nested_one() -> None:
    content = Column(torch.arange(9), (torch.tensor([2, 2]), torch.tensor([1, 2, 3, 3])))
    shown = Column(torch.arange(3), (torch.tensor([1, 2]),))
    batch = JaggedBatch({"uih": Column(torch.arange(6), (torch.tensor([4, 2]),)), "shown": shown, "content": content})
    loader = balance([batch], connect("local"), "uih", grouped(as_loaded, 1), candidates="shown")
    assert [len(each["uih"].values) for each in loader] == [6]
