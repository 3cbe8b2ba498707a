"""Train with DistributedDataParallel on balanced batches; gradients are those of the global mean (paper, section 4.1).

Launch it with
    torchrun --nproc-per-node 2 examples/ddp_training.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from freescale.balancer import Column, JaggedBatch, balance
from freescale.transport import connect

NUM_PAGES = 100


class Model(nn.Module):
    """Scores candidates against the mean of the history's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.EmbeddingBag(NUM_PAGES, 16, mode="mean", include_last_offset=True)

    def forward(self, batch: JaggedBatch) -> Tensor:
        """One score a candidate. Shape [candidates of the batch]."""
        history, candidates = batch["uih_page"], batch["candidate"]
        user = self.pages(history.values, history.offsets).repeat_interleave(candidates.levels[0], dim=0)
        item = self.pages(candidates.values, torch.arange(len(candidates.values) + 1))
        scores: Tensor = (user * item).sum(1)
        return scores


def make_batch(seed: int) -> JaggedBatch:
    """Users, two to eight candidates each; a click when the candidate's parity is that of the user's pages."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(32, generator=generator).exp().mul(50).long() + 1
    counts = torch.randint(2, 9, (32,), generator=generator)
    parity = torch.randint(0, 2, (32,), generator=generator)
    page = torch.randint(0, NUM_PAGES // 2, (int(lengths.sum()),), generator=generator) * 2
    candidate = torch.randint(0, NUM_PAGES, (int(counts.sum()),), generator=generator)
    label = (candidate % 2 == parity.repeat_interleave(counts)).float()
    columns = {"uih_page": Column(page + parity.repeat_interleave(lengths), (lengths,))}
    return JaggedBatch(columns | {"candidate": Column(candidate, (counts,)), "label": Column(label, (counts,))})


if not torch.distributed.is_torchelastic_launched():
    sys.exit("DDP needs several ranks: torchrun --nproc-per-node 2 examples/ddp_training.py")
torch.distributed.init_process_group("gloo")
transport = connect("process_group", timeout_s=60)
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
batches = [make_batch(1000 * transport.rank + step) for step in range(60)]

losses = []
for batch, report in balance(batches, transport, lengths="uih_page", candidates="candidate").with_reports():
    per_item = binary_cross_entropy_with_logits(model(batch), batch["label"].values, reduction="none")
    loss = per_item.sum() * report.loss_scale("label")  # not .mean(): ranks have different numbers of candidates
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# A loss is this rank's share of the global mean: averaged over ranks, as DDP does with gradients, it is that mean.
mean = transport.all_gather(torch.tensor([losses])).wait().mean(0)
print(f"rank {transport.rank}: loss {mean[0]:.3f} -> {mean[-1]:.3f}")
assert mean[-1] < mean[0] / 2
torch.distributed.destroy_process_group()
