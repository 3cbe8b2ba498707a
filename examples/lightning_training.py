"""Train with Lightning on balanced batches, stop in mid-epoch and go on from a checkpoint (section 4.3).

Launch it with
    torchrun --nproc-per-node 2 examples/lightning_training.py
"""

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from freescale.balancer import BalancedLoader, Column, JaggedBatch, balance
from freescale.transport import connect

NUM_PAGES = 100


class Recommender(lightning.LightningModule):
    """Scores users by the mean of the pages they have seen."""

    def __init__(self, loader: BalancedLoader[JaggedBatch], folder: Path) -> None:
        super().__init__()
        self.pairs, self.folder = loader.with_loss_scale(), folder
        self.pages = nn.EmbeddingBag(NUM_PAGES, 16, mode="mean", include_last_offset=True)
        self.score = nn.Linear(16, 1)
        self.losses: list[Tensor] = []
        self.users: list[Tensor] = []

    def training_step(self, pair: tuple[JaggedBatch, float], _: int) -> Tensor:
        """Give this rank's share of the mean loss of the global batch."""
        batch, scale = pair  # changed: the scale comes with the batch …
        scores = self.score(self.pages(batch["uih_page"].values, batch["uih_page"].offsets)).squeeze(1)
        per_sample = binary_cross_entropy_with_logits(scores, batch["label"].values, reduction="none")
        loss = per_sample.sum() * scale  # … and takes the place of .mean()
        self.losses.append(loss.detach())
        self.users.append(batch["user"].values)
        self.pairs.trained()  # Lightning takes batches ahead: what a checkpoint goes on with is the next one
        return loss

    def on_save_checkpoint(self, _: dict[str, Any]) -> None:
        """Save where the loader stands, each rank for itself: Lightning's own file is of rank 0."""
        torch.save(self.pairs.state_dict(), self.folder / f"loader-{rank}-step={self.global_step}.pt")

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
    user = Column(torch.arange(32) + 32 * seed)
    return JaggedBatch({"user": user, "uih_page": pages, "label": Column(label.float())})


def fit(module: Recommender, checkpoint: Path | None = None, max_steps: int = -1) -> None:
    """Train for two epochs, or so many steps; a checkpoint every ten steps."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=transport.world_size,
        strategy="ddp",
        max_epochs=2,
        max_steps=max_steps,
        callbacks=[ModelCheckpoint(module.folder, filename="{step}", every_n_train_steps=10, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_dataloaders=module.pairs, ckpt_path=checkpoint)  # changed: it was `dataloader`


if not torch.distributed.is_torchelastic_launched():
    sys.exit("DDP needs several ranks: torchrun --nproc-per-node 2 examples/lightning_training.py")
torch.distributed.init_process_group("gloo")  # before the Trainer, which takes it over: the balancer needs it now
transport = connect("process_group", timeout_s=60)
rank = transport.rank
batches = [make_batch(1000 * rank + step) for step in range(20 + 5 * rank)]  # one rank has more
folder = [tempfile.mkdtemp()]
torch.distributed.broadcast_object_list(folder)  # all ranks use that of rank 0
checkpoints = Path(folder[0])

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning.seed_everything(0, verbose=False)
stopped = Recommender(balance(batches, transport, lengths="uih_page"), checkpoints)
fit(stopped, max_steps=13)

loader = balance(batches, transport, lengths="uih_page")
loader.load_state_dict(torch.load(checkpoints / f"loader-{rank}-step=10.pt"))
module = Recommender(loader, checkpoints)
fit(module, checkpoints / "step=10.ckpt")

mean = transport.all_gather(torch.stack(module.losses).reshape(1, -1)).wait().mean(0)
print(f"rank {rank}: {10 + len(module.losses)} steps, loss {stopped.losses[0]:.3f} -> {mean[-1]:.3f}")
assert len(module.losses) == 40
assert mean[-1] < stopped.losses[0] / 2
mine = torch.cat([*stopped.users[:10], *module.users])
users = transport.all_gather(mine, transport.all_gather(torch.tensor([len(mine)])).wait()).wait()
assert users.unique(return_counts=True)[1].tolist() == 45 * 32 * [2], "in two epochs everyone twice"
if rank == 0:
    shutil.rmtree(checkpoints)
torch.distributed.destroy_process_group()
