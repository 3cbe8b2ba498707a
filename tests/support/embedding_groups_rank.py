"""One of eight ranks: checkpoints of groups of 4, 2 and 8, and DistributedDataParallel around sharded tables."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from freescale.embedding import Adam, PrioritizedEmbeddingCollection, Sgd, Table
from freescale.transport import connect

from embedding_runs import Data, shard_of

TABLES = [Table("item", 21, 4), Table("user", 3, 4)]
STEPS = 4


def make(group: Any, seed: int = 0) -> PrioritizedEmbeddingCollection:
    transport = connect("process_group", group=group, timeout_s=60)
    return PrioritizedEmbeddingCollection(TABLES, transport, optimizer=Adam(lr=0.1), seed=seed, process_group=group)


def state_of(tables: PrioritizedEmbeddingCollection) -> dict[str, Any]:
    return {"model": tables.state_dict(), "optimizer": tables.fused_optimizer.state_dict()}


def whole(tables: PrioritizedEmbeddingCollection) -> dict[str, Tensor]:
    """All rows of weights and states; collective."""
    found = {name: value.full_tensor() for name, value in tables.state_dict().items()}
    for table, state in tables.fused_optimizer.state_dict()["state"].items():
        found |= {f"{table}.{name}": getattr(value, "full_tensor", value.clone)() for name, value in state.items()}
    return found


def check_checkpoints(folder: str) -> None:
    """Saved on 4 ranks, loaded on 2 and 8, and into a plain EmbeddingCollection; states and steps too."""
    rank = dist.get_rank()
    groups = {size: dist.new_group(range(size)) for size in (2, 4)}
    if rank < 4:
        tables, data = make(groups[4]), Data(TABLES)
        for step in range(STEPS):
            tables.prefetch(data.batch(rank, step + 1))
            sum(each.square().sum() for each in tables(data.batch(rank, step)).values()).backward()
        save(state_of(tables), checkpoint_id=f"{folder}/saved", process_group=groups[4])
        saved = whole(tables)
        if rank == 0:
            torch.save(saved, f"{folder}/whole.pt")
    dist.barrier()
    expected = torch.load(f"{folder}/whole.pt", weights_only=True)
    assert expected["item.step"] == STEPS
    for size, group in ((2, groups[2]), (8, None)):
        if rank < size:
            tables = make(group, seed=1)
            state = state_of(tables)
            load(state, checkpoint_id=f"{folder}/saved", process_group=group)
            tables.load_state_dict(state["model"])
            tables.fused_optimizer.load_state_dict(state["optimizer"])
            for name, value in whole(tables).items():
                assert torch.equal(value, expected[name]), (size, name)
    if rank == 0:
        _check_plain_collection(folder, expected)
    dist.barrier()
    print("passed check_checkpoints", flush=True)


def _check_plain_collection(folder: str, expected: dict[str, Tensor]) -> None:
    from torchrec import EmbeddingCollection, EmbeddingConfig

    configs = [EmbeddingConfig(name=t.name, embedding_dim=4, num_embeddings=t.num_embeddings) for t in TABLES]
    plain = EmbeddingCollection(tables=configs)
    state = {"model": plain.state_dict()}
    load(state, checkpoint_id=f"{folder}/saved", no_dist=True)
    plain.load_state_dict(state["model"])
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name]), name


class Inner(nn.Module):
    """Tables beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = PrioritizedEmbeddingCollection(TABLES, connect("process_group"), optimizer=Sgd(lr=0.1))
        self.dense = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.tables(batch)
        return torch.cat([self.dense(each) for each in rows.values()]).square().sum()


class Outer(nn.Module):
    """One module deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.inner(batch)
        return loss


def check_ddp() -> None:
    """Shards of the ranks differ, and stay what they are without DistributedDataParallel."""
    results = []
    data = Data(TABLES)
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Outer()
        before = shard_of(model.inner.tables)
        called: nn.Module = DistributedDataParallel(model) if wrapped else model
        for name, value in shard_of(model.inner.tables).items():
            assert torch.equal(value, before[name])
        for step in range(3):
            model.inner.tables.prefetch(data.batch(dist.get_rank(), step + 1))
            called(data.batch(dist.get_rank(), step)).backward()
        results.append(shard_of(model.inner.tables))
        model.inner.tables.close()
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value)
    print("passed check_ddp", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_checkpoints(sys.argv[1])
    check_ddp()
    dist.destroy_process_group()
