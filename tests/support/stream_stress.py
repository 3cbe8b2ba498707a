"""Trains with random delays on every stream and poison in free buffers: the weights are those of the plain order.

As a script: `python stream_stress.py STEPS SEED ENGINE…` runs all checks on the ranks it was started on. ENGINE is
"threads-peer", "threads-segment" or "threads-staged" without GPUs, "nccl", "peer", "segment" or "staged" on them.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from freescale.balancer import Column, JaggedBatch, Report, StagedPipeline, balance
from freescale.embedding import Adam, RowwiseAdagrad, Table, prioritize
from freescale.transport import Transport, connect

import device_contract
from embedding_runs import Data, assert_equal, train
from stream_delays import GpuDelays, Poisoning, late_streams, spoiled_when_sent

PAGES, DIM, WIDTH = 90, 32, 16
TIMEOUT_S = 100
Delays = Callable[[], AbstractContextManager[object]]
WINDOW_BYTES = 32 << 10  # so small that transfers go through every slot many times


def check_tables(
    calm: Transport, stressed: Transport, device: str, steps: int, delays: Delays, scribble: Callable[[], None]
) -> None:
    """Tables with two optimizers and batches of very different sizes, two batches ahead."""
    tables = [Table("item", 300, 256, ["clicked", "shown"]), Table("user", 40, 16)]
    data = Data(tables, steps=steps, num_ids=160, collision=0.25, empty=[1])
    optimizer = {"item": RowwiseAdagrad(lr=0.05), "user": Adam(lr=0.05)}
    theirs = train(calm, data, ahead=0, synchronous=True, optimizer=optimizer, device=device)

    def look(step: int) -> bool:
        scribble()
        return False

    with delays():
        ours = train(stressed, data, ahead=2, optimizer=optimizer, device=device, look=look, ids_on=device)
    assert not any(value.isnan().any() for value in ours.weights[-1].values())
    assert_equal([ours], [theirs])


class Batches:
    """Histories of uneven lengths with labels."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps = rank, steps

    def __iter__(self) -> Iterator[JaggedBatch]:
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(1000 * self.rank + step)
            lengths = torch.randint(0, 30, (8,), generator=generator)
            pages = torch.randint(0, PAGES, (int(lengths.sum()),), generator=generator)
            label = torch.rand(8, generator=generator)
            yield JaggedBatch({"uih": Column(pages, (lengths,)), "label": Column(label)})


class Model(nn.Module):
    """A table, and layers whose gradients no rank shares."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.pages = nn.Embedding(PAGES, DIM, _weight=torch.randn(PAGES, DIM, generator=generator))
        self.hidden = nn.Linear(DIM, WIDTH)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.randn(WIDTH, DIM, generator=generator) / DIM)
            self.hidden.bias.zero_()

    def forward(self, batch: JaggedBatch) -> Tensor:
        history, device = batch["uih"], self.hidden.weight.device
        rows = torch.tanh(self.hidden(self.pages(history.values))).sum(1)
        segments = torch.arange(batch.batch_size, device=device).repeat_interleave(
            history.levels[0].to(device), output_size=len(rows)
        )
        return torch.zeros(batch.batch_size, device=device).index_add(0, segments, rows)


def loss_of(scores: Tensor, batch: JaggedBatch, report: Report | None) -> Tensor:
    assert report is not None
    return (torch.tanh(scores) - batch["label"].values).square().sum() * report.loss_scale()


def train_model(host: Transport, tables: Transport, device: str, steps: int, ahead: Callable[[], None] | None) -> Any:
    """Train an epoch and give what became of the weights: in the staged pipeline, or batch by batch."""
    model = prioritize(
        Model().to(device),
        tables.channel("tables"),
        optimizer=RowwiseAdagrad(lr=0.1),
        ids={"pages": ["uih"]},
        synchronous=ahead is None,
    )
    parts: Any = model
    optimizer = torch.optim.SGD(parts.hidden.parameters(), lr=0.05)
    loader = balance(Batches(host.rank, steps), host.channel("balance"), "uih")
    if ahead is None:
        for batch, report in loader.with_reports():
            there = batch.to(torch.device(device))
            loss_of(model(there), there, report).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        for _ in StagedPipeline(model, optimizer, loader, loss_fn=loss_of):
            ahead()
    weights = {name: _here(value) for name, value in model.state_dict().items()}
    parts.prioritized_embeddings.close()
    loader.close()
    return weights


def _here(value: Any) -> Tensor:
    """A copy of this rank's part."""
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().cpu().clone()


def check_pipeline(
    host: Transport,
    calm: Transport,
    stressed: Transport,
    device: str,
    steps: int,
    delays: Delays,
    scribble: Callable[[], None],
) -> None:
    """Balanced batches, prioritized tables and a dense layer, staged."""
    theirs = train_model(host, calm, device, steps, None)
    with delays():
        ours = train_model(host, stressed, device, steps, scribble)
    assert theirs.keys() == ours.keys()
    assert any("pages" in name for name in ours), list(ours)
    for name, value in ours.items():
        assert not value.isnan().any(), name
        assert torch.equal(value, theirs[name]), name


def check(host: Transport, engine: str, steps: int, seed: int) -> None:
    """All checks with one engine."""
    seed = 1000 * seed + host.rank
    delays: Delays = nullcontext
    device, calm, scribble = "cpu", host, _nothing
    with ExitStack() as stack:
        stack.enter_context(spoiled_when_sent())
        if engine.startswith("threads"):
            make = late_streams(seed)
            stack.enter_context(patch.object(device_contract, "HostStreams", lambda delay_s=0.0: make(0)))
            stack.enter_context(patch.object(device_contract, "SMALL_WINDOW", WINDOW_BYTES))
        else:
            index = host.rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
            device, calm = f"cuda:{index}", device_contract.make_transport("process_group", engine, TIMEOUT_S)
            late = GpuDelays(random.Random(seed))
            delays, scribble = late.everywhere, late.scribble
        stressed = Poisoning(device_contract.make_transport("process_group", engine, TIMEOUT_S))
        check_tables(calm.channel("calm"), stressed, device, steps, delays, scribble)
        check_pipeline(host, calm, stressed, device, steps, delays, scribble)


def main(steps: int, seed: int, *engines: str) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)  # and so memory that nobody wrote is NaN
    torch.distributed.init_process_group("gloo")
    host = connect("process_group", timeout_s=TIMEOUT_S)
    for engine in engines:
        check(host, engine, steps, seed)
        print("all passed", engine, flush=True)
    host.all_gather(torch.zeros(1)).wait()
    os._exit(0)


def _nothing() -> None:
    """On the CPU what is freed is spoiled by the C library (MALLOC_PERTURB_)."""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
