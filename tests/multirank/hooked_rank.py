"""A rank that trains with the balancer at hooks and notes what it trained on; ranks skip steps, and end unevenly."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from freescale.balancer import Column, JaggedBatch, attach, balance
from freescale.transport import connect


def batches(rank: int) -> Iterator[JaggedBatch]:
    for step in range(6 + 3 * rank):
        lengths = torch.randint(0, 50, (4,), generator=torch.Generator().manual_seed(10 * rank + step))
        ids = torch.arange(4) + 100 * step + 10_000 * rank
        yield JaggedBatch({"id": Column(ids), "uih": Column(ids.repeat_interleave(lengths), (lengths,))})


class Source:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[JaggedBatch]:
        return batches(self.rank)


def main() -> None:
    backend, folder = sys.argv[1], Path(sys.argv[2])
    if backend == "process_group":
        torch.distributed.init_process_group("gloo")
    transport = connect(backend, timeout_s=100)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = balance(Source(transport.rank), transport, "uih")
    seen: list[int] = []
    with attach(loader, model, optimizer):
        for step, batch in enumerate(loader):
            assert not any(thread.name == "freescale-balancer" for thread in threading.enumerate())
            seen += batch["id"].values.tolist()
            lengths = batch["uih"].levels[0].float().unsqueeze(1)
            loss = model(lengths).sum()
            if (step + transport.rank) % 3:
                loss.backward()
            if (step + transport.rank) % 4:
                optimizer.step()
            optimizer.zero_grad()
    (folder / f"{transport.rank}.json").write_text(json.dumps(seen))
    print(f"rank {transport.rank}: {step + 1} steps", flush=True)
    if backend == "process_group":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
