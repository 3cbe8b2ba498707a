"""What tests of the staged pipeline train: batches that tell when they are read, a table that prefetches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from freescale.balancer import Column, JaggedBatch, Report


def batch_of(step: int, rank: int = 0, size: int = 4) -> JaggedBatch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    lengths = torch.randint(0, 9, (size,), generator=generator)
    items = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    ids = torch.arange(size) + 100 * step + 10_000 * rank
    label = torch.rand(size, generator=generator)
    return JaggedBatch({"id": Column(ids), "uih": Column(items, (lengths,)), "label": Column(label)}, size)


class Batches:
    """A plain loader that tells when it is read."""

    def __init__(self, num_batches: int, rank: int = 0, calls: list[str] | None = None) -> None:
        self.num_batches, self.rank, self.calls = num_batches, rank, [] if calls is None else calls

    def __iter__(self) -> Iterator[JaggedBatch]:
        for step in range(self.num_batches):
            self.calls.append(f"load {step}")
            yield batch_of(step, self.rank)


class Table(nn.Module):
    """Pools embeddings; writes down what it is told and asked."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 40).view(20, 2))
        self.calls = calls

    def prefetch(self, upcoming: JaggedBatch) -> None:
        self.calls.append(f"prefetch {int(upcoming['id'].values[0]) % 10_000 // 100}")

    def forward(self, batch: JaggedBatch) -> Tensor:
        self.calls.append(f"forward {int(batch['id'].values[0]) % 10_000 // 100}")
        rows = self.weight[batch["uih"].values]
        segments = torch.repeat_interleave(torch.arange(batch.batch_size), batch["uih"].levels[0])
        return torch.zeros(batch.batch_size, 2).index_add(0, segments, rows)


class Model(nn.Module):
    def __init__(self, calls: list[str] | None = None) -> None:
        super().__init__()
        self.table = Table([] if calls is None else calls)
        self.score = nn.Linear(2, 1)
        with torch.no_grad():
            self.score.weight.copy_(torch.tensor([[0.5, -0.25]]))
            self.score.bias.zero_()

    def forward(self, batch: JaggedBatch) -> dict[str, Tensor]:
        return {"scores": self.score(self.table(batch)).squeeze(1)}


class Sgd(torch.optim.SGD):
    def __init__(self, model: nn.Module, calls: list[str]) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.calls = calls

    def step(self, closure: Any = None) -> Any:
        self.calls.append("step")
        return super().step(closure)


def loss_of(output: dict[str, Tensor], batch: JaggedBatch, report: Report | None) -> Tensor:
    scale = 1 / batch.batch_size if report is None else report.loss_scale()
    return (output["scores"] - batch["label"].values).square().sum() * scale
