"""What bench.end_to_end compares: TorchRec's pipelines, each of our techniques alone, and both (section 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingCollection

from ..balancer import BalancedLoader, JaggedBatch, Report, StagedPipeline, WorldSamples, balance, greedy_batch_size
from .embedding_contenders import Recommender, Setup, data_parallel, shard_row_wise
from .end_to_end_batch import HISTORY, Batch, IdsOnHost, Ring, balanced_batch


class ScaledRecommender(Recommender):
    """A `Recommender` whose batches say how the global loss is shared between ranks."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Give this rank's share of the global loss, and the same without its graph."""
        loss = self.tower(self.tables(batch.ids), batch.starts, batch.labels, batch.longest) * batch.scale
        return loss, loss.detach()


class Contender:
    """A model in a pipeline; trains on one ring of batches after the other.

    Args:
        setup: What all contenders share.
        model: What is trained.
        pipeline: Has `progress(iterator)`.
        is_balanced: Whether batches are balanced.
        prepares: Whether the pipeline itself makes batches of what a balanced loader gives.

    Attributes:
        waited_s: How long each balanced batch was waited for, since `use`.
    """

    def __init__(self, setup: Setup, model: nn.Module, pipeline: Any, *, is_balanced: bool, prepares: bool) -> None:
        self.model, self._setup, self._pipeline = model, setup, pipeline
        self._is_balanced, self._prepares = is_balanced, prepares
        self._iterator: Iterator[Any] | None = None
        self.loader: BalancedLoader[JaggedBatch] | None = None
        self.waited_s: list[float] = []

    def use(self, ring: Ring) -> None:
        """Train on other batches from now on. Collective."""
        self.leave()
        self.waited_s = []
        if not self._is_balanced:
            self._iterator = ring.ready()
            return
        on_gpu = self._setup.device.type == "cuda"
        by_operations = greedy_batch_size(cost=Operations(self._setup.width))
        self.loader = balance(ring, self._setup.transport, HISTORY, by_operations, pin_memory=on_gpu)
        pairs = self.loader.with_reports()
        self._iterator = pairs if self._prepares else (balanced_batch(*pair) for pair in pairs)

    def leave(self) -> None:
        """Stop balancing. Collective."""
        if self.loader is not None:
            self.loader.close()
        self.loader, self._iterator = None, None

    def step(self) -> Tensor:
        """Train on the next batch and return this rank's share of the loss, without waiting for it."""
        loss: Tensor = self._pipeline.progress(self._iterator)
        if self.loader is not None and self.loader.last_report is not None:
            self.waited_s.append(self.loader.last_report.exposed_seconds)
        return loss


class Operations:
    """What a history costs the tower: 24 width² operations an id in matrix products, 2 width for each pair of ids.

    Args:
        width: Of the tower.
    """

    reads_candidate_lengths = reads_measured = False

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, world: WorldSamples) -> Tensor:
        """Cost of each sample, in ids of a short history. Shape [N], float64."""
        lengths = world.uih_lengths.double()
        return lengths + lengths.square() / (12 * self._width)


def _base(setup: Setup) -> Contender:
    return _torchrec(setup, TrainPipelineBase, is_balanced=False)


def _sdd(setup: Setup) -> Contender:
    return _torchrec(setup, TrainPipelineSparseDist, is_balanced=False)


def _sdd_dedup(setup: Setup) -> Contender:
    return _torchrec(setup, TrainPipelineSparseDist, is_balanced=False, deduplicates=True)


def _balanced(setup: Setup) -> Contender:
    return _torchrec(setup, TrainPipelineSparseDist, is_balanced=True)


def _prioritized(setup: Setup) -> Contender:
    return _ours(setup, is_balanced=False)


def _synchronous(setup: Setup) -> Contender:
    return _ours(setup, is_balanced=True, is_synchronous=True)


def _freescale(setup: Setup) -> Contender:
    return _ours(setup, is_balanced=True)


BUILDERS: dict[str, Callable[[Setup], Contender]] = {
    "base": _base,
    "sdd": _sdd,
    "sdd_dedup": _sdd_dedup,
    "balanced": _balanced,
    "prioritized": _prioritized,
    "synchronous": _synchronous,
    "freescale": _freescale,
}


def _torchrec(setup: Setup, pipeline: Any, *, is_balanced: bool, deduplicates: bool = False) -> Contender:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": setup.learning_rate, "eps": 1e-8}
    tables = EmbeddingCollection(tables=setup.configs(), device=torch.device("meta"))
    sharder = EmbeddingCollectionSharder(fused, use_index_dedup=deduplicates)
    model = shard_row_wise(setup, ScaledRecommender(tables, setup.tower()), sharder)
    made = pipeline(model, setup.dense_optimizer(model), setup.device)
    return Contender(setup, model, made, is_balanced=is_balanced, prepares=False)


def _ours(setup: Setup, *, is_balanced: bool, is_synchronous: bool = False) -> Contender:
    from ..embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad

    tables = PrioritizedEmbeddingCollection(
        setup.configs(),
        setup.transport.channel("tables"),
        optimizer=RowwiseAdagrad(lr=setup.learning_rate, eps=1e-8),
        synchronous=is_synchronous,
        device=setup.device,
        ids=lambda batch: batch.ids,
    )
    model = data_parallel(ScaledRecommender(tables, setup.tower()))

    def prepare(batch: Any, report: Report | None) -> IdsOnHost:
        return IdsOnHost.of(balanced_batch(batch, report) if is_balanced else batch)

    pipeline = StagedPipeline(model, setup.dense_optimizer(model), device=setup.device, prepare=prepare)
    return Contender(setup, model, pipeline, is_balanced=is_balanced, prepares=True)
