"""Balanced batches, prioritized tables, gradient scaling and the staged pipeline together: weights bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freescale.balancer import (
    Column,
    JaggedBatch,
    Partitioner,
    Report,
    StagedPipeline,
    WorldSamples,
    attach,
    balance,
    greedy_batch_size,
)
from freescale.embedding import RowwiseAdagrad, prioritize
from freescale.transport import Transport

from rank_threads import run_in_threads

NUM_PAGES = 50


class Batches:
    """Histories of very different lengths, with labels; one rank has more."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[JaggedBatch]:
        for step in range(8 + self.rank):
            generator = torch.Generator().manual_seed(100 * self.rank + step)
            lengths = torch.randn(6, generator=generator).exp().mul(6).long()
            pages = torch.rand(int(lengths.sum()), generator=generator).square().mul(NUM_PAGES).long()
            label = torch.rand(6, generator=generator)
            yield JaggedBatch({"uih": Column(pages, (lengths,)), "label": Column(label)})


class Model(nn.Module):
    """A table that learns, and a fixed way to read it: nothing but the table needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(NUM_PAGES, 4, generator=torch.Generator().manual_seed(3))  # ranks are threads here
        self.pages = nn.Embedding(NUM_PAGES, 4, _weight=weight)
        self.idle = nn.Parameter(torch.zeros(()))  # for optimizers that want one

    def forward(self, batch: JaggedBatch) -> Tensor:
        history = batch["uih"]
        segments = torch.repeat_interleave(torch.arange(batch.batch_size), history.levels[0])
        total = torch.zeros(batch.batch_size, 4).index_add(0, segments, self.pages(history.values))
        return torch.tanh(total.sum(1)) + self.idle


def loss_of(scores: Tensor, batch: JaggedBatch, report: Report | None) -> Tensor:
    assert report is not None
    return (scores - batch["label"].values).square().sum() * report.loss_scale()


def stay(world: WorldSamples) -> Tensor:
    return world.rank


def train(
    transport: Transport, partitioner: Partitioner, *, synchronous: bool, scaled: bool = False, hooked: bool = False
) -> list[Tensor]:
    """Train an epoch and give the whole table, with the losses of this rank's steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    model = prioritize(
        Model(),
        transport.channel("tables"),
        optimizer=RowwiseAdagrad(lr=0.1),
        ids={"pages": ["uih"]},
        synchronous=synchronous,
        grad_scale=scaler,
    )
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "idle" in n], lr=0.0)
    loader = balance(Batches(transport.rank), transport, "uih", partitioner)
    attachment = attach(loader, model, optimizer) if hooked else None
    losses: list[Tensor] = []
    pipeline = StagedPipeline(
        model,
        optimizer,
        loader,
        loss_fn=loss_of,
        grad_scaler=scaler,
        metrics=lambda scores, batch, report: losses.append(loss_of(scores.detach(), batch, report)),
    )
    assert len(list(pipeline)) == 9
    if attachment is not None:
        attachment.detach()
    weight = model.state_dict()["pages.weight"]
    tables: Any = model.prioritized_embeddings
    tables.close()
    whole = transport.all_gather(weight.contiguous(), [NUM_PAGES // 2] * 2).wait()
    return [whole, torch.stack(losses)]


def run(partitioner: Partitioner, **options: bool) -> list[Tensor]:
    ranks = run_in_threads(2, lambda transport: train(transport, partitioner, **options))
    assert torch.equal(ranks[0][0], ranks[1][0])
    return [ranks[0][0], torch.stack([losses for _, losses in ranks]).mean(0)]


def test_prioritized_and_balanced_is_synchronous_and_balanced_bit_for_bit() -> None:
    weight, losses = run(greedy_batch_size, synchronous=True)
    assert losses[-1] < losses[0]
    for options in ({}, {"scaled": True}, {"hooked": True}):
        other, other_losses = run(greedy_batch_size, synchronous=False, **options)
        assert torch.equal(weight, other), options
        assert torch.equal(losses, other_losses), options


def test_where_samples_are_trained_makes_no_difference_but_rounding() -> None:
    weight, losses = run(stay, synchronous=True)
    other, other_losses = run(greedy_batch_size, synchronous=False)
    assert not torch.equal(weight, Model().pages.weight)
    torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses, other_losses, rtol=1e-5, atol=1e-6)


def test_a_pipeline_may_stop_half_way_and_the_weights_are_those_of_what_it_trained_on() -> None:
    def some(transport: Transport, ahead: bool) -> Tensor:
        model = prioritize(
            Model(), transport.channel("tables"), optimizer=RowwiseAdagrad(lr=0.1), ids={"pages": ["uih"]}
        )
        loader = balance(Batches(transport.rank), transport, "uih")
        if ahead:
            pipeline = StagedPipeline(model, None, loader, loss_fn=loss_of)
            iterator = iter(loader)
            for _ in range(4):
                pipeline.progress(iterator)
        else:
            for step, (batch, report) in enumerate(loader.with_reports()):
                loss_of(model(batch), batch, report).backward()
                if step == 3:
                    break
        loader.close()
        weight: Tensor = model.state_dict()["pages.weight"].clone()
        tables: Any = model.prioritized_embeddings
        tables.close()
        return weight

    ahead = run_in_threads(2, lambda transport: some(transport, ahead=True))
    plain = run_in_threads(2, lambda transport: some(transport, ahead=False))
    assert all(torch.equal(a, b) for a, b in zip(ahead, plain, strict=True))


pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")
