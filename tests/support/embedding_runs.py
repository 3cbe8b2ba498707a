"""Trains small tables on rank threads: batches whose collisions are known, and what is compared between two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.embedding import PrioritizedEmbeddingCollection, Table
from freescale.transport import Transport

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Data:
    """Batches for every rank and step.

    Attributes:
        tables: The tables.
        steps: Number of batches.
        num_ids: Ids of a feature, about; uneven on purpose.
        collision: Share of ids that the batch before has, too.
        empty: Ranks that have no ids in every third batch.
    """

    tables: Sequence[Table]
    steps: int = 30
    num_ids: int = 24
    collision: float = 0.25
    empty: Sequence[int] = ()
    seed: int = 0

    def batch(self, rank: int, step: int) -> Batch:
        """Ids of one rank: from the half of the tables that is the step's own, or from the part that all share."""
        made: Batch = {}
        for t, table in enumerate(self.tables):
            for f, feature in enumerate(table.features):
                generator = torch.Generator().manual_seed(hash((self.seed, rank, step, t, f)) % 2**31)
                n = int(torch.randint(self.num_ids // 2, self.num_ids + 1, (), generator=generator))
                n = 0 if rank in self.empty and step % 3 == 1 else n
                made[feature] = self._ids(table.num_embeddings, n, step, generator)
        return made

    def _ids(self, rows: int, n: int, step: int, generator: torch.Generator) -> Tensor:
        shared = max(rows // 8, 1)
        common = torch.randint(0, shared, (n,), generator=generator)
        own = torch.randint(0, max((rows - shared) // 2, 1), (n,), generator=generator)
        own = (shared + own * 2 + step % 2).clamp(max=rows - 1)
        return torch.where(torch.rand(n, generator=generator) < self.collision, common, own)


def loss_of(outputs: dict[str, Any], step: int) -> Tensor:
    """A loss whose gradients depend on rows and step."""
    total = torch.zeros((), device=next(iter(outputs.values())).device)
    for i, name in enumerate(sorted(outputs)):
        rows = outputs[name]
        total = total + (rows * rows).sum() * (0.3 + 0.01 * (step % 7)) + (rows.sum(-1) * (0.1 * i - 0.2)).sum()
    return total


@dataclass
class Trained:
    """What two runs must have in common.

    Attributes:
        weights: Full tables by name; after every step that was asked for, last the end.
        states: Optimizer states alike.
        losses: Of this rank.
    """

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def shard_of(tables: PrioritizedEmbeddingCollection) -> dict[str, Tensor]:
    """Copies of this rank's weights and optimizer state."""
    tables.flush()
    found: dict[str, Tensor] = {}
    for shard in tables._engine.shards:
        for t, table in enumerate(shard.layout.tables):
            found[table.name] = shard.of_table(t, shard.weights).clone()
            for name, state in shard.states.items():
                found[f"{table.name}.{name}"] = shard.of_table(t, state).clone()
    return {name: tensor.cpu() for name, tensor in found.items()}


def assert_equal(ours: Sequence[Trained], theirs: Sequence[Trained]) -> None:
    """The same weights, states and losses, bit for bit, all of them finite; ranks in order."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.stack(one.losses).isfinite().all(), "weights have diverged, so there is nothing to compare"
        assert torch.equal(torch.stack(one.losses), torch.stack(other.losses))
        for left, right in zip(one.weights, other.weights, strict=True):
            assert left.keys() == right.keys()
            for name in left:
                assert left[name].isfinite().all(), name
                assert torch.equal(left[name], right[name]), name


def train(
    transport: Transport,
    data: Data,
    *,
    ahead: int = 1,
    look: Callable[[int], bool] = lambda step: False,
    schedule: bool = True,
    ids_on: str = "cpu",
    rate: float = 0.05,
    **options: Any,
) -> Trained:
    """Train one rank and give back copies of its shard.

    Args:
        transport: This rank's.
        data: The batches.
        ahead: Batches prefetched before a forward; 0 for none.
        look: After which steps to copy the shard.
        schedule: Change the learning rate each step.
        ids_on: Device of the ids.
        rate: Learning rate that the schedule begins with.
        options: Of the collection.
    """
    tables = PrioritizedEmbeddingCollection(data.tables, transport, **options)
    result = Trained()
    prefetched = 1

    def batch_of(step: int) -> Batch:
        return {name: ids.to(ids_on) for name, ids in data.batch(transport.rank, step).items()}

    for step in range(data.steps):
        while prefetched <= min(step + ahead, data.steps - 1):
            tables.prefetch(batch_of(prefetched))
            prefetched += 1
        loss = loss_of(tables(batch_of(step)), step)
        if schedule:
            for group in tables.fused_optimizer.param_groups:
                group["lr"] = rate / (1 + 0.1 * step)
        loss.backward()
        result.losses.append(loss.detach())
        if look(step):
            result.weights.append(shard_of(tables))
    result.weights.append(shard_of(tables))
    tables.close()
    return result
