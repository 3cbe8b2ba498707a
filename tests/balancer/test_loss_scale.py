"""Gradients with `report.loss_scale` equal those of one process that sees the whole global batch."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from freescale.balancer import Column, JaggedBatch, WorldSamples, balance, fixed_batch_size, greedy_batch_size
from freescale.transport import Transport

from rank_threads import run_in_threads

WORLD_SIZE = 3
NUM_PAGES = 40


class Model(nn.Module):
    """Scores candidates against the mean of the history's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pages = nn.Embedding(NUM_PAGES, 4, dtype=torch.float64)
        self.mix = nn.Linear(4, 4, dtype=torch.float64)

    def history(self, batch: JaggedBatch) -> Tensor:
        """One vector a sample; zeros for an empty history."""
        lengths = batch["uih"].levels[0]
        owner = torch.repeat_interleave(torch.arange(batch.batch_size), lengths)
        total = torch.zeros(batch.batch_size, 4, dtype=torch.float64).index_add(
            0, owner, self.pages(batch["uih"].values)
        )
        return torch.tanh(self.mix(total / lengths.clamp(min=1)[:, None]))

    def per_sample(self, batch: JaggedBatch) -> Tensor:
        error: Tensor = self.history(batch).sum(1) - batch["target"].values
        return error.square()

    def per_candidate(self, batch: JaggedBatch) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(batch.batch_size), batch["label"].levels[0])
        scores = (self.history(batch)[owner] * self.pages(batch["candidate"].values)).sum(1)
        return nn.functional.binary_cross_entropy_with_logits(
            scores, batch["label"].values.to(torch.float64), reduction="none"
        )

    def per_token(self, batch: JaggedBatch) -> Tensor:
        mixed: Tensor = self.mix(self.pages(batch["uih"].values))
        return mixed.square().sum(1)


def local_batch(rank: int, step: int) -> JaggedBatch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = [6, 0, 3][rank] if step else [5, 5, 5][rank]
    lengths = torch.randint(0, 12, (size,), generator=generator)
    counts = torch.randint(2, 9, (size,), generator=generator)
    num = int(counts.sum())

    def pages(n: int) -> Tensor:
        return torch.randint(0, NUM_PAGES, (n,), generator=generator)

    return JaggedBatch(
        {
            "target": Column(torch.randn(size, dtype=torch.float64, generator=generator)),
            "uih": Column(pages(int(lengths.sum())), (lengths,)),
            "candidate": Column(pages(num), (counts,)),
            "label": Column((torch.rand(num, generator=generator) < 0.3).to(torch.int8), (counts,)),
        },
        size,
    )


MODEL = Model()  # ranks are threads and torch's random generator is shared: all copy this one

LOSSES: dict[str, tuple[Callable[[Model, JaggedBatch], Tensor], str | None]] = {
    "per sample": (Model.per_sample, None),
    "per candidate": (Model.per_candidate, "label"),
    "per token": (Model.per_token, "uih"),
}


def all_to_the_last(world: WorldSamples) -> Tensor:
    """Leaves two ranks empty."""
    return torch.full((world.num_samples,), WORLD_SIZE - 1)


def gradients(model: Model) -> list[Tensor]:
    """Of the embedding and of the dense parameters; zeros where nothing came."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def averaged_gradients(loss_name: str, partitioner: Callable[[WorldSamples], Tensor], mean: bool) -> list[list[Tensor]]:
    """What data parallelism gives at each step: gradients of each rank's loss, averaged over ranks."""
    loss_of, column = LOSSES[loss_name]

    def run(transport: Transport) -> list[list[Tensor]]:
        batches = [local_batch(transport.rank, step) for step in range(2)]
        result = []
        for batch, report in balance(batches, transport, "uih", partitioner).with_reports():
            model = copy.deepcopy(MODEL)
            per_item = loss_of(model, batch)
            scale = report.loss_scale(column)
            loss = per_item.mean() if mean and len(per_item) else per_item.sum() * scale
            loss.backward()
            result.append(gradients(model))
        return result

    ranks = run_in_threads(WORLD_SIZE, run)
    return [
        [torch.stack(parts).mean(0) for parts in zip(*(rank[step] for rank in ranks), strict=True)] for step in range(2)
    ]


def oracle(loss_name: str) -> list[list[Tensor]]:
    """One process, the whole global batch, the plain mean."""
    loss_of, _ = LOSSES[loss_name]
    result = []
    for step in range(2):
        model = copy.deepcopy(MODEL)
        whole = JaggedBatch.concat([local_batch(rank, step) for rank in range(WORLD_SIZE)])
        loss_of(model, whole).mean().backward()
        result.append(gradients(model))
    return result


@pytest.mark.parametrize("partitioner", [greedy_batch_size, fixed_batch_size, all_to_the_last, lambda w: w.rank])
@pytest.mark.parametrize("loss_name", list(LOSSES))
def test_scaled_sums_give_the_gradients_of_the_global_mean(
    loss_name: str, partitioner: Callable[[WorldSamples], Tensor]
) -> None:
    for got, expected in zip(averaged_gradients(loss_name, partitioner, False), oracle(loss_name), strict=True):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-14)


def test_local_means_do_not_even_at_equal_sample_counts() -> None:
    got, expected = averaged_gradients("per candidate", greedy_batch_size, True)[0], oracle("per candidate")[0]
    errors = [float((g - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)]
    assert max(errors) > 0.02


def test_scales_travel_with_their_batches_however_far_ahead_a_trainer_takes_them() -> None:
    def run(transport: Transport) -> list[tuple[int, float]]:
        sizes = [4, 4, 1] if transport.rank else [4, 2]
        batches = [{"x": torch.ones(n), "length": torch.full((n,), 3)} for n in sizes]
        scaled = balance(batches, transport, "length").with_loss_scale()
        assert not hasattr(scaled, "__len__"), "a rank's own number of batches is not the number of steps"
        ahead = list(scaled)
        again = list(scaled)  # another epoch
        assert [scale for _, scale in ahead] == [scale for _, scale in again] == [2 / 8, 2 / 6, 2 / 1]
        return [(len(batch["x"]), scale) for batch, scale in ahead]

    for steps in zip(*run_in_threads(2, run), strict=True):
        assert sum(size * scale for size, scale in steps) == pytest.approx(2)
