"""One rank: our tables beside torchrec's sharded ones, with one bag an id, since FBGEMM's CPU tables only have bags."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv

from freescale.embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table
from freescale.transport import connect

from embedding_runs import Data, shard_of

ROWS, COLUMNS, STEPS = 61, 8, 10
RULES: list[tuple[Any, Any, dict[str, float]]] = [
    (Sgd(lr=0.05), EmbOptimType.EXACT_SGD, {}),
    (RowwiseAdagrad(lr=0.05), EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"eps": 1e-8}),
]  # no Adam: FBGEMM asserts "Optimizer adam is not supported in CPU mode"


def shard_theirs(rule: Any, options: dict[str, float]) -> Any:
    """Torchrec's collection, row-wise over the default group, fused."""
    config = EmbeddingBagConfig(name="item", embedding_dim=COLUMNS, num_embeddings=ROWS, feature_names=["item"])
    plain = EmbeddingBagCollection(tables=[config])
    sharder: Any = EmbeddingBagCollectionSharder(fused_params={"optimizer": rule, "learning_rate": 0.05, **options})
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        plain,
        {"item": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=size,
        world_size=size,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return shard(plain, plan, env, torch.device("cpu"), sharder)


def rows_of(theirs: Any) -> Tensor:
    """This rank's weights."""
    (value,) = theirs.state_dict().values()
    local: Tensor = value.local_shards()[0].tensor
    return local


def compare(ours_rule: Any, rule: Any, options: dict[str, float]) -> float:
    """The largest relative difference of one step, from equal weights each time."""
    table = Table("item", ROWS, COLUMNS)
    transport = connect("process_group", timeout_s=60)
    ours, theirs = PrioritizedEmbeddingCollection([table], transport, optimizer=ours_rule), shard_theirs(rule, options)
    data, worst = Data([table], num_ids=40), 0.0
    for step in range(STEPS):
        with torch.no_grad():
            rows_of(theirs).copy_(shard_of(ours)["item"])
        ids, upcoming = (data.batch(dist.get_rank(), each)["item"][:20] for each in (step, step + 1))  # theirs: equal
        ours.prefetch({"item": upcoming})
        weight = torch.linspace(0.5, 1.5, len(ids))[:, None]
        (ours({"item": ids})["item"].square() * weight).sum().backward()
        features = KeyedJaggedTensor.from_lengths_sync(keys=["item"], values=ids, lengths=torch.ones(len(ids)).int())
        (theirs(features).wait().values().square() * weight).sum().backward()
        expected, found = rows_of(theirs), shard_of(ours)["item"]
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    ours.close()
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for ours_rule, rule, options in RULES:
        worst = compare(ours_rule, rule, options)
        print(f"{type(ours_rule).__name__}: {worst:.2e}", flush=True)
        assert worst < 1e-6
    print("passed check_torchrec", flush=True)
    dist.destroy_process_group()
