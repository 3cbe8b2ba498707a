"""Train with Lightning on balanced batches; the module's loss is scaled, the Trainer stays as it is (section 4.3).

Launch it with
    torchrun --nproc-per-node 2 examples/lightning_training.py
"""

import logging
import sys

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from freescale.balancer import Column, JaggedBatch, balance
from freescale.transport import connect

NUM_PAGES = 100


class Recommender(lightning.LightningModule):
    """Scores users by the mean of the pages they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.EmbeddingBag(NUM_PAGES, 16, mode="mean", include_last_offset=True)
        self.score = nn.Linear(16, 1)
        self.losses: list[Tensor] = []

    def training_step(self, pair: tuple[JaggedBatch, float], _: int) -> Tensor:
        """Give this rank's share of the mean loss of the global batch."""
        batch, scale = pair  # changed: the scale comes with the batch …
        scores = self.score(self.pages(batch["uih_page"].values, batch["uih_page"].offsets)).squeeze(1)
        per_sample = binary_cross_entropy_with_logits(scores, batch["label"].values, reduction="none")
        loss = per_sample.sum() * scale  # … and takes the place of .mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As ever."""
        return torch.optim.Adam(self.parameters(), lr=0.05)


def make_batch(seed: int) -> JaggedBatch:
    """Users who have seen even pages, or odd ones; the latter click."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(32, generator=generator).exp().mul(50).long() + 1
    label = torch.randint(0, 2, (32,), generator=generator)
    page = torch.randint(0, NUM_PAGES // 2, (int(lengths.sum()),), generator=generator) * 2
    pages = Column(page + label.repeat_interleave(lengths), (lengths,))
    return JaggedBatch({"uih_page": pages, "label": Column(label.float())})


if not torch.distributed.is_torchelastic_launched():
    sys.exit("DDP needs several ranks: torchrun --nproc-per-node 2 examples/lightning_training.py")
torch.distributed.init_process_group("gloo")  # before the Trainer, which takes it over: the balancer needs it now
transport = connect("process_group", timeout_s=60)
rank = transport.rank
batches = [make_batch(1000 * rank + step) for step in range(20 + 5 * rank)]  # one rank has more
loader = balance(batches, transport, lengths="uih_page")

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning.seed_everything(0, verbose=False)
module = Recommender()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=transport.world_size,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, train_dataloaders=loader.with_loss_scale())  # changed: it was `dataloader`

mean = transport.all_gather(torch.stack(module.losses).reshape(1, -1)).wait().mean(0)
print(f"rank {rank}: {trainer.global_step} steps, loss {mean[0]:.3f} -> {mean[-1]:.3f}")
assert trainer.global_step == 50
assert mean[-1] < mean[0] / 2
