"""A rank that trains a compiled model under DDP on balanced batches, in both orders of wrapping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freescale.balancer import balance
from freescale.transport import connect

Batch = dict[str, Tensor]


class Model(nn.Module):
    """Scores a sample by the mean of its pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.EmbeddingBag(50, 8, mode="mean", include_last_offset=True)
        self.score = nn.Linear(8, 1)

    def forward(self, page: Tensor, lengths: Tensor) -> Tensor:
        """One score a sample."""
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        scores: Tensor = self.score(self.pages(page, offsets)).squeeze(1)
        return scores


def compiled(model: nn.Module, how: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile around DDP, inside of it, or not at all. Tracing is what may fail; Inductor wants a C++ compiler."""
    if how == "inside":
        return DistributedDataParallel(torch.compile(model, dynamic=True, backend="aot_eager"))
    wrapped = DistributedDataParallel(model)
    return torch.compile(wrapped, dynamic=True, backend="aot_eager") if how == "around" else wrapped


def train(how: str) -> list[float]:
    """Losses of an epoch."""
    torch.manual_seed(0)
    plain = Model()
    model, optimizer = compiled(plain, how), torch.optim.SGD(plain.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(transport.rank)
    batches: list[Batch] = []
    for _ in range(4 + 2 * transport.rank):  # one rank has more
        lengths = torch.randn(8, generator=generator).exp().mul(20).long() + 1
        page = torch.arange(int(lengths.sum())) % 50
        batches.append({"page": page, "lengths": lengths, "label": (lengths % 2).float()})
    losses = []
    for batch, report in balance(batches, transport, "page", jagged={"page": "lengths"}).with_reports():
        scores = model(batch["page"], batch["lengths"])
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch["label"], reduction="sum")
        loss = loss * report.loss_scale()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.distributed.init_process_group("gloo")
transport = connect("process_group", timeout_s=60)
plain = train("not at all")
for order in ("around", "inside"):
    torch.testing.assert_close(torch.tensor(train(order)), torch.tensor(plain))
print(f"rank {transport.rank}: {len(plain)} steps, compiled as not", flush=True)
torch.distributed.destroy_process_group()
