"""Wrap a DataLoader in one line; the batches keep their type (paper, section 3.1).

Launch it with one of
    torchrun --nproc-per-node 2 examples/wrap_dataloader.py process_group
    mpiexec -n 2 python examples/wrap_dataloader.py mpi
As root, and with fewer cores than ranks, Open MPI wants more options: see docs/transports.md.
"""

import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from freescale.balancer import balance
from freescale.transport import connect

NUM_SAMPLES = 512


class Histories(Dataset[tuple[Tensor, int]]):
    """Users with heavy-tailed histories of page ids."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randn(NUM_SAMPLES, generator=generator).mul(0.9).exp().mul(200).long()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, user: int) -> tuple[Tensor, int]:
        return torch.full((int(self.lengths[user]),), user), user


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A jagged feature as two plain tensors: all values, and how many belong to each sample."""
    pages, users = zip(*samples, strict=True)
    lengths = torch.tensor([len(page) for page in pages])
    return {"page": torch.cat(pages), "page_lengths": lengths, "user": torch.tensor(users)}


backend = sys.argv[1] if len(sys.argv) > 1 else "local"
if backend == "process_group":
    torch.distributed.init_process_group("gloo")
transport = connect(backend, timeout_s=60)

sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
    Histories(), transport.world_size, transport.rank, shuffle=False
)
dataloader = DataLoader(Histories(), batch_size=32, sampler=sampler, collate_fn=collate)
loader = balance(dataloader, transport, lengths="page", jagged={"page": "page_lengths"})  # the one line

for batch, report in loader.with_reports():
    users = batch["user"].repeat_interleave(batch["page_lengths"])
    assert torch.equal(batch["page"], users), "each history is still beside its user"
    if report.step < 3 and transport.rank == 0:
        print(f"step {report.step}: tokens a rank {report.tokens_before} -> {report.tokens_after}")
print(f"rank {transport.rank}: done after {report.step + 1} steps")
if backend == "process_group":
    torch.distributed.destroy_process_group()
