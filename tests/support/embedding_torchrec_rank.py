"""One rank: our tables beside torchrec's sharded ones, row-wise and fused: `python embedding_torchrec_rank.py [cuda]`.

On the CPU with one bag an id, since FBGEMM's tables there only have bags; on GPUs its un-pooled EmbeddingCollection.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bench.torchrec_versions import supply_moved_modules

supply_moved_modules()  # before torchrec is imported

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torchrec import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.shard import shard  # noqa: E402
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402

from freescale.embedding import Adam, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table  # noqa: E402
from freescale.transport import connect  # noqa: E402

from embedding_runs import Data, shard_of  # noqa: E402

ROWS, COLUMNS, STEPS = 61, 8, 10
RULES: list[tuple[Any, Any, dict[str, float]]] = [
    (Sgd(lr=0.05), EmbOptimType.EXACT_SGD, {}),
    (RowwiseAdagrad(lr=0.05), EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"eps": 1e-8}),
]
RULES_OF_GPUS = [*RULES, (Adam(lr=0.05), EmbOptimType.ADAM, {"eps": 1e-8})]
# FBGEMM asserts "Optimizer adam is not supported in CPU mode"


def shard_theirs(device: torch.device, rule: Any, options: dict[str, float]) -> Any:
    """Torchrec's collection, row-wise over the default group, fused."""
    named: dict[str, Any] = {
        "name": "item",
        "embedding_dim": COLUMNS,
        "num_embeddings": ROWS,
        "feature_names": ["item"],
    }
    fused = {"optimizer": rule, "learning_rate": 0.05, **options}
    plain: Any = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**named)])
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    if device.type == "cuda":
        plain = EmbeddingCollection(tables=[EmbeddingConfig(**named)])
        sharder = EmbeddingCollectionSharder(fused_params=fused)
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        plain,
        {"item": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=size,
        world_size=size,
        device_type=device.type,
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return shard(plain, plan, env, device, sharder)


def rows_of(theirs: Any) -> Tensor:
    """This rank's weights."""
    (value,) = theirs.state_dict().values()
    local: Tensor = value.local_shards()[0].tensor
    return local


def look_up(theirs: Any, ids: Tensor) -> Tensor:
    """Rows of ids, differentiable."""
    lengths = torch.ones(len(ids), dtype=torch.int32, device=ids.device)
    found = theirs(KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths).sync()).wait()
    rows: Tensor = found["item"].values() if ids.is_cuda else found.values()
    return rows


def compare(device: torch.device, ours_rule: Any, rule: Any, options: dict[str, float]) -> float:
    """The largest relative difference of one step, from equal weights each time."""
    table = Table("item", ROWS, COLUMNS)
    transport = connect("process_group", timeout_s=60)
    ours = PrioritizedEmbeddingCollection([table], transport, optimizer=ours_rule, device=device)
    theirs = shard_theirs(device, rule, options)
    data, worst = Data([table], num_ids=40), 0.0
    for step in range(STEPS):
        with torch.no_grad():
            rows_of(theirs).copy_(shard_of(ours)["item"])
        ids, upcoming = (data.batch(dist.get_rank(), each)["item"][:20] for each in (step, step + 1))  # theirs: equal
        ours.prefetch({"item": upcoming})
        weight = torch.linspace(0.5, 1.5, len(ids), device=device)[:, None]
        (ours({"item": ids})["item"].square() * weight).sum().backward()
        (look_up(theirs, ids.to(device)).square() * weight).sum().backward()
        expected, found = rows_of(theirs).cpu(), shard_of(ours)["item"]
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    ours.close()
    return worst


def main(kind: str = "cpu") -> None:
    """Compare all optimizers that FBGEMM has there."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl")
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    else:
        dist.init_process_group("gloo")
    for ours_rule, rule, options in RULES_OF_GPUS if kind == "cuda" else RULES:
        worst = compare(device, ours_rule, rule, options)
        print(f"{type(ours_rule).__name__}: {worst:.2e}", flush=True)
        assert worst < 1e-6
    print("passed check_torchrec", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
