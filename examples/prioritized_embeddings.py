"""Swap an existing model's tables in one line; the batches after the current one are announced (paper, section 3.2).

Launch it with
    torchrun --nproc-per-node 2 examples/prioritized_embeddings.py
It also runs alone, as one rank.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from freescale.embedding import PrioritizedEmbeddings, RowwiseAdagrad, prioritize
from freescale.transport import connect

NUM_PAGES, NUM_STEPS = 1000, 60
Batch = dict[str, Tensor]


class Model(nn.Module):
    """Scores a candidate against the mean of the user's last pages: as it was before, with a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.Embedding(NUM_PAGES, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> Tensor:
        """One score a user. Shape [users]."""
        history = self.pages(batch["history"]).mean(1)
        scores: Tensor = self.score(history * self.pages(batch["candidate"])).squeeze(1)
        return scores


def make_batch(rank: int, step: int) -> Batch:
    """Users who have seen ten pages of one half; they click on candidates of that half."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    half = torch.randint(0, 2, (64, 1), generator=generator) * (NUM_PAGES // 2)
    history = torch.randint(0, NUM_PAGES // 2, (64, 10), generator=generator) + half
    candidate = torch.randint(0, NUM_PAGES, (64,), generator=generator)
    label = ((candidate >= NUM_PAGES // 2) == (half[:, 0] > 0)).float()
    return {"history": history, "candidate": candidate, "label": label}


ranks = torch.distributed.is_torchelastic_launched()
if ranks:
    torch.distributed.init_process_group("gloo")
transport = connect("process_group" if ranks else "local", timeout_s=60)
torch.manual_seed(0)
columns = {"pages": ["history", "candidate"]}
model = prioritize(Model(), transport, optimizer=RowwiseAdagrad(lr=0.3), ids=columns)
tables = model.prioritized_embeddings
assert isinstance(tables, PrioritizedEmbeddings)
wrapped = DistributedDataParallel(model) if ranks else model  # sees the dense part alone
optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(tables.fused_optimizer, step_size=20, gamma=0.7)

losses = []
batches = (make_batch(transport.rank, step) for step in range(NUM_STEPS + 1))
for batch, upcoming in pairwise(batches):
    tables.prefetch(upcoming)  # before the forward of the current batch; returns at once
    loss = binary_cross_entropy_with_logits(wrapped(batch), batch["label"])
    optimizer.zero_grad()
    loss.backward()  # tables are updated here
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

weight = model.state_dict()["pages.weight"]  # a DTensor with a process group; all updates are in it
print(f"rank {transport.rank}: {NUM_STEPS} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, table {list(weight.shape)}")
assert losses[-1] < losses[0] / 2
tables.close()
if ranks:
    torch.distributed.destroy_process_group()
