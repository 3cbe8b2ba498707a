"""One rank whose process ends while its GPU is at work: `python device_ending_rank.py HOW ENGINE`.

It trains a staged pipeline: pinned batches of a balanced loader, tables that prefetch over the engine. HOW is "left"
for a script that ends half-way through an epoch, "raised" for one whose rank 1 raises an error there. ENGINE is as in
`device_contract.py`; "cpu" is a dry run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.balancer import StagedPipeline, balance
from freescale.embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
from freescale.transport import Transport, connect

from device_contract import make_transport

STEPS, SIZE = 12, 16
DEADLINE_S = 20.0


class Batches:
    """Endless: the process ends before they do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            lengths = torch.randint(1, 300, (SIZE,), generator=generator)
            ids = torch.randint(0, 5000, (int(lengths.sum()),), generator=generator)
            yield {"keyed": KeyedJaggedTensor(["item"], ids, lengths=lengths)}


class Model(nn.Module):
    """Rows of tables, and enough products of matrices that the host runs ahead of the GPU."""

    def __init__(self, transport: Transport, device: str) -> None:
        super().__init__()
        table = Table("item", 5000, 64)
        self.tables = PrioritizedEmbeddingCollection(
            [table], transport, optimizer=RowwiseAdagrad(lr=0.01), device=device
        )
        self.weight = nn.Parameter(torch.eye(64, device=device))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        rows: Tensor = self.tables({"item": batch["keyed"].values()})["item"]
        for _ in range(50):
            rows = rows @ self.weight
        loss: Tensor = rows.square().mean()
        return loss


def main(how: str, engine: str) -> None:
    dist.init_process_group("gloo")
    if engine == "cpu":
        device, transport = "cpu", connect("process_group", timeout_s=DEADLINE_S)
    else:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        device, transport = f"cuda:{torch.cuda.current_device()}", make_transport("process_group", engine, DEADLINE_S)
    model = Model(transport, device)
    loader = balance(
        Batches(), connect("process_group", timeout_s=DEADLINE_S), "keyed.item", pin_memory=engine != "cpu"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pipeline = StagedPipeline(model, optimizer, loader, ids=lambda batch: {"item": batch["keyed"].values()})
    kept.append(pipeline)
    batches = iter(pipeline)
    for _ in range(STEPS):
        next(batches)
    print("trained", flush=True)
    if how == "raised" and os.environ["RANK"] == "1":
        raise ArithmeticError("on fire")
    if how == "raised":
        for _ in batches:
            pass


kept: list[Any] = []
"""What a training script has in its module until Python ends."""

if __name__ == "__main__":
    main(*sys.argv[1:])
