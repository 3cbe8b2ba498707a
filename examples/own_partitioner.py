"""A partition function of your own, and the built-in ones to compare it with (paper, section 4.1).

Alone it runs four ranks as threads: python examples/own_partitioner.py. Or launch it with one of
    torchrun --nproc-per-node 2 examples/own_partitioner.py process_group
    mpiexec -n 2 python examples/own_partitioner.py mpi
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from freescale.balancer import (
    Column,
    JaggedBatch,
    Partitioner,
    WorldSamples,
    balance,
    capped,
    greedy_batch_size,
    home_batch_size,
)
from freescale.transport import Transport, connect, local_group


def deal_the_long_ones(world: WorldSamples) -> Tensor:
    """Deal the longest quarter in a zig-zag and leave the rest at home.

    Every rank computes this plan and all must get the same, so it depends on `world` alone.
    """
    owner = world.rank.clone()
    longest = world.uih_lengths.argsort(descending=True, stable=True)[: world.num_samples // 4]
    turn = torch.arange(len(longest))
    row, place = turn // world.world_size, turn % world.world_size
    owner[longest] = torch.where(row % 2 == 0, place, world.world_size - 1 - place)
    return owner


def make_batch(seed: int) -> JaggedBatch:
    """Sixty-four samples with a heavy-tailed history."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(64, generator=generator).exp().mul(100).long()
    return JaggedBatch({"uih_page": Column(torch.zeros(int(lengths.sum()), dtype=torch.int64), (lengths,))})


PARTITIONERS: dict[str, Partitioner] = {
    "deal_the_long_ones": deal_the_long_ones,
    "greedy_batch_size": greedy_batch_size,
    "home_batch_size": home_batch_size(tolerance=0.01),
    "capped": capped(deal_the_long_ones, max_tokens=100_000),
}


def compare(transport: Transport) -> None:
    """Balance the same batches with each partitioner, as one rank."""
    for name, partitioner in PARTITIONERS.items():
        batches = [make_batch(1000 * transport.rank + step) for step in range(3)]
        for _, report in balance(batches, transport, "uih_page", partitioner).with_reports():
            report.loss_scale()
            if transport.rank == 0 and report.step == 0:
                moved = 100 * report.bytes_moved / report.bytes_total
                before, after = report.straggler_before, report.straggler_after
                print(f"{name}: straggler {before:.2f} % -> {after:.3f} %, {moved:.0f} % of the bytes moved")
    print(f"rank {transport.rank}: done")


if len(sys.argv) == 1:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(compare, local_group(4, timeout_s=60)))
elif sys.argv[1] == "process_group":
    torch.distributed.init_process_group("gloo")
    compare(connect("process_group", timeout_s=60))
    torch.distributed.destroy_process_group()
else:
    compare(connect(sys.argv[1], timeout_s=60))
