"""A loop as NVIDIA's examples write it: autocast, gradient scaling, accumulation; balancing at hooks (section 4.3).

Launch it with
    torchrun --nproc-per-node 2 examples/mixed_precision_training.py
"""

import contextlib
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from freescale.balancer import Column, JaggedBatch, attach, balance
from freescale.transport import connect

NUM_PAGES = 100
ACCUMULATED = 2  # batches in each optimizer step


class Model(nn.Module):
    """Scores users by the mean of the pages they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.EmbeddingBag(NUM_PAGES, 16, mode="mean", include_last_offset=True)
        self.score = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, batch: JaggedBatch) -> dict[str, Tensor]:
        """One score a sample. Shape [batch_size]."""
        history = batch["uih_page"]
        return {"scores": self.score(self.pages(history.values, history.offsets)).squeeze(1)}


def make_batch(seed: int) -> JaggedBatch:
    """Users who have seen even pages, or odd ones; the latter click."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(32, generator=generator).exp().mul(50).long() + 1
    label = torch.randint(0, 2, (32,), generator=generator)
    page = torch.randint(0, NUM_PAGES // 2, (int(lengths.sum()),), generator=generator) * 2
    pages = Column(page + label.repeat_interleave(lengths), (lengths,))
    return JaggedBatch({"uih_page": pages, "label": Column(label.float())})


if not torch.distributed.is_torchelastic_launched():
    sys.exit("DDP needs several ranks: torchrun --nproc-per-node 2 examples/mixed_precision_training.py")
torch.distributed.init_process_group("gloo")
transport = connect("process_group", timeout_s=60)
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
batches = [make_batch(1000 * transport.rank + step) for step in range(60)]
loader = balance(batches, transport, lengths="uih_page")

losses = []
with attach(loader, model, optimizer):  # balancing runs where the loop calls model and optimizer; no thread beside it
    for step, (batch, report) in enumerate(loader.with_reports()):
        last = (step + 1) % ACCUMULATED == 0
        with torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext() if last else model.no_sync():
            scores = model(batch)["scores"]
            per_sample = binary_cross_entropy_with_logits(scores.float(), batch["label"].values, reduction="none")
            loss = per_sample.sum() * report.loss_scale()
            scaler.scale(loss / ACCUMULATED).backward()
        losses.append(loss.item())
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # skips the step, and its hook, when a gradient is not finite
            scaler.update()
            optimizer.zero_grad()

mean = transport.all_gather(torch.tensor([losses])).wait().mean(0)
print(f"rank {transport.rank}: loss {mean[0]:.3f} -> {mean[-1]:.3f}")
assert mean[-1] < mean[0] / 2
torch.distributed.destroy_process_group()
