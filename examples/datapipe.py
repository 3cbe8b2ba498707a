"""Balance as a stage of a DataPipe, on batches that are plain tensors and nested tensors (paper, section 3.1).

Launch it with one of
    torchrun --nproc-per-node 2 examples/datapipe.py process_group
    mpiexec -n 2 python examples/datapipe.py mpi
"""

import sys
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import freescale.balancer  # noqa: F401  # makes `.balance` known to DataPipes
from freescale.transport import connect


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Sixteen samples; the history is a nested tensor of the jagged layout."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(16, generator=generator).exp().mul(100).long() + 1
    history = [torch.randint(0, 10_000, (int(n),), generator=generator) for n in lengths]
    return {
        "history": torch.nested.nested_tensor(history, layout=torch.jagged),
        "clicked": torch.randint(0, 2, (16,), generator=generator),
    }


backend = sys.argv[1] if len(sys.argv) > 1 else "local"
if backend == "process_group":
    torch.distributed.init_process_group("gloo")
transport = connect(backend, timeout_s=60)

seeds = [1000 * transport.rank + step for step in range(5)]
pipe: IterDataPipe[Any] = IterableWrapper(seeds).map(make_batch).balance(transport, lengths="history")

steps = 0
for batch, report in pipe.with_reports():
    assert batch["history"].is_nested
    assert batch["history"].values().numel() == report.tokens_after[transport.rank]
    assert report.imbalance_after <= report.imbalance_before
    steps += 1
print(f"rank {transport.rank}: done after {steps} steps")
if backend == "process_group":
    torch.distributed.destroy_process_group()
