"""What one rank of bench.embedding does: builds the contenders, checks them, and times them in turn (section 5.2)."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ..transport import connect
from .embedding_batch import Feed, make_ring
from .embedding_check import check
from .embedding_contenders import BUILDERS, Setup, Trainer
from .embedding_settings import LINKS, Cell, Settings
from .embedding_workload import Workload, bytes_a_step
from .launch import rank_main

_DEADLINE_S = 60.0  # more than any step takes


class Rank:
    """One rank of one launch.

    Args:
        settings: What to do.
        folder: Where measurements and traces go.
        rank: This rank.
    """

    def __init__(self, settings: Settings, folder: Path, rank: int) -> None:
        self._settings, self._folder, self._rank = settings, folder, rank
        self._device = torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")
        self._transport = connect("process_group", timeout_s=_DEADLINE_S)
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
        workload = self._workload(cell)
        ring = make_ring(workload, self._rank, pinned=self._device.type == "cuda")
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
        """Time steps: on the device where there is one, and on the host."""
        pace, cuda = self._settings.pace, self._device.type == "cuda"
        for _ in range(pace.warm_up):
            loss = trainer.step()
        self._meet()
        before = self._allocated()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(pace.timed + 1)] if cuda else []
        host = [time.perf_counter()]
        if cuda:
            events[0].record()
        for number in range(pace.timed):
            loss = trainer.step()
            host.append(time.perf_counter())
            if cuda:
                events[number + 1].record()
        self._meet()
        host_ms = [1e3 * (b - a) for a, b in pairwise(host)]
        step_ms = [a.elapsed_time(b) for a, b in pairwise(events)] if cuda else host_ms
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        return {"step_ms": step_ms, "host_ms": host_ms, "loss": float(loss), "peak_bytes": peak}

    def _trace(self, cell: Cell, name: str, trainer: Trainer, first: bool) -> None:
        """Profile a few steps and keep the trace for the command to read."""
        pace = self._settings.pace
        looks_for_waits = first and name == "prioritized"
        steps = max(pace.traced, pace.traced_ours) if looks_for_waits else pace.traced
        if not steps or self._device.type != "cuda":
            return
        for _ in range(pace.traced_ours if looks_for_waits else 0):  # until memory allocators have found their sizes
            trainer.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for number in range(steps):
                with record_function(f"step_{number}"):
                    trainer.step()
            self._meet()
        path = (
            self._folder / f"trace-{cell.cut}-{cell.ratio}-{cell.num_tables}-{cell.recurring}-{name}-{self._rank}.json"
        )
        profiler.export_chrome_trace(str(path))
        self._record("trace", cell=asdict(cell), contender=name, path=str(path))

    def _watch_memory(self, trainer: Trainer, num_tables: int) -> None:
        """Record allocated memory over many small steps."""
        sizes, num_steps = self._settings.sizes, self._settings.pace.memory_steps
        small = Workload(
            min(64, sizes.num_rows // 8), 0.05, self._settings.world_size, sizes.batch_size, sizes.num_rows, num_tables
        )
        self._feed.use(make_ring(small, self._rank, pinned=self._device.type == "cuda"))
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

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def _in_time(self) -> bool:
        """Whether another measurement may start; rank 0 decides, so that no rank starts one alone."""
        flag = torch.tensor([int(time.time() < self._settings.until)])
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def _meet(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.broadcast(torch.zeros(1), 0)
        dist.all_reduce(torch.zeros(1))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def _tidy(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _record(self, kind: str, **found: Any) -> None:
        """Append a line to this rank's file at once: a launch that breaks leaves what it has measured."""
        with (self._folder / f"found-{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "link": self._settings.link, "rank": self._rank, **found}) + "\n")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process_group(link: str, device_type: str, world_size: int, rank: int, port: int) -> Iterator[None]:
    """Enter the process group of all ranks, over a link."""
    os.environ.update(LINKS[link])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    if device_type == "cuda":
        torch.set_num_threads(max(1, min(8, len(os.sched_getaffinity(0)) // world_size)))
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timedelta(seconds=_DEADLINE_S))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=_DEADLINE_S))
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_rank(path: Path, rank: int, port: int) -> None:
    """Be one rank of the launch that a file of settings describes."""
    os.environ["RANK"] = str(rank)
    with rank_main(path):
        settings = Settings.load(path)
        with process_group(settings.link, settings.device, settings.world_size, rank, port):
            Rank(settings, path.parent, rank).run()
