"""The staged pipeline on a GPU: right values under load, no waiting host, seconds by events."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.balancer import CostModel, Report, StagedPipeline, attach, balance, greedy_batch_size
from freescale.transport import Transport, connect

from rank_threads import run_in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning"),
    pytest.mark.timeout(60),
]

SIZE, NUM_IDS = 64, 50_000


def batch_of(step: int, rank: int = 0) -> dict[str, Any]:
    """Ids that tell the step: a batch that is read before it was copied, or after it was freed, shows."""
    lengths = torch.full((SIZE,), NUM_IDS // SIZE)
    ids = torch.full((int(lengths.sum()),), step + 1) + 1000 * rank
    keyed = KeyedJaggedTensor(["page"], ids, lengths=lengths)
    return {
        "keyed": keyed,
        "label": torch.full((SIZE,), float(step + 1 + 1000 * rank)),
        "rank": torch.full((SIZE,), rank),
    }


class Batches:
    def __init__(self, num_batches: int, rank: int = 0) -> None:
        self.num_batches, self.rank = num_batches, rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (batch_of(step, self.rank) for step in range(self.num_batches))


class Model(nn.Module):
    """Compares the two columns of a batch, after enough work that the host runs ahead; takes nothing to the host."""

    def __init__(self, work: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, 1024, device="cuda") / 1024)
        self.work = work
        self.errors = torch.zeros((), device="cuda")

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden: Tensor = self.weight
        for _ in range(self.work):
            hidden = hidden @ self.weight
        ids = batch["keyed"].values().view(SIZE, -1).double()
        with torch.no_grad():
            self.errors += (ids.mean(1) != batch["label"]).sum()
        loss: Tensor = hidden.sum() * 0 + (self.weight[0, 0] * batch["label"]).sum()
        return loss


def run(pipeline: StagedPipeline, iterator: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        pipeline.progress(iterator)


@pytest.mark.parametrize("pin", [False, True])
def test_every_batch_is_whole_when_its_turn_comes(pin: bool) -> None:
    model = Model(work=20)
    loader = balance(Batches(40), connect("local"), "keyed.page", pin_memory=pin)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    seen: list[Tensor] = []
    pipeline = StagedPipeline(model, optimizer, loader, metrics=lambda o, b, r: seen.append(b["label"][0].clone()))
    assert pipeline.device.type == "cuda"
    iterator = iter(loader)
    run(pipeline, iterator, 40)
    torch.cuda.synchronize()
    assert int(model.errors) == 0
    assert [int(label) for label in seen] == list(range(1, 41))


def test_the_host_never_waits_for_the_device() -> None:
    model = Model(work=5)
    timed = greedy_batch_size(cost=CostModel())
    loader = balance(Batches(12), connect("local"), "keyed.page", timed, pin_memory=True)
    pipeline = StagedPipeline(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
    iterator = iter(loader)
    run(pipeline, iterator, 4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype, it says
            torch.cuda.set_sync_debug_mode("error")
        run(pipeline, iterator, 6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run(pipeline, iterator, 2)
    torch.cuda.synchronize()
    assert int(model.errors) == 0


def test_seconds_are_those_of_the_device() -> None:
    told: list[tuple[float, int | None]] = []
    model = Model(work=60)
    loader = balance(Batches(12), connect("local"), "keyed.page", greedy_batch_size(cost=CostModel()))
    loader.record_seconds = lambda seconds, step=None: told.append((seconds, step))  # type: ignore[method-assign]
    pipeline = StagedPipeline(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
    iterator = iter(loader)
    run(pipeline, iterator, 6)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run(pipeline, iterator, 6)
    end.record()
    torch.cuda.synchronize()
    measured = begin.elapsed_time(end) / 6e3
    pipeline._finish(None, pipeline._stage((batch_of(0)), None))  # collects what is known by now
    assert [step for _, step in told] == list(range(12))
    late = sum(seconds for seconds, _ in told[6:]) / 6
    assert 0.5 * measured < late <= 1.05 * measured


def test_a_grad_scaler_and_a_loss_of_the_report_work_on_the_device() -> None:
    plain, scaled = Model(), Model()

    def loss_of(output: Tensor, batch: dict[str, Any], report: Report | None) -> Tensor:
        assert report is not None
        return output * report.loss_scale()

    for model, scaler in ((plain, None), (scaled, torch.amp.GradScaler("cuda", init_scale=1024.0))):
        loader = balance(Batches(6), connect("local"), "keyed.page")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        assert len(list(StagedPipeline(model, optimizer, loader, loss_fn=loss_of, grad_scaler=scaler))) == 6
    assert torch.equal(plain.weight, scaled.weight)


def test_hooks_work_where_backward_has_a_thread_of_its_own() -> None:
    def train(transport: Transport) -> tuple[int, list[int]]:
        model = Model(work=3)
        loader = balance(Batches(8, transport.rank), transport, "keyed.page")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        steps = []
        with attach(loader, model, optimizer):
            for batch in loader:
                keyed = batch["keyed"].to("cuda")
                model({"keyed": keyed, "label": batch["label"].cuda()}).backward()
                optimizer.step()
                steps.append(len(batch["label"]))
        return int(model.errors), steps

    assert run_in_threads(2, train) == [(0, [SIZE] * 8)] * 2
