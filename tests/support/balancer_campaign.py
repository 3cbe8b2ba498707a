"""Every face and partitioner of the balancer over one transport: what comes out is what went in, byte for byte."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper as PipeWrapper
from torchdata.nodes import IterableWrapper, Loader

from freescale.balancer import (
    BalancerNode,
    Column,
    CostModel,
    JaggedBatch,
    VariableBatchSize,
    WorldSamples,
    balance,
    capped,
    fixed_batch_size,
    greedy_batch_size,
    grouped,
    home_batch_size,
    keep_together,
)
from freescale.balancer.partitioners.partition import GreedyBatchSize
from freescale.transport import Transport, connect

DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def random_values(generator: torch.Generator, n: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits, NaNs and all, but for bool."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (n, *shape), generator=generator).to(torch.bool)
    raw = torch.randint(0, 256, (n, *shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(n, *shape)


def batch_of(rank: int, step: int) -> JaggedBatch:
    """A batch with every kind of column; its size, possibly 0, depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    size = (5 * rank + 3 * step) % 7
    uih = torch.randint(0, 40, (size,), generator=generator)
    counts = torch.randint(0, 5, (size,), generator=generator)
    contents = torch.randint(0, 6, (int(counts.sum()),), generator=generator)
    columns = {
        "session": Column(torch.randint(0, 3, (size,), generator=generator)),
        "uih": Column(random_values(generator, int(uih.sum()), torch.int64), (uih,)),
        "editors": Column(random_values(generator, int(contents.sum()), torch.int64), (counts, contents)),
    }
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        columns[f"dense_{name}"] = Column(random_values(generator, size, dtype, 3))
        columns[f"jagged_{name}"] = Column(random_values(generator, int(counts.sum()), dtype, 2), (counts,))
    return JaggedBatch(columns, size)


def digests(batch: JaggedBatch) -> list[int]:
    """One number for all bytes and lengths of each sample."""
    hashes = [hashlib.sha256() for _ in range(batch.batch_size)]
    for name in batch.names:
        column = batch[name]
        raw = column.values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        width = len(raw) // max(len(column.values), 1)
        entry = value = 0
        for sample, digest in enumerate(hashes):
            digest.update(name.encode())
            entries = 1
            if column.levels:
                entries = int(column.levels[0][sample])
                digest.update(b"%d;" % entries)
            values = entries
            if len(column.levels) == 2:
                lengths = column.levels[1][entry : entry + entries].tolist()
                digest.update(repr(lengths).encode())
                values = sum(lengths)
            digest.update(raw[value * width : (value + values) * width])
            entry, value = entry + entries, value + values
    return [int.from_bytes(digest.digest()[:8], "little", signed=True) for digest in hashes]


def num_batches(rank: int, world_size: int) -> int:
    """Ranks run out at different steps; the last of several never has a batch."""
    return 0 if world_size > 1 and rank == world_size - 1 else 3 + rank % 3


def batches_of(rank: int, world_size: int) -> list[JaggedBatch]:
    return [batch_of(rank, step) for step in range(num_batches(rank, world_size))]


def swap(world: WorldSamples) -> Tensor:
    """A custom partition function: everybody's samples go to the next rank."""
    return (world.rank + 1) % world.world_size


def partitioners(world_size: int) -> dict[str, Any]:
    return {
        "fixed": fixed_batch_size,
        "greedy": greedy_batch_size,
        "home": home_batch_size,
        "variable": VariableBatchSize(alpha=1.2),
        "variable, autotuned": VariableBatchSize(alpha=1.0, autotune=True),
        "measured cost": GreedyBatchSize(cost=CostModel()),
        "capped": capped(greedy_batch_size, max_tokens=10_000),
        "grouped": grouped(greedy_batch_size, max(1, world_size // 2)),
        "together": keep_together(greedy_batch_size, "session"),
        "custom": swap,
    }


def wrapped(transport: Transport, partitioner: Any) -> Iterator[JaggedBatch]:
    loader = balance(batches_of(transport.rank, transport.world_size), transport, "uih", partitioner)
    for batch, report in loader.with_reports():
        loader.record_seconds(0.01 * (1 + transport.rank))
        report.loss_scale()
        yield batch


def piped(transport: Transport, partitioner: Any) -> Iterator[JaggedBatch]:
    source: IterDataPipe[Any] = PipeWrapper(batches_of(transport.rank, transport.world_size), deepcopy=False)
    pipe = source.balance(transport, lengths="uih", partitioner=partitioner)
    yield from pipe


def noded(transport: Transport, partitioner: Any) -> Iterator[JaggedBatch]:
    node: BalancerNode = BalancerNode(
        IterableWrapper(batches_of(transport.rank, transport.world_size)), transport, "uih", partitioner
    )
    yield from Loader(node)
    node.close()


def stopped(transport: Transport, partitioner: Any) -> Iterator[JaggedBatch]:
    """As `wrapped`, but stopped after two steps and gone on with by another loader."""
    loader = balance(batches_of(transport.rank, transport.world_size), transport, "uih", partitioner)
    for step, batch in enumerate(loader):
        yield batch
        if step == 1:
            break
    state = loader.state_dict()
    loader.close()
    again = balance(batches_of(transport.rank, transport.world_size), transport, "uih", partitioner)
    again.load_state_dict(state)
    yield from again


FACES: dict[str, Callable[[Transport, Any], Iterator[JaggedBatch]]] = {
    "loader": wrapped,
    "pipe": piped,
    "node": noded,
}


def cases(world_size: int) -> list[tuple[str, Callable[[Transport, Any], Iterator[JaggedBatch]], Any]]:
    """Every face with every partitioner, and stopping and going on with two of them."""
    chosen = partitioners(world_size)
    every = [(f"{f}, {p}", face, chosen[p]) for f, face in FACES.items() for p in chosen]
    return every + [(f"stopped, {p}", stopped, chosen[p]) for p in ("greedy", "variable, autotuned")]


def gather_counts(transport: Transport, ours: list[int]) -> Counter[int]:
    sizes = transport.all_gather(torch.tensor([len(ours)])).wait().tolist()
    return Counter(transport.all_gather(torch.tensor(ours, dtype=torch.int64), sizes).wait().tolist())


def run_campaign(transport: Transport) -> int:
    """Run every face with every partitioner; the number of epochs that were checked."""
    world_size, checked = transport.world_size, 0
    expected = gather_counts(transport, [d for b in batches_of(transport.rank, world_size) for d in digests(b)])
    steps = max(num_batches(rank, world_size) for rank in range(world_size))
    assert sum(expected.values()) > 0
    for name, face, partitioner in cases(world_size):
        got = [digests(batch) for batch in face(transport, partitioner)]
        where = f"{name}, {world_size} ranks"
        assert len(got) == steps, f"{where}: {len(got)} steps instead of {steps}"
        total = gather_counts(transport, [d for step in got for d in step])
        assert total == expected, f"{where}: lost {expected - total}, repeated or damaged {total - expected}"
        checked += 1
    return checked


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "ranks had .*loss_scale")
    if sys.argv[1] == "process_group":
        torch.distributed.init_process_group("gloo")
    campaign_transport = connect(sys.argv[1], timeout_s=100)
    print(f"checked {run_campaign(campaign_transport)} epochs")
    campaign_transport.close()
    if sys.argv[1] == "process_group":
        torch.distributed.destroy_process_group()
