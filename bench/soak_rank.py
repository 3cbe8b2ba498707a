"""What the ranks of `soak` do: balance and train tiny batches for ever, and look at themselves now and then."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..balancer import BalancedLoader, Column, JaggedBatch, balance
from ..embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
from ..transport import Transport, connect
from .launch import rank_main

_PAGES = 2000


@dataclass(frozen=True)
class Settings:
    """What the ranks are told.

    Attributes:
        steps: Steps to run, at most; epochs are run whole.
        seconds: Time to run, about; looked at between epochs.
        epoch_steps: Batches of a rank in an epoch.
        looks: How often to look in all, evenly.
        transport: "mpi" or "process_group".
    """

    steps: int
    seconds: float
    epoch_steps: int
    looks: int
    transport: str


@dataclass(frozen=True)
class Look:
    """What a rank holds at one moment.

    Attributes:
        step: Steps done.
        seconds: Since the beginning.
        memory_bytes: Resident memory.
        threads: Of Python and of libraries.
        files: Open file descriptors.
        pinned_bytes: Pinned memory that torch holds; 0 without a GPU.
    """

    step: int
    seconds: float
    memory_bytes: int
    threads: int
    files: int
    pinned_bytes: int

    @classmethod
    def now(cls, step: int, begun: float) -> Look:
        """Look at this process."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_available() else 0
        threads, files = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("task", "fd"))
        return cls(step, time.monotonic() - begun, resident, threads, files, pinned)


class _Batches:
    """Batches of one to four samples, other ones each epoch; ids say which sample of which rank they are."""

    def __init__(self, rank: int, num: int) -> None:
        self._rank, self._num, self._epoch = rank, num + 3 * rank, 0

    def __iter__(self) -> Iterator[JaggedBatch]:
        generator = torch.Generator().manual_seed(1000 * self._epoch + self._rank)
        self._epoch += 1
        first = self._rank << 32
        for _ in range(self._num):
            size = int(torch.randint(1, 5, (), generator=generator))
            lengths = torch.randint(0, 20, (size,), generator=generator)
            pages = torch.randint(0, _PAGES, (int(lengths.sum()),), generator=generator)
            yield JaggedBatch(
                {"id": Column(torch.arange(first, first + size)), "page": Column(pages, (lengths,))}, size
            )
            first += size
            self.loaded = first - (self._rank << 32)


class Soaking:
    """One rank's run.

    Args:
        settings: How long.
        transport: This rank's.
    """

    def __init__(self, settings: Settings, transport: Transport) -> None:
        self._settings, self._transport = settings, transport
        self._batches = _Batches(transport.rank, settings.epoch_steps)
        self._loader: BalancedLoader[JaggedBatch] = balance(self._batches, transport, lengths="page")
        tables = [Table("page", _PAGES, 8)]
        self._tables = PrioritizedEmbeddingCollection(tables, transport, optimizer=RowwiseAdagrad(lr=0.01))
        self._checks = transport.channel("soak")
        self._begun = time.monotonic()
        self.looks: list[Look] = []
        self.step = self.epochs = self.samples = 0

    def run(self) -> None:
        """Run epochs until one of the limits is reached."""
        every = max(1, self._settings.steps // self._settings.looks)
        going = True
        while going:
            sums = torch.zeros(2, dtype=torch.int64)
            current: JaggedBatch | None = None
            for upcoming in self._loader:
                self._tables.prefetch({"page": upcoming["page"].values})
                self._train(current, sums)
                current = upcoming
                if self.step % every == 0:
                    self.looks.append(Look.now(self.step, self._begun))
            self._train(current, sums)
            self.epochs += 1
            self._check(sums)
            late = time.monotonic() - self._begun > self._settings.seconds
            over = torch.tensor([late or self.step >= self._settings.steps])
            going = not bool(self._checks.all_gather(over).wait().any())
        self.looks.append(Look.now(self.step, self._begun))
        self._tables.close()

    def _train(self, batch: JaggedBatch | None, sums: torch.Tensor) -> None:
        if batch is None:
            return
        rows = self._tables({"page": batch["page"].values})["page"]
        rows.square().sum().backward()
        ids = batch["id"].values
        sums += torch.stack([torch.tensor(len(ids)), ids.sum()])
        self.step += 1

    def _check(self, sums: torch.Tensor) -> None:
        """Samples of all ranks come once: their number, and the sum of what names them."""
        loaded, first = self._batches.loaded, self._transport.rank << 32
        given = torch.tensor([loaded, loaded * first + loaded * (loaded - 1) // 2])
        taken, wanted = self._checks.all_gather(torch.stack([sums, given]).unsqueeze(0)).wait().sum(0)
        if not torch.equal(taken, wanted):
            raise RuntimeError(f"epoch {self.epochs}: loaded {wanted.tolist()}, trained on {taken.tolist()}")
        self.samples += int(sums[0])


def main() -> None:
    """Run, and leave what was seen beside the settings."""
    path = Path(sys.argv[1])
    with rank_main(path):
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "ranks had .*loss_scale")
        settings = Settings(**json.loads(path.read_text()))
        if settings.transport == "process_group":
            torch.distributed.init_process_group("gloo")
        transport = connect(settings.transport, timeout_s=300)
        soaking = Soaking(settings, transport)
        soaking.run()
        found = {"steps": soaking.step, "epochs": soaking.epochs, "samples": soaking.samples}
        found_looks = {**found, "looks": [asdict(look) for look in soaking.looks]}
        path.with_name(f"found-{transport.rank}.json").write_text(json.dumps(found_looks))
        transport.close()
        if settings.transport == "process_group":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
