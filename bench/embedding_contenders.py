"""What bench.embedding compares: one model, its tables trained by TorchRec's pipelines and by ours (section 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from .embedding_batch import Batch, Feed, features
from .embedding_model import SequenceTower
from .prioritized_loop import PrioritizedLoop

TITLES = {
    "base": "TorchRec, TrainPipelineBase",
    "sdd": "TorchRec, SDD",
    "sdd_dedup": "TorchRec, SDD with use_index_dedup",
    "pec": "TorchRec, PEC",
    "synchronous": "ours, synchronous",
    "prioritized": "ours, prioritized",
}


@dataclass(frozen=True)
class Setup:
    """What all contenders share.

    Attributes:
        device: Of this rank.
        num_tables: Tables.
        num_rows: Rows of each.
        dim: Columns of each.
        batch_size: Samples a rank.
        num_layers: Of the dense part.
        width: Of the dense part.
        dtype: Of the dense part.
        learning_rate: Of the tables' row-wise Adagrad.
        transport: Between the ranks, for ours.
    """

    device: torch.device
    num_tables: int
    num_rows: int
    dim: int
    batch_size: int
    num_layers: int
    width: int
    dtype: torch.dtype
    learning_rate: float
    transport: Any

    def configs(self) -> list[Any]:
        """The tables, as TorchRec and ours take them."""
        return [
            EmbeddingConfig(
                name=f"table_{i}", num_embeddings=self.num_rows, embedding_dim=self.dim, feature_names=[name]
            )
            for i, name in enumerate(features(self.num_tables))
        ]

    def tower(self) -> SequenceTower:
        """The dense part, with the same weights on every rank and for every contender."""
        torch.manual_seed(1234)
        names, heads = features(self.num_tables), max(1, self.width // 64)
        return SequenceTower(names, self.dim, self.width, self.num_layers, heads, self.dtype).to(self.device)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """For the dense part; tables are updated in their own backward."""
        dense = [p for name, p in model.named_parameters() if "tower." in name]
        return torch.optim.Adam(dense, lr=1e-4, fused=self.device.type == "cuda")


class Trainer(Protocol):
    """A contender, ready to train.

    Attributes:
        model: What it trains.
    """

    model: nn.Module

    def step(self) -> Tensor:
        """Train on the next batch and return the loss, without waiting for it."""

    def close(self) -> None:
        """End threads and channels."""


class Recommender(nn.Module):
    """Tables and the dense part behind them.

    Args:
        tables: An EmbeddingCollection, or what stands for one.
        tower: The dense part.
    """

    def __init__(self, tables: nn.Module, tower: SequenceTower) -> None:
        super().__init__()
        self.tables, self.tower = tables, tower

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, and the loss without its graph, as TorchRec's pipelines want both."""
        loss = self.tower(self.tables(batch.ids), batch.starts, batch.labels, batch.longest)
        return loss, loss.detach()


class PipelineTrainer:
    """One of TorchRec's pipelines.

    Args:
        model: What it trains.
        pipeline: A pipeline of that model.
        feed: Where batches come from.
    """

    def __init__(self, model: nn.Module, pipeline: Any, feed: Feed) -> None:
        self.model, self._pipeline, self._feed = model, pipeline, feed

    def step(self) -> Tensor:
        """See `Trainer.step`."""
        loss: Tensor = self._pipeline.progress(self._feed)
        return loss

    def close(self) -> None:
        """See `Trainer.close`: there are none."""


def _base(setup: Setup, feed: Feed) -> Trainer:
    return _torchrec(setup, feed, TrainPipelineBase, EmbeddingCollectionSharder(_fused(setup)))


def _sdd(setup: Setup, feed: Feed) -> Trainer:
    return _torchrec(setup, feed, TrainPipelineSparseDist, EmbeddingCollectionSharder(_fused(setup)))


def _sdd_dedup(setup: Setup, feed: Feed) -> Trainer:
    sharder = EmbeddingCollectionSharder(_fused(setup), use_index_dedup=True)
    return _torchrec(setup, feed, TrainPipelineSparseDist, sharder)


def _pec(setup: Setup, feed: Feed) -> Trainer:
    from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
    from torchrec.distributed.train_pipeline.pec_train_pipeline import TrainPipelinePEC
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    sharder = PECEmbeddingCollectionSharder(ec_sharder=EmbeddingCollectionSharder(_fused(setup)))
    return _torchrec(setup, feed, TrainPipelinePEC, sharder, PECEmbeddingCollection)


def _prioritized(setup: Setup, feed: Feed) -> Trainer:
    return _ours(setup, feed, synchronous=False)


def _synchronous(setup: Setup, feed: Feed) -> Trainer:
    return _ours(setup, feed, synchronous=True)


BUILDERS: dict[str, Callable[[Setup, Feed], Trainer]] = {
    "base": _base,
    "sdd": _sdd,
    "sdd_dedup": _sdd_dedup,
    "pec": _pec,
    "synchronous": _synchronous,
    "prioritized": _prioritized,
}


def _fused(setup: Setup) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": setup.learning_rate, "eps": 1e-8}


def _torchrec(
    setup: Setup, feed: Feed, pipeline: Any, sharder: Any, wrap: Callable[[Any], nn.Module] = lambda tables: tables
) -> Trainer:
    """Shard every table row-wise with the fused kernel, and put the dense part under DistributedDataParallel."""
    tables = wrap(EmbeddingCollection(tables=setup.configs(), device=torch.device("meta")))
    sharded = shard_row_wise(setup, Recommender(tables, setup.tower()), sharder)
    return PipelineTrainer(sharded, pipeline(sharded, setup.dense_optimizer(sharded), setup.device), feed)


def shard_row_wise(setup: Setup, model: nn.Module, sharder: Any) -> nn.Module:
    """Shard every table of a model by rows, with the fused kernel; the rest is put under DistributedDataParallel."""
    row_wise = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(), compute_device=setup.device.type, hbm_cap=120 << 30, ddr_cap=1 << 40
        ),
        batch_size=setup.batch_size,
        constraints={config.name: row_wise for config in setup.configs()},
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=setup.device, plan=plan, sharders=[sharder])
    assert isinstance(sharded, nn.Module)
    return sharded


def _ours(setup: Setup, feed: Feed, synchronous: bool) -> Trainer:
    from ..embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad

    tables = PrioritizedEmbeddingCollection(
        setup.configs(),
        setup.transport.channel("synchronous" if synchronous else "prioritized"),
        optimizer=RowwiseAdagrad(lr=setup.learning_rate, eps=1e-8),
        synchronous=synchronous,
        device=setup.device,
    )
    model = data_parallel(Recommender(tables, setup.tower()))
    return PrioritizedLoop(model, tables, setup.dense_optimizer(model), feed, setup.device)


def data_parallel(model: nn.Module) -> nn.Module:
    """Put the dense part under DistributedDataParallel, as TorchRec does by itself.

    Saying how large buckets are, though it is what they are anyway, gives one bucket: else the first is smaller.
    """
    return nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True, bucket_cap_mb=25
    )
