"""Training on several ranks equals plain training of the whole tables in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.embedding import Adam, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table

from embedding_runs import Data, loss_of, shard_of, train
from rank_threads import run_in_threads

TABLES = [Table("item", 50, 6, ["clicked", "shown"]), Table("user", 3, 6, padding_idx=1)]
STEPS = 15


def whole_tables(data: Data, optimizer: Any, world_size: int, divisor: int) -> dict[str, Tensor]:
    """Dense tables, dense gradients; only rows that a step touches are updated, with the step count of all steps."""
    start = run_in_threads(1, lambda t: shard_of(PrioritizedEmbeddingCollection(TABLES, t, optimizer=optimizer)))[0]
    weights = {table.name: start[table.name].requires_grad_() for table in TABLES}
    states: dict[str, list[Tensor]] = {name: [torch.zeros(()), torch.zeros(())] for name in weights}
    for step in range(data.steps):
        touched = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in weights.items()}
        for rank in range(world_size):
            batch = data.batch(rank, step)
            outputs = {}
            for table in TABLES:
                for feature in table.features:
                    ids = batch[feature]
                    outputs[feature] = torch.nn.functional.embedding(ids, weights[table.name], table.padding_idx)
                    touched[table.name][ids] = True
            loss_of(outputs, step).backward()
        rate = 0.05 / (1 + 0.1 * step)
        for name, weight in weights.items():
            assert weight.grad is not None
            new = _step(optimizer, weight.detach(), weight.grad / divisor, states[name], rate, step + 1, touched[name])
            weight.data, weight.grad = new, None
    return {name: weight.detach() for name, weight in weights.items()}


def _step(
    optimizer: Any, weight: Tensor, gradient: Tensor, states: list[Tensor], rate: float, step: int, touched: Tensor
) -> Tensor:
    """The textbook's formulas."""
    if isinstance(optimizer, Sgd):
        return weight - rate * gradient
    if isinstance(optimizer, RowwiseAdagrad):
        states[0] = states[0] + gradient.square().mean(1)
        return weight - rate * gradient / (states[0].sqrt() + optimizer.eps)[:, None]
    first = optimizer.beta1 * states[0] + (1 - optimizer.beta1) * gradient
    second = optimizer.beta2 * states[1] + (1 - optimizer.beta2) * gradient.square()
    mean, power = first / (1 - optimizer.beta1**step), second / (1 - optimizer.beta2**step)
    new = weight - rate * mean / (power.sqrt() + optimizer.eps)
    states[0], states[1] = (
        torch.where(touched[:, None], one, old) for one, old in ((first, states[0]), (second, states[1]))
    )
    return torch.where(touched[:, None], new, weight)


@pytest.mark.parametrize("gradient_division", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "optimizer", [Sgd(0.05), RowwiseAdagrad(0.05), Adam(0.05)], ids=lambda each: type(each).__name__
)
def test_ranks_together_train_as_one_process(optimizer: Any, world_size: int, gradient_division: bool) -> None:
    data = Data(TABLES, steps=STEPS)
    divisor = world_size if gradient_division else 1
    options: dict[str, Any] = {"optimizer": optimizer, "gradient_division": gradient_division}
    results = run_in_threads(world_size, lambda t: train(t, data, **options))
    for name, expected in whole_tables(data, optimizer, world_size, divisor).items():
        found = torch.cat([result.weights[-1][name] for result in results])
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
