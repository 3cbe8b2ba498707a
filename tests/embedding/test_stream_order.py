"""Work that tables put on streams of a GPU is ordered where it has to be, as a model of streams on the CPU shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_model import ModelStream, ModelTransport, StreamModel, calls, model_of_streams
from torch import Tensor, nn

from freescale.embedding import Adam, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table, prioritize
from freescale.embedding.device_arrays import Upload
from freescale.transport import connect

from embedding_runs import Data, loss_of

TABLES = [Table("item", 60, 4, ["clicked", "shown"]), Table("user", 9, 2)]
STEPS = 16


def train(
    model: StreamModel, ahead: int = 2, after_step: Callable[[Any, int], object] = lambda *_: None
) -> Counter[str]:
    """Train on the model's streams; gives the calls of a step, by this thread, once all is under way."""
    host = connect("local", timeout_s=20)
    device = ModelTransport(host.channel("device"), model)
    rules: dict[str, Any] = {"item": RowwiseAdagrad(lr=0.1), "user": Adam(lr=0.1)}
    tables = PrioritizedEmbeddingCollection(TABLES, host, optimizer=rules, urgent=device, background=device)
    tables._engine.device = torch.device("cuda", 0)  # weights stay in host memory, where the model sees them
    data, prefetched, counted = Data(TABLES, steps=STEPS, num_ids=12, collision=0.3), 1, Counter[str]()
    try:
        with model:
            for step in range(STEPS):
                while prefetched <= min(step + ahead, STEPS - 1):
                    tables.prefetch(data.batch(0, prefetched))
                    prefetched += 1
                calls.clear()
                loss_of(tables(data.batch(0, step)), step).backward()
                counted = Counter(calls) if step == STEPS // 2 else counted
                after_step(tables, step)
            tables.flush()
        model.finish()
    finally:
        tables.close()
        host.close()
    return counted


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_all_that_a_step_does_is_ordered_and_its_memory_is_kept(ahead: int) -> None:
    with model_of_streams() as model:
        train(model, ahead)
        assert model.faults == []


def test_evaluations_checkpoints_and_resets_between_steps_are_ordered_too() -> None:
    def look(tables: PrioritizedEmbeddingCollection, step: int) -> None:
        if step % 5 == 2:
            tables.eval()
            tables({"clicked": torch.tensor([3, 4]), "shown": torch.tensor([5]), "user": torch.tensor([1])})
            tables.train()
        if step % 5 == 3:
            tables.state_dict()

    with model_of_streams() as model:
        train(model, 2, look)
        assert model.faults == []


def test_forwards_without_a_backward_are_ordered() -> None:
    with model_of_streams() as model:
        host = connect("local", timeout_s=20)
        device = ModelTransport(host.channel("device"), model)
        tables = PrioritizedEmbeddingCollection(TABLES, host, optimizer=Sgd(lr=0.1), urgent=device, background=device)
        tables._engine.device = torch.device("cuda", 0)
        data = Data(TABLES, steps=12, num_ids=12, collision=0.5)
        with model:
            for step in range(11):
                tables.prefetch(data.batch(0, step + 1))
                loss = loss_of(tables(data.batch(0, step)), step)
                if step % 3:
                    loss.backward()
            tables.flush()
        model.finish()
        tables.close()
        assert model.faults == []


class TwoLookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.Embedding(40, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        total: Tensor = self.pages(batch["uih"]).sum() * self.pages(batch["candidates"]).sum()
        return total.square()


def test_swapped_modules_of_two_lookups_are_ordered() -> None:
    with model_of_streams() as model:
        host = connect("local", timeout_s=20)
        device = ModelTransport(host.channel("device"), model)
        ids, rule = {"pages": ["uih", "candidates"]}, RowwiseAdagrad(lr=0.1)
        swapped: Any = prioritize(TwoLookups(), host, optimizer=rule, ids=ids, urgent=device, background=device)
        tables = swapped.prioritized_embeddings
        tables._engine.device = torch.device("cuda", 0)
        batches = [{name: torch.randint(0, 40, (9,)) for name in ("uih", "candidates")} for _ in range(12)]
        with model:
            for step, batch in enumerate(batches[:-1]):
                tables.prefetch(batches[step + 1])
                swapped(batch).backward()
            tables.flush()
        model.finish()
        tables.close()
        assert model.faults == []


@pytest.mark.parametrize("turn", range(3))
def test_waits_that_are_left_out_are_noticed(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh, so that each wait of a step is left out in some step."""
    waits = iter(range(10**6))
    real = ModelStream.wait_event

    def sometimes(stream: ModelStream, event: Any) -> None:
        if next(waits) % 7 != turn:
            real(stream, event)

    with model_of_streams() as model:
        monkeypatch.setattr(ModelStream, "wait_event", sometimes)
        train(model)
        assert model.faults


@pytest.mark.parametrize("left_out", ["index arrays", "tensors"])
def test_memory_that_is_not_kept_for_a_stream_is_noticed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of_streams() as model:
        if left_out == "tensors":
            monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
        else:
            monkeypatch.setattr(Upload, "use", lambda upload, stream=None: None)
        train(model)
        assert model.faults


def test_a_step_makes_few_calls_of_the_runtime() -> None:
    """Two groups of tables. Each such call takes a host some microseconds, with Python around it."""
    with model_of_streams() as model:
        counted = train(model)
        assert counted["wait"] <= 17
        assert counted["record"] <= 12
        assert counted["record_stream"] <= 17
        assert counted["current_stream"] <= 11
