"""Everything together: balanced batches, prioritized embeddings, DDP for the rest, in a staged pipeline (section 4.3).

Launch it with
    torchrun --nproc-per-node 2 examples/staged_pipeline.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from freescale.balancer import Column, JaggedBatch, Report, StagedPipeline, balance
from freescale.embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
from freescale.transport import connect

NUM_PAGES = 10_000


class Model(nn.Module):
    """Scores users by the mean of the pages they have seen."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.score = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, batch: JaggedBatch) -> Tensor:
        """One score a sample. Shape [batch_size]."""
        rows = self.tables({"uih_page": batch["uih_page"].values})["uih_page"]
        lengths = batch["uih_page"].levels[0]
        segments = torch.repeat_interleave(torch.arange(batch.batch_size), lengths)
        total = torch.zeros(batch.batch_size, 16).index_add(0, segments, rows)
        scores: Tensor = self.score(total / lengths.clamp(min=1).unsqueeze(1)).squeeze(1)
        return scores


def loss_of(scores: Tensor, batch: JaggedBatch, report: Report | None) -> Tensor:
    """Of this rank's samples, scaled so that the average over ranks is the mean over the global batch."""
    assert report is not None
    per_sample = binary_cross_entropy_with_logits(scores, batch["label"].values, reduction="none")
    return per_sample.sum() * report.loss_scale()


def make_batch(seed: int) -> JaggedBatch:
    """Users who have seen pages of the lower half, or of the upper; the latter click."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(32, generator=generator).exp().mul(50).long() + 1
    label = torch.randint(0, 2, (32,), generator=generator)
    page = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * NUM_PAGES / 2).long()
    pages = Column(page + label.repeat_interleave(lengths) * (NUM_PAGES // 2), (lengths,))
    return JaggedBatch({"uih_page": pages, "label": Column(label.float())})


if not torch.distributed.is_torchelastic_launched():
    sys.exit("DDP needs several ranks: torchrun --nproc-per-node 2 examples/staged_pipeline.py")
torch.distributed.init_process_group("gloo")
transport = connect("process_group", timeout_s=60)
torch.manual_seed(0)
tables = PrioritizedEmbeddingCollection(
    [Table("page", NUM_PAGES, 16, feature_names=["uih_page"])],
    transport,
    optimizer=RowwiseAdagrad(lr=0.1),
    ids=lambda batch: {"uih_page": batch["uih_page"].values},  # of a batch whose turn comes later
)
model = DistributedDataParallel(Model(tables))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batches = [make_batch(1000 * transport.rank + step) for step in range(60)]
loader = balance(batches, transport, lengths="uih_page")

losses: list[Tensor] = []
pipeline = StagedPipeline(
    model,
    optimizer,
    loader,
    loss_fn=loss_of,
    metrics=lambda scores, batch, report: losses.append(loss_of(scores.detach(), batch, report)),
)
for _ in pipeline:
    pass

mean = transport.all_gather(torch.stack(losses).reshape(1, -1)).wait().mean(0)
print(f"rank {transport.rank}: {len(losses)} steps, loss {mean[0]:.3f} -> {mean[-1]:.3f}")
assert mean[-1] < mean[0] / 2
tables.close()
torch.distributed.destroy_process_group()
