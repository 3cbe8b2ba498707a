"""Metrics against sums by hand."""

from __future__ import annotations

import pytest
import torch

from freescale.balancer.metrics import bytes_moved, imbalance, rank_loads, sparsity, straggler_percentage
from freescale.balancer.plan import WorldSamples


@pytest.mark.parametrize(
    ("lengths", "expected"), [([4, 2, 2, 0], 0.5), ([3, 3, 3], 0.0), ([0, 0], 0.0), ([], 0.0), ([1, 9], 1 - 10 / 18)]
)
def test_sparsity_is_the_share_of_padding(lengths: list[int], expected: float) -> None:
    assert sparsity(torch.tensor(lengths, dtype=torch.int32)) == pytest.approx(expected)


def test_sparsity_refuses_what_is_not_a_list_of_lengths() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        sparsity(torch.tensor([2, -1]))
    with pytest.raises(ValueError, match=r"shape \[batch_size\], got \[1, 2\]"):
        sparsity(torch.tensor([[2, 1]]))


def test_straggler_percentage_is_mean_idle_time_over_step_time() -> None:
    seconds = [4.0, 2.0, 3.0, 3.0]
    idle = sum(max(seconds) - own for own in seconds) / len(seconds)
    assert straggler_percentage(torch.tensor(seconds)) == pytest.approx(100 * idle / max(seconds))
    assert straggler_percentage(torch.zeros(3)) == 0
    assert straggler_percentage(torch.tensor([5])) == 0


def test_straggler_percentage_of_several_steps_weighs_them_by_their_time() -> None:
    assert straggler_percentage(torch.tensor([[2.0, 0.0], [8.0, 8.0]])) == pytest.approx(10.0)


def test_imbalance_is_max_over_mean_minus_one() -> None:
    assert imbalance(torch.tensor([6, 2, 4])) == pytest.approx(0.5)
    assert imbalance(torch.zeros(3)) == 0


@pytest.mark.parametrize("wrong", [[], [1.0, -1.0], [1.0, float("nan")], [float("inf")]])
def test_seconds_that_are_none_negative_or_not_finite_are_refused(wrong: list[float]) -> None:
    for metric in (straggler_percentage, imbalance):
        with pytest.raises(ValueError, match="value"):
            metric(torch.tensor(wrong))


def test_loads_and_moved_bytes_are_sums_over_samples() -> None:
    world = WorldSamples(3, torch.tensor([0, 0, 2]), torch.tensor([5, 6, 7]), payload_bytes=torch.tensor([1, 10, 100]))
    owner = torch.tensor([0, 2, 2])
    assert bytes_moved(world, owner) == 10
    assert rank_loads(owner, world.uih_lengths, 3).tolist() == [5.0, 0.0, 13.0]
