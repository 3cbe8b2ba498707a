"""Rows grouped by owner come out stably, counted per sample."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels import bucketize_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_owners", [1, 3, 256, 257, 40000])
@pytest.mark.parametrize("lengths", [[7, 0, 500, 1], [0], [], [0, 0, 9]], ids=str)
def test_rows_are_grouped_as_python_groups_them(device: str, num_owners: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(num_owners)
    owners = torch.randint(0, num_owners, (sum(lengths),), generator=generator)
    order, counts = bucketize_rows(owners.to(device), num_owners, torch.tensor(lengths, dtype=torch.int64).to(device))
    assert order.tolist() == sorted(range(len(owners)), key=owners.tolist().__getitem__)
    expected = torch.zeros(num_owners, len(lengths), dtype=torch.int64)
    samples = [sample for sample, length in enumerate(lengths) for _ in range(length)]
    for owner, sample in zip(owners.tolist(), samples, strict=True):
        expected[owner, sample] += 1
    assert torch.equal(counts.cpu(), expected)


def test_without_lengths_all_rows_are_one_sample() -> None:
    order, counts = bucketize_rows(torch.tensor([2, 0, 2], dtype=torch.int32), 3)
    assert order.tolist() == [1, 0, 2]
    assert counts.tolist() == [[1], [0], [2]]


@pytest.mark.parametrize(
    ("owners", "num_owners", "lengths", "error", "words"),
    [
        (torch.ones(2), 3, None, TypeError, "owners must be of an integer type"),
        (torch.ones(2, 2).long(), 3, None, ValueError, "owners must have one dimension"),
        (torch.tensor([0, 3]), 3, None, ValueError, "owners must be from 0 to 2, got 0 to 3"),
        (torch.tensor([0, -1]), 3, None, ValueError, "owners must be from 0 to 2, got -1 to 0"),
        (torch.tensor([0, 1]), 0, None, ValueError, "num_owners must be positive"),
        (torch.tensor([0, 1]), 2, torch.tensor([1]), ValueError, r"lengths must add up to the number of owners \(2\)"),
    ],
)
def test_bad_arguments_are_named(
    owners: torch.Tensor, num_owners: int, lengths: torch.Tensor | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        bucketize_rows(owners, num_owners, lengths)
