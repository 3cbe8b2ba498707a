"""The kernel that updates rows computes what the optimizers say, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freescale.embedding import Adam, RowwiseAdagrad, Sgd
from freescale.embedding.optimizer import Stamp

OPTIMIZERS = [Sgd(0.1), RowwiseAdagrad(0.1, eps=1e-3), Adam(0.1), Adam(0.1, weight_decay=0.1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 12, 128])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_rows_are_updated_as_the_optimizer_says(
    launched: Any, optimizer: Any, columns: int, dtype: torch.dtype
) -> None:
    from freescale.kernels.update_rows import update_rows

    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(50, columns, generator=generator).to(dtype)
    shapes = [(50, width) if (width := optimizer.width(name, columns)) else (50,) for name in optimizer.states]
    states = [torch.rand(shape, generator=generator) for shape in shapes]
    rows = torch.randperm(50, generator=generator)[:37]
    sums = torch.randn(37, columns, generator=generator)
    stamp = Stamp(lr=0.03, step=3, divisor=3)
    strange = 5
    sums[strange, -1] = float("inf")
    before = [weights[rows].float(), *[state[rows] for state in states]]
    expected = optimizer.apply(before[0], sums / 3 / 4, before[1:], stamp)

    device = torch.device(launched.device)
    moved = [each.to(device) for each in (weights, *states)]
    skipped = torch.zeros((), dtype=torch.int64, device=device)
    numbers = [3.0, 2.0, *optimizer.numbers(stamp)]
    scale = torch.tensor(2.0, device=device)
    update_rows(moved[0], sums.to(device), rows.to(device), moved[1:], numbers, scale, skipped, optimizer.rule)
    assert skipped.item() == 1
    others = torch.ones(50, dtype=torch.bool)
    others[rows] = False
    for old, new, after in zip((weights, *states), moved, expected, strict=True):
        found = new.cpu()
        assert torch.equal(found[others], old[others])
        assert torch.equal(found[rows[strange]], old[rows[strange]])
        fine = torch.arange(37) != strange
        torch.testing.assert_close(
            found[rows][fine], after.to(old.dtype)[fine], rtol=1e-2 if dtype.itemsize == 2 else 2e-6, atol=1e-6
        )
