"""CostModel: what it learns from seconds, and that partitioners then even out time."""

from __future__ import annotations

import io
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.balancer.metrics import rank_loads
from freescale.balancer.partitioners.constraints import grouped
from freescale.balancer.partitioners.cost import CostModel
from freescale.balancer.partitioners.least_squares import non_negative_least_squares
from freescale.balancer.partitioners.partition import greedy_batch_size, home_batch_size
from freescale.balancer.partitioners.variable import VariableBatchSize
from freescale.balancer.plan import WorldSamples
from freescale.bench.autotune import Cluster, closed_loop

SLOW_AND_QUADRATIC = Cluster(world_size=16, batch_size=64, square=1e-4, delay=3)


class WithoutSpeeds:
    """A cost model of which only the cost of samples is used."""

    def __init__(self) -> None:
        self._model = CostModel()

    def __call__(self, world: WorldSamples) -> Tensor:
        return self._model(world)


def test_with_the_speed_of_ranks_times_become_even_and_without_it_they_stay_23_percent_off() -> None:
    without = closed_loop(greedy_batch_size(cost=WithoutSpeeds()), SLOW_AND_QUADRATIC, steps=60)
    with_speed = closed_loop(greedy_batch_size(cost=CostModel()), SLOW_AND_QUADRATIC, steps=60)
    assert min(without[20:]) > 0.23
    assert max(with_speed[20:]) < 0.05


@pytest.mark.parametrize("name", ["home", "variable"])
def test_every_partitioner_evens_out_time_with_a_model(name: str) -> None:
    partitioner = home_batch_size(cost=CostModel()) if name == "home" else VariableBatchSize(cost=CostModel())
    found = closed_loop(partitioner, Cluster(square=1e-4, delay=2), steps=60)
    assert max(found[20:]) < 0.05


def measurements(step: int, speeds: list[float], terms: tuple[float, float, float, float]) -> WorldSamples:
    random = np.random.default_rng(step)
    world_size = len(speeds)
    counts = torch.from_numpy(random.integers(1, 60, world_size))
    rank = torch.arange(world_size).repeat_interleave(counts)
    lengths = torch.from_numpy(random.integers(0, 3000, len(rank)))
    step_s, item_s, square_s, sample_s = terms
    seconds = step_s + rank_loads(rank, item_s * lengths + square_s * lengths**2 + sample_s, world_size)
    return WorldSamples(
        world_size,
        rank,
        lengths,
        seconds=seconds / torch.tensor(speeds),
        seconds_step=torch.full((world_size,), step),
        measured=WorldSamples(world_size, rank, lengths),
    )


def test_the_terms_and_speeds_that_made_the_seconds_are_found() -> None:
    terms, model = (2e-2, 1e-6, 5e-10, 1e-4), CostModel()
    for step in range(200):
        world = measurements(step, [1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0], terms)
        costs = model(world)
    relative = model.speeds(world) / model.speeds(world)[0]
    assert relative[2] == pytest.approx(0.5, rel=0.02)
    assert [relative[rank].item() for rank in (1, 3, 7)] == pytest.approx([1, 1, 1], rel=0.02)
    scale = model.terms["item"] / terms[1]
    assert model.terms["item_squared"] == pytest.approx(terms[2] * scale, rel=0.1)
    assert model.terms["sample"] == pytest.approx(terms[3] * scale, rel=0.1)
    assert model.terms["step"] == pytest.approx(terms[0] * scale, rel=0.1)
    truth = terms[1] * world.uih_lengths + terms[2] * world.uih_lengths**2 + terms[3]
    assert torch.allclose(costs / costs.sum(), truth.double() / truth.sum(), rtol=0.1)


def test_outliers_hardly_count() -> None:
    terms, model = (0.0, 1e-6, 5e-10, 0.0), CostModel()
    for step in range(200):
        world = measurements(step, [1.0] * 8, terms)
        if step % 10 == 9:
            world.seconds[step % 8] *= 50
        model(world)
    assert model.terms["item_squared"] / model.terms["item"] == pytest.approx(5e-4, rel=0.15)


def test_before_the_first_fit_the_cost_is_the_length() -> None:
    world = WorldSamples(2, torch.tensor([0, 1]), torch.tensor([5, 0]))
    model = CostModel()
    assert model(world).tolist() == [5.0, 0.0]
    assert model.speeds(world).tolist() == [1.0, 1.0]
    assert model.overhead(world) == 0


def test_a_world_seen_twice_counts_once() -> None:
    once, twice = CostModel(), CostModel()
    for step in range(20):
        world = measurements(step, [1.0, 0.7, 1.0, 1.0], (0.0, 1e-6, 0.0, 0.0))
        once(world)
        for _ in range(3):
            twice(world)
    assert all(torch.equal(value, torch.as_tensor(twice.state_dict()[name])) for name, value in tensors(once).items())


def tensors(model: CostModel) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("wrong", [float("nan"), 0.0, float("inf")])
def test_missing_and_impossible_seconds_are_passed_over(wrong: float) -> None:
    model = CostModel()
    for step in range(40):
        world = measurements(step, [1.0, 0.7, 1.0, 1.0], (0.0, 1e-6, 0.0, 0.0))
        world.seconds[1] = wrong if step >= 20 else world.seconds[1]
        model(world)
    speeds = model.speeds(world)
    assert speeds[1] / speeds[0] == pytest.approx(0.7, rel=0.05)


def test_a_rank_that_had_no_samples_teaches_nothing() -> None:
    model = CostModel()
    for step in range(20):
        rank, lengths = torch.tensor([0, 0, 1]), torch.tensor([10, 20, 30])
        seconds = torch.tensor([30e-6, 30e-6, 1e-3], dtype=torch.float64)
        measured = WorldSamples(3, rank, lengths)
        model(WorldSamples(3, rank, lengths, seconds=seconds, seconds_step=torch.full((3,), step), measured=measured))
    assert model.speeds(measured).tolist() == pytest.approx([1, 1, 1], rel=0.01)
    assert model(measured).sum() + 2 * model.overhead(measured) == pytest.approx(60e-6, rel=0.05)


def test_a_restored_model_plans_on_alike_and_the_state_is_left_alone() -> None:
    worlds = [measurements(step, [1.0, 0.7, 1.0, 1.0], (1e-3, 1e-6, 1e-10, 0.0)) for step in range(30)]
    original, restored = greedy_batch_size(cost=CostModel()), greedy_batch_size(cost=CostModel())
    for world in worlds[:20]:
        original(world)
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kept = {name: torch.as_tensor(value).clone() for name, value in state.items()}
    restored.load_state_dict(state)
    for world in worlds[20:]:
        assert torch.equal(original(world), restored(world))
    assert all(torch.equal(torch.as_tensor(state[name]), value) for name, value in kept.items())


def test_groups_learn_the_speed_of_their_own_ranks() -> None:
    cluster = Cluster(world_size=16, batch_size=64, slow_rank=13, delay=1)
    model = CostModel()
    closed_loop(grouped(greedy_batch_size(cost=model), 4), cluster, steps=50)
    world = cluster.batch(0)
    speeds = model.speeds(world)
    assert int(speeds.argmin()) == 13
    assert speeds[13] / speeds[12] == pytest.approx(1 / 1.3, rel=0.03)


def test_too_short_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory must be at least 8 measurements, got 0"):
        CostModel(memory=0)


@given(st.lists(st.lists(st.floats(-2, 2), min_size=3, max_size=3), min_size=6, max_size=6), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_no_point_of_a_grid_beats_the_non_negative_solution(rows: list[list[float]], seed: int) -> None:
    features = np.array(rows)
    squares = features.T @ features + 0.1 * np.eye(3)
    products = features.T @ np.random.default_rng(seed).normal(0, 1, 6)

    def value(x: np.ndarray) -> float:
        return float(x @ squares @ x / 2 - products @ x)

    found = non_negative_least_squares(squares, products)
    assert (found >= 0).all()
    for step in product((-0.05, 0.0, 0.05), repeat=3):
        assert value(found) <= value(np.maximum(found + step, 0)) + 1e-12
