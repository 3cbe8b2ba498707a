"""Sums in a tree: right, the same bits whatever else is summed, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freescale.kernels.sum_tree import CHUNK, SumTree, plan_tree, sum_tree


def tree_of(counts: list[int], order: Tensor | None = None, device: str = "cpu", rows: Tensor | None = None) -> SumTree:
    total = sum(counts)
    order = torch.arange(total) if order is None else order
    place = None if rows is None else rows.numpy()
    arrays = plan_tree(order.numpy(), np.cumsum([0, *counts]), place)
    rounds = [
        (
            torch.from_numpy(i).to(device),
            torch.from_numpy(o).to(device),
            None if t is None else torch.from_numpy(t).to(device),
        )
        for i, o, t in arrays.rounds
    ]
    return SumTree(arrays.size, arrays.num_scratch, rounds)


def by_hand(rows: list[Tensor], columns: int) -> Tensor:
    """Chunks in order, then chunks of chunks in order."""
    if not rows:
        return torch.zeros(columns)
    while True:
        sums = []
        for start in range(0, len(rows), CHUNK):
            total = torch.zeros(columns)
            for row in rows[start : start + CHUNK]:
                total = total + row
            sums.append(total)
        if len(sums) == 1:
            return sums[0]
        rows = sums


@pytest.mark.parametrize("counts", [[1], [0, 3, 0], [CHUNK, 1, CHUNK + 1], [5 * CHUNK**2 + 7, 2, 0, CHUNK**2 + 1]])
def test_each_row_is_its_own_tree(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(sum(counts), generator=generator)
    values = torch.randn(len(order), 3, generator=generator)
    sums = sum_tree(values, tree_of(counts, order))
    for row, places in enumerate(order.split(counts)):
        assert torch.equal(sums[row], by_hand(list(values[places]), 3))


@pytest.mark.parametrize("columns", [1, 5, 300])
def test_kernels_add_in_the_same_order(launched: Any, columns: int) -> None:
    from freescale.kernels.sum_chunks import sum_rounds

    counts = [1, 0, 2 * CHUNK + 3, 4, CHUNK, CHUNK**2 + 5, 0]
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(sum(counts), generator=generator)
    values = torch.randn(len(order), columns, generator=generator)
    for chosen in (counts, [1, 2, 0, 3]):
        places = order[: sum(chosen)]
        expected = sum_tree(values, tree_of(chosen, places))
        sums = sum_rounds(values.to(launched.device), tree_of(chosen, places, launched.device)).cpu()
        assert torch.equal(sums, expected)


def test_nothing_to_sum_is_zero() -> None:
    assert torch.equal(sum_tree(torch.empty(0, 4), tree_of([0, 0])), torch.zeros(2, 4))
    assert sum_tree(torch.empty(0, 4), tree_of([])).shape == (0, 4)


def test_values_must_be_a_float32_matrix() -> None:
    with pytest.raises(ValueError, match=r"must be a float32 matrix, got torch.float64"):
        sum_tree(torch.ones(2, 2, dtype=torch.float64), tree_of([1, 1]))


def test_sums_go_to_the_rows_that_were_asked_for() -> None:
    counts = [1, 0, 33, 2, 1100, 32, 64]
    generator = torch.Generator().manual_seed(2)
    rows, order = torch.randperm(len(counts), generator=generator), torch.randperm(sum(counts), generator=generator)
    values = torch.randn(sum(counts), 5, generator=generator)
    plain, placed = sum_tree(values, tree_of(counts, order)), sum_tree(values, tree_of(counts, order, rows=rows))
    assert torch.equal(placed[rows], plain)
