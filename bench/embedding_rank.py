"""What one rank of bench.embedding does: builds the contenders, checks them, and times them in turn (section 5.2)."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from .embedding_batch import Feed, make_ring
from .embedding_check import check
from .embedding_contenders import BUILDERS, Setup, Trainer
from .embedding_settings import Cell, Settings
from .embedding_workload import Workload, bytes_a_step
from .measured_rank import MeasuredRank, run_measured


class Rank(MeasuredRank):
    """One rank of one launch.

    Args:
        settings: What to do.
        folder: Where measurements and traces go.
        rank: This rank.
    """

    def __init__(self, settings: Settings, folder: Path, rank: int) -> None:
        super().__init__(settings.link, settings.device, settings.until, folder, rank)
        self._settings = settings
        self._feed = Feed()

    def run(self) -> None:
        """Do everything, most important first; what there is no time for is said."""
        if self._settings.check:
            self._record("check", results=check(self._setup, self._settings, self._rank))
        for num_tables, cells in groupby(self._settings.cells, key=lambda cell: cell.num_tables):
            trainers: dict[str, Trainer] = {}
            for number, cell in enumerate(cells):
                self._measure(cell, trainers, num_tables, first=number == 0)
            if self._settings.pace.memory_steps and "prioritized" in trainers:
                self._watch_memory(trainers["prioritized"], num_tables)
            for trainer in trainers.values():
                trainer.close()
            trainers.clear()
            self._tidy()
        self._transport.close()

    def _setup(self, num_tables: int) -> Setup:
        sizes = self._settings.sizes
        return Setup(
            self._device, num_tables, sizes.num_rows, sizes.dim, sizes.batch_size, sizes.num_layers, sizes.width,
            torch.bfloat16, 0.01, self._transport,
        )  # fmt: skip

    def _measure(self, cell: Cell, trainers: dict[str, Trainer], num_tables: int, first: bool) -> None:
        """Time all contenders in one workload, in turn, and then trace each."""
        if not self._in_time():
            self._record("skipped", cell=asdict(cell))
            return
        self._record("begun", cell=asdict(cell))
        workload = self._workload(cell)
        ring = make_ring(workload, self._rank, pinned=self._cuda)
        if self._rank == 0:
            found = [workload.collisions(0, table) for table in range(num_tables)]
            urgent = bytes_a_step(found, self._settings.sizes.dim)
            self._record("workload", cell=asdict(cell), urgent_bytes=urgent, tables=[asdict(each) for each in found])
        for turn in range(self._settings.pace.rounds):
            for name in self._settings.contenders:
                if turn == 0 and first:
                    self._build(name, trainers, num_tables)
                if name in trainers and self._in_time():
                    self._feed.use(ring)
                    last = turn == self._settings.pace.rounds - 1
                    with self._leaving_out(name, trainers):
                        self._record("measurement", cell=asdict(cell), contender=name, **self._time(trainers[name]))
                        if last:
                            self._trace(cell, name, trainers[name], first)

    def _workload(self, cell: Cell) -> Workload:
        sizes = self._settings.sizes
        return Workload(
            cell.cut, cell.ratio, self._settings.world_size, sizes.batch_size, sizes.num_rows, cell.num_tables,
            sizes.median, recurring=cell.recurring,
        )  # fmt: skip

    def _build(self, name: str, trainers: dict[str, Trainer], num_tables: int) -> None:
        self._tidy()
        before, started = self._allocated(), time.perf_counter()
        with self._leaving_out(name, trainers):
            trainers[name] = BUILDERS[name](self._setup(num_tables), self._feed)
        built = {"bytes": self._allocated() - before, "seconds": time.perf_counter() - started}
        self._record("built", contender=name, num_tables=num_tables, **built)

    @contextmanager
    def _leaving_out(self, name: str, trainers: dict[str, Trainer]) -> Iterator[None]:
        """Leave out a contender that fails, and say so; the others go on, if it fails on all ranks."""
        try:
            yield
        except Exception:
            trainers.pop(name, None)
            self._record("failed", contender=name, traceback=traceback.format_exc())

    def _time(self, trainer: Trainer) -> dict[str, Any]:
        for _ in range(self._settings.pace.warm_up):
            trainer.step()
        return self._time_steps(trainer.step, self._settings.pace.timed)

    def _trace(self, cell: Cell, name: str, trainer: Trainer, first: bool) -> None:
        """Trace a few steps; more of ours in the first cell, to look for waits of the host."""
        pace = self._settings.pace
        looks_for_waits = first and name == "prioritized"
        steps = max(pace.traced, pace.traced_ours) if looks_for_waits else pace.traced
        if not steps or not self._cuda:
            return
        # Until memory allocators have found their sizes: to allocate in a traced step holds up both ranks.
        for _ in range(pace.traced_ours if looks_for_waits else pace.warm_up):
            trainer.step()
        what = f"{cell.cut}-{cell.ratio}-{cell.num_tables}-{cell.recurring}-{name}"
        self._record("trace", cell=asdict(cell), contender=name, path=str(self._trace_steps(trainer.step, steps, what)))

    def _watch_memory(self, trainer: Trainer, num_tables: int) -> None:
        """Record allocated memory over many small steps."""
        sizes, num_steps = self._settings.sizes, self._settings.pace.memory_steps
        small = Workload(
            min(64, sizes.num_rows // 8), 0.05, self._settings.world_size, sizes.batch_size, sizes.num_rows, num_tables
        )
        self._feed.use(make_ring(small, self._rank, pinned=self._cuda))
        for _ in range(50):
            trainer.step()
        allocated = []
        for number in range(num_steps + 1):
            if number % max(1, num_steps // 20) == 0:
                self._meet()
                allocated.append([number, self._allocated(), _resident_bytes()])
                if not self._in_time():
                    break
            trainer.step()
        self._record("memory", num_tables=num_tables, allocated=allocated)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_rank(path: Path, rank: int, port: int) -> None:
    """Be one rank of the launch that a file of settings describes."""
    run_measured(path, rank, port, Settings.load, Rank)
