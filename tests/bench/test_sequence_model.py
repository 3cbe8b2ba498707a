"""The demo's model: attention against a loop by hand, losses that do not depend on how samples are split over ranks."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from freescale.balancer import JaggedBatch, read_parquet
from freescale.bench.demo_rank import Settings, Trainer
from freescale.bench.roles import Roles, infer_roles
from freescale.bench.sequence_model import JaggedAttention, SequenceModel
from freescale.bench.synthetic import write_synthetic
from freescale.transport import local_group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_synthetic(tmp_path / "data.parquet", 12, 2, length_scale=0.002)
    return tmp_path / "data.parquet"


def _batches(path: Path, batch_size: int) -> list[JaggedBatch]:
    return list(read_parquet(path, batch_size))


def _settings(path: Path, roles: Roles) -> Settings:
    return Settings(str(path), None, roles, 1, 4, "greedy_batch_size", "mpi", seed=0)


def test_attention_is_causal_and_stays_inside_its_segment() -> None:
    torch.manual_seed(0)
    attention = JaggedAttention(width=8, num_heads=2)
    lengths = torch.tensor([0, 3, 1, 0, 5])
    tokens = torch.randn(9, 8)
    expected: list[Tensor] = []
    start = 0
    for length in lengths.tolist():
        heads = attention.project_in(tokens[start : start + length]).view(length, 3, 2, 4)
        for i in range(length):
            row = []
            for head in range(2):
                query, keys, values = heads[i, 0, head], heads[: i + 1, 1, head], heads[: i + 1, 2, head]
                row.append(((keys @ query) / math.sqrt(4)).softmax(0) @ values)
            expected.append(attention.project_out(torch.cat(row)))
        start += length
    torch.testing.assert_close(attention(tokens, lengths), torch.stack(expected))


def test_attention_over_nothing_gives_nothing() -> None:
    assert JaggedAttention(8, 2)(torch.zeros(0, 8), torch.zeros(3, dtype=torch.int64)).shape == (0, 8)


@pytest.mark.parametrize("next_item", [False, True])
def test_scores_do_not_depend_on_the_batch_a_sample_is_in(path: Path, next_item: bool) -> None:
    roles = Roles("uih_page") if next_item else infer_roles(path)
    model = SequenceModel(roles)
    whole = [model(batch) for batch in _batches(path, 6)]
    parts = [model(batch) for batch in _batches(path, 1)]
    for index in range(2):
        torch.testing.assert_close(torch.cat([w[index] for w in whole]), torch.cat([p[index] for p in parts]))
    assert [model.num_items(batch) for batch in _batches(path, 6)] == [len(logits) for logits, _ in whole]


@pytest.mark.parametrize("candidates", [None, "item"])
def test_a_label_of_one_number_a_row_gives_one_score_a_sample(candidates: str | None) -> None:
    histories = pa.array([[5, 6], [], [9], [5, 6]], pa.list_(pa.int64()))
    batch = JaggedBatch.from_arrow(
        pa.table({"uih": histories, "item": [1, 2, 3, 4], "label": [True, False, True, True]})
    )
    model = SequenceModel(Roles("uih", candidates=candidates, label="label"))
    logits, labels = model(batch)
    assert labels.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert logits.shape == (4,)
    assert model.num_items(batch) == 4
    assert torch.isclose(logits[0], logits[3]).item() == (candidates is None), (
        "the same history, with another candidate or none"
    )
    assert not torch.isclose(logits[0], logits[2])
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_last_item_is_hidden_from_the_model_that_is_to_tell_it() -> None:
    model = SequenceModel(Roles("uih"))
    history, lengths = model._history(_history([[5, 6, 7], [], [9]]))
    other, _ = model._history(_history([[5, 6, 8], [], [9]]))
    assert lengths.tolist() == [2, 0, 0]
    assert torch.equal(history, other)
    logits, labels = model(_history([[5, 6, 7], [], [9]]))
    assert labels.tolist() == [1.0, 0.0] * 3
    assert not torch.equal(logits[:2], model(_history([[5, 6, 8], [], [9]]))[0][:2])


def _history(rows: list[list[int]]) -> JaggedBatch:
    return JaggedBatch.from_arrow(pa.table({"uih": pa.array(rows, pa.list_(pa.int64()))}))


def test_ranks_with_unequal_batches_take_the_step_of_one_process(path: Path) -> None:
    settings = _settings(path, infer_roles(path))
    first, _ = _batches(path, 6)
    shares = [first.take(torch.tensor(rows, dtype=torch.int64)) for rows in ([0, 1, 2, 3, 4], [5], [])]
    trainers = [Trainer(settings, transport) for transport in local_group(3, timeout_s=10)]
    alone = Trainer(settings, local_group(1)[0])
    items = alone.model.num_items(first)

    def step(trainer: Trainer, share: JaggedBatch) -> float:
        return trainer.step(share, scale=3 / items)[1]

    with ThreadPoolExecutor(3) as threads:
        losses = list(threads.map(step, trainers, shares))
    _, loss = alone.step(first, scale=1 / items)
    assert losses == pytest.approx([loss] * 3)
    logits, labels = Trainer(settings, local_group(1)[0]).model(first)
    assert loss == pytest.approx(binary_cross_entropy_with_logits(logits, labels).item())
    for trainer in trainers:
        for ours, expected in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-7)


def test_ranks_hold_the_same_bits_after_a_step(path: Path) -> None:
    settings = _settings(path, infer_roles(path))
    batches = _batches(path, 4)

    trainers = [Trainer(settings, transport) for transport in local_group(3, timeout_s=10)]

    def weights(trainer: Trainer) -> list[Tensor]:
        trainer.step(batches[trainer.transport.rank], scale=0.1)
        return list(trainer.model.parameters())

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(weights, trainers)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
