"""Feed TorchRec's TrainPipelineSparseDist with balanced batches, tables sharded by rows (paper, section 4.3).

Launch it with
    torchrun --nproc-per-node 2 examples/torchrec_training.py
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from freescale.balancer import balance
from freescale.transport import connect

NUM_PAGES = 100


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # torchrec is not checked
    """What TorchRec's pipelines take: something that moves to a device."""

    pages: KeyedJaggedTensor
    label: Tensor
    scale: ClassVar[float] = 1.0  # no field, so it is left alone when samples move

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device."""
        copied = Batch(self.pages.to(device, non_blocking), self.label.to(device, non_blocking=non_blocking))
        copied.__dict__["scale"] = self.scale
        return copied

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until a stream is done with it."""
        self.pages.record_stream(stream)
        self.label.record_stream(stream)


class Model(nn.Module):
    """Scores users by the mean of the pages they have seen."""

    def __init__(self) -> None:
        super().__init__()
        pages = EmbeddingBagConfig(name="pages", num_embeddings=NUM_PAGES, embedding_dim=16, feature_names=["uih_page"])
        self.tables = EmbeddingBagCollection(tables=[pages], device=torch.device("meta"))
        self.score = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the loss without its graph, as TorchRec's pipelines want both."""
        lengths = batch.pages["uih_page"].lengths().clamp(min=1)
        scores = self.score(self.tables(batch.pages)["uih_page"] / lengths.unsqueeze(1)).squeeze(1)
        loss = binary_cross_entropy_with_logits(scores, batch.label, reduction="sum") * batch.scale
        return loss, loss.detach()


def make_batch(seed: int) -> Batch:
    """Users who have seen even pages, or odd ones; the latter click."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(32, generator=generator).exp().mul(50).long() + 1
    label = torch.randint(0, 2, (32,), generator=generator)
    page = torch.randint(0, NUM_PAGES // 2, (int(lengths.sum()),), generator=generator) * 2
    pages = KeyedJaggedTensor(["uih_page"], page + label.repeat_interleave(lengths), lengths=lengths)
    return Batch(pages, label.float())


def scaled(pairs: Iterable[tuple[Batch, float]]) -> Iterator[Batch]:
    """Have each batch carry the scale of its loss: the pipeline takes batches ahead of the model."""
    for batch, scale in pairs:
        batch.__dict__["scale"] = scale
        yield batch


def shard(model: Model, device: torch.device) -> DistributedModelParallel:
    """Divide the table by rows; its optimizer runs in backward."""
    apply_optimizer_in_backward(torch.optim.Adagrad, model.tables.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(model.tables, {"pages": row_wise()}, sharder, device_type=device.type)
    return DistributedModelParallel(model, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder])


if not torch.distributed.is_torchelastic_launched():
    sys.exit("TorchRec needs ranks to shard over: torchrun --nproc-per-node 2 examples/torchrec_training.py")
torch.distributed.init_process_group("gloo")
transport = connect("process_group", timeout_s=60)
torch.manual_seed(0)
device = torch.device("cpu")
model = shard(Model(), device)
dense = [parameter for name, parameter in model.named_parameters() if "score" in name]
pipeline = TrainPipelineSparseDist(model, torch.optim.Adagrad(dense, lr=0.1), device)

batches = [make_batch(1000 * transport.rank + step) for step in range(40 + 5 * transport.rank)]  # one rank has more
pairs = balance(batches, transport, lengths="pages.uih_page").with_loss_scale()
iterator = scaled(pairs)
losses: list[float] = []
while True:
    try:
        losses.append(float(pipeline.progress(iterator)))
    except StopIteration:
        break
    pairs.trained()  # on the oldest batch that the pipeline has taken
    if len(losses) == 10:  # what a checkpoint needs, beside model and optimizer; goes into the loader's load_state_dict
        state = pairs.state_dict()
        assert state["step"] == 10, "the pipeline is ahead, and its batches come again"

mean = transport.all_gather(torch.tensor([losses])).wait().mean(0)
print(f"rank {transport.rank}: {len(losses)} steps, loss {mean[0]:.3f} -> {mean[-1]:.3f}")
assert mean[-1] < mean[0] / 2
torch.distributed.destroy_process_group()
