"""One rank of a training run with balanced batches and prioritized embeddings, in which rank 1 gets into trouble.

A trouble is two words or more: what happens, and where. "kill stage III" ends the process while the samples of step 3
are on their way. "kill-first …" happens to rank 0, which serves the store of the process group.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from freescale.balancer import Column, JaggedBatch, balance, greedy_batch_size, read_parquet
from freescale.balancer.protocol import payload, shuffle
from freescale.balancer.protocol.protocol import Protocol
from freescale.embedding import PrioritizedEmbeddingCollection, Sgd, Table
from freescale.transport import Transport

from standing_still import stand_still

STEPS, AT, IN_TROUBLE = 40, 3, 1
PAGES = 100
ROOM_BYTES = 16 << 20  # that a process may still take once it is to run out of memory
HUGE_BYTES = 64 << 20  # of each sample that has to be copied then


def strike(what: str, pause_s: float) -> None:
    """Let something happen to this process."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "pause":
        stand_still(pause_s)
    if what == "interrupt":
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)  # a thread has raised it: the main thread gets it
    if what == "ctrl":  # -c, where the job was started
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    if what == "raise":
        raise RuntimeError("on fire")
    if what == "exhaust":
        exhaust_memory()
    if what == "fill":
        Path("/dev/full").write_bytes(b"a row group that is kept for the next epoch")


_hoarded: list[Any] = []


def exhaust_memory() -> None:
    """Leave no room for anything large, neither at the system's nor among what Arrow's allocator has reserved."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    with suppress(MemoryError):
        while True:
            _hoarded.append(pa.allocate_buffer(HUGE_BYTES // 2))


def rank_in_trouble(said: str) -> int:
    """To whom it happens."""
    return 0 if "-first" in said else IN_TROUBLE


class Trouble:
    """What happens on this rank, and where.

    Args:
        said: As in the module's text; "" for none.
        rank: This rank.
        pause_s: How long "pause" stops the process.
    """

    def __init__(self, said: str, rank: int, pause_s: float) -> None:
        self.what, _, self.where = said.partition(" ")
        self.here = rank == rank_in_trouble(said) or self.what == "interrupt-all"
        self._pause_s, self._done = pause_s, False

    def at(self, where: str, step: int) -> None:
        """Let it happen if this is the place, once."""
        if self.here and where == self.where and step == AT and not self._done:
            self._done = True
            strike(self.what.partition("-")[0], self._pause_s)

    def spoils(self, step: int) -> bool:
        """Whether the batch of this step is to be a strange one."""
        return self.here and self.what in ("spoil", "exhaust") and step == AT

    def plant(self) -> None:
        """Reach into the stages, which have no hooks for this."""
        if not self.here:
            return
        wait, pack, trouble = Protocol._wait, payload.pack, self
        packed: list[int] = []

        def wait_in_trouble(protocol: Protocol, work: Any, stage: str) -> Any:
            name = " ".join(stage.split()[:2]) if stage.startswith("stage") else stage.split()[0]
            trouble.at(name, AT if name == "hello" else protocol.step)  # which is said once
            return wait(protocol, work, stage)

        def pack_in_trouble(*arguments: Any) -> Any:
            packed.append(1)
            trouble.at("packing", len(packed) - 1)
            return pack(*arguments)

        setattr(Protocol, "_wait", wait_in_trouble)  # noqa: B010 - for checkers of types, who would not have it
        setattr(shuffle, "pack", pack_in_trouble)  # noqa: B010


def make_batch(rank: int, step: int) -> JaggedBatch:
    """Two samples with a history of pages, a label, and candidates with content."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(1, 9, (2,), generator=generator)
    pages = torch.randint(0, PAGES, (int(lengths.sum()),), generator=generator)
    counts = torch.tensor([2, 1])
    inner = torch.tensor([1, 2, 3])
    return JaggedBatch(
        {
            "label": Column(torch.tensor([0.0, 1.0])),
            "uih": Column(pages, (lengths,)),
            "content": Column(torch.arange(6, dtype=torch.uint8), (counts, inner)),
        },
        2,
    )


class Batches(IterableDataset[JaggedBatch]):
    """This rank's batches."""

    def __init__(self, rank: int, trouble: Trouble) -> None:
        self.rank, self.trouble = rank, trouble

    def __iter__(self) -> Iterator[JaggedBatch]:
        for step in range(STEPS):
            self.trouble.at("loader", step)
            self.trouble.at("worker", step)
            yield self.strange_batch() if self.trouble.spoils(step) else make_batch(self.rank, step)

    def huge_batch(self) -> JaggedBatch:
        """The longest samples, so that they move, which cannot be copied once there is no memory."""
        sizes = torch.tensor([HUGE_BYTES, HUGE_BYTES])
        content = Column(torch.zeros(2 * HUGE_BYTES, dtype=torch.uint8), (torch.tensor([1, 1]), sizes))
        uih = Column(torch.arange(90), (torch.tensor([50, 40]),))
        return JaggedBatch({**make_batch(self.rank, AT).columns, "content": content, "uih": uih}, 2)

    def strange_batch(self) -> Any:
        """A batch that the adapter refuses, that is huge, or with an id that no table has."""
        if self.trouble.what == "exhaust":
            return self.huge_batch()
        if self.trouble.where == "adapter":
            return {"uih": torch.tensor([1.0])}
        columns = make_batch(self.rank, AT).columns
        return JaggedBatch({**columns, "uih": Column(torch.tensor([1, PAGES]), (torch.tensor([1, 1]),))}, 2)


def write_pages(path: Path) -> None:
    """A Parquet file of row groups of two samples, dealt to three ranks in turn."""
    rows = [make_batch(k % 3, k // 3) for k in range(3 * STEPS)]
    table = pa.concat_tables([batch.to_arrow() for batch in rows])
    pq.write_table(table, path, row_group_size=2, compression="zstd")


def spoil(path: Path, how: str) -> None:
    """Damage row group 10, rank 1's at step 3, or leave of the file what a full disk does."""
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
        return
    column = pq.ParquetFile(path).metadata.row_group(3 * AT + IN_TROUBLE).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)


def open_source(transport: Transport, trouble: Trouble, folder: Path) -> Any:
    """The loader that the trouble is about."""
    rank = transport.rank
    if trouble.where == "worker":
        return DataLoader(Batches(rank, trouble), batch_size=None, num_workers=1)
    if trouble.what in ("corrupt", "truncated"):
        path = folder / f"pages-{rank}.parquet"
        write_pages(path)
        if trouble.here:
            spoil(path, trouble.what)
        return read_parquet(path, batch_size=2, rank=rank, world_size=transport.world_size)
    return Batches(rank, trouble)


def train(transport: Transport, said: str, folder: Path, pause_s: float = 1.5) -> None:
    """Train to the end, or until trouble stops it. Errors come out; threads and channels of this rank are ended.

    Args:
        transport: This rank's.
        said: The trouble.
        folder: For files.
        pause_s: How long "pause" stops the process.
    """
    warnings.filterwarnings("ignore", "ranks had .*loss_scale")
    trouble = Trouble(said, transport.rank, pause_s)
    trouble.plant()
    planned: list[int] = []

    def partition(world: Any) -> Any:
        trouble.at("partitioner", len(planned))
        planned.append(1)
        return greedy_batch_size(world)

    tables = PrioritizedEmbeddingCollection([Table("uih", PAGES, 8)], transport, optimizer=Sgd(lr=0.1))
    loader = balance(open_source(transport, trouble, folder), transport, "uih", partition)
    try:
        run_steps(loader, tables, trouble)
    except Exception:
        if not trouble.here:  # whoever fails just ends
            tables.close()
            loader.close()
        raise
    tables.close()


def run_steps(loader: Any, tables: PrioritizedEmbeddingCollection, trouble: Trouble) -> None:
    """The loop of a trainer that takes one batch ahead and announces it."""
    dense = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    batches = iter(loader)
    current = next(batches, None)
    step = 0
    while current is not None:
        upcoming = next(batches, None)
        if upcoming is not None:
            tables.prefetch({"uih": upcoming["uih"].values})
        trouble.at("prefetch", step)
        rows = tables({"uih": current["uih"].values})["uih"]
        trouble.at("forward", step)
        loss = dense(rows).square().sum()
        loss.register_hook(lambda gradient, step=step: trouble.at("backward", step))
        optimizer.zero_grad()
        loss.backward()
        trouble.at("optimizer", step)
        optimizer.step()
        current, step = upcoming, step + 1


def report(transport: Transport, said: str, folder: Path, pause_s: float = 1.5) -> None:
    """Train, and say what became of it: on the ranks that are not in trouble themselves errors are caught."""
    begun = time.monotonic()
    try:
        train(transport, said, folder, pause_s)
    except Exception as error:
        told = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        print(f"raised {told} | after {time.monotonic() - begun:.1f} s", flush=True)
        if transport.rank == rank_in_trouble(said):
            raise
    else:
        print("trained to the end", flush=True)
    transport.close()
    gone = time.monotonic() + 30
    while time.monotonic() < gone and threading.active_count() > 1:
        time.sleep(0.01)
    print("threads left:", [thread.name for thread in threading.enumerate()][1:], flush=True)
