"""Balance as a node of torchdata.nodes (paper, section 3.1).

Launch it with one of
    torchrun --nproc-per-node 2 examples/nodes.py process_group
    mpiexec -n 2 python examples/nodes.py mpi
"""

import sys
from typing import Any

import torch
from torchdata.nodes import IterableWrapper, Loader, Mapper

from freescale.balancer import BalancerNode, Column, JaggedBatch
from freescale.transport import connect


def make_batch(seed: int) -> JaggedBatch:
    """Sixteen samples with a jagged history and a dense label."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(16, generator=generator).exp().mul(100).long()
    pages = torch.randint(0, 10_000, (int(lengths.sum()),), generator=generator)
    label = Column(torch.randint(0, 2, (16,), generator=generator))
    return JaggedBatch({"uih_page": Column(pages, (lengths,)), "label": label})


backend = sys.argv[1] if len(sys.argv) > 1 else "local"
if backend == "process_group":
    torch.distributed.init_process_group("gloo")
transport = connect(backend, timeout_s=60)

source = Mapper(IterableWrapper([1000 * transport.rank + i for i in range(4)]), make_batch)
node = BalancerNode(source, transport, lengths="uih_page")
loader: Loader[Any] = Loader(node)

for epoch in range(2):
    steps = 0
    for batch in loader:
        report = node.last_report
        assert report is not None
        assert batch.batch_size == report.batch_size
        steps += 1
    print(f"rank {transport.rank}: epoch {epoch}, {steps} steps")
node.close()
if backend == "process_group":
    torch.distributed.destroy_process_group()
