"""What is checked of a plan, and worlds that are restricted."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from freescale.balancer.plan import WorldSamples, validate_plan

WORLD = WorldSamples(3, torch.tensor([0, 0, 1, 2]), torch.tensor([5, 0, 7, 1]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_valid_plan_comes_back_as_int64(dtype: torch.dtype) -> None:
    owner = validate_plan(torch.tensor([2, 0, 1, 1], dtype=dtype), WORLD)
    assert owner.dtype == torch.int64
    assert owner.tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize(
    ("owner", "error", "message"),
    [
        ([0, 1, 2, 0], TypeError, r"must return a torch.Tensor, got list"),
        (torch.zeros(4), TypeError, r"integers \(int64\), got torch.float32"),
        (torch.zeros(4, dtype=torch.bool), TypeError, r"integers \(int64\), got torch.bool"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"shape \[4\], one owner a sample, got \[3\]"),
        (torch.zeros(4, 1, dtype=torch.int64), ValueError, r"shape \[4\], one owner a sample, got \[4, 1\]"),
        (torch.tensor([0, 1, 3, 0]), ValueError, r"in \[0, 3\), got 3 for sample 2"),
        (torch.tensor([0, -1, 3, 0]), ValueError, r"in \[0, 3\), got -1 for sample 1"),
    ],
)
def test_a_wrong_plan_is_refused_with_rule_and_value(owner: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        validate_plan(owner, WORLD)


def test_a_world_restricted_to_all_of_itself_is_the_same() -> None:
    same = WORLD.restricted_to(torch.arange(4), range(3))
    assert (same.world_size, same.first_rank) == (3, 0)
    assert torch.equal(same.rank, WORLD.rank)
    assert torch.equal(same.uih_lengths, WORLD.uih_lengths)


def test_lengths_of_another_column_than_the_candidates_belong_to_no_sample() -> None:
    counts = torch.tensor([1, 0, 2, 0])
    world = WorldSamples(3, WORLD.rank, WORLD.uih_lengths, counts, candidate_lengths=torch.tensor([4, 5, 6]))
    assert world.candidate_lengths_of(torch.tensor([2, 0])).tolist() == [5, 6, 4]
    world = WorldSamples(3, WORLD.rank, WORLD.uih_lengths, counts, candidate_lengths=torch.tensor([4, 5, 6, 7]))
    assert world.candidate_lengths_of(torch.tensor([2, 0])).tolist() == []


def test_what_was_measured_is_worked_out_once_and_only_when_it_is_read() -> None:
    made: list[WorldSamples] = []

    def make() -> WorldSamples:
        made.append(WorldSamples(1, torch.tensor([0]), torch.tensor([7])))
        return made[-1]

    world = WorldSamples(1, torch.tensor([0, 0]), torch.tensor([5, 6]), measured=make)
    kept = copy.copy(world)
    assert not made
    assert world.measured is world.measured is made[0]
    assert kept.measured is made[1]
    assert dataclasses.replace(world, first_rank=3).measured is made[0]
    assert WorldSamples(1, torch.tensor([0]), torch.tensor([5])).measured is None
    assert len(made) == 2
