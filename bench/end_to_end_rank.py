"""What one rank of bench.end_to_end does: builds the contenders, times them in turn, traces each (section 5.4)."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ..transport import connect
from .embedding_contenders import Setup
from .embedding_rank import process_group
from .embedding_workload import Workload
from .end_to_end_batch import make_ring
from .end_to_end_contenders import BUILDERS, Contender
from .end_to_end_settings import Cell, Settings
from .launch import rank_main

_DEADLINE_S = 60.0  # more than any step takes
_SMALL_TABLE = 1000  # rows, where there is nothing to gain
_AFTER_MEETING = 2  # steps of the warm-up that fill the device's queue again


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

    def run(self) -> None:
        """Do everything, most important first; what there is no time for is said."""
        for even, cells in groupby(self._settings.cells, key=lambda cell: cell.even):
            contenders: dict[str, Contender] = {}
            if self._in_time():
                for name in self._settings.contenders:
                    self._build(name, contenders, even)
            for cell in cells:
                if contenders and self._in_time():
                    self._measure(cell, contenders)
                else:
                    self._record("skipped", cell=asdict(cell))
            contenders.clear()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _build(self, name: str, contenders: dict[str, Contender], even: bool) -> None:
        """Build a contender; one that cannot be built is left out and said."""
        before, started = self._allocated(), time.perf_counter()
        sizes = self._settings.sizes
        num_rows = _SMALL_TABLE if even else sizes.num_rows
        setup = Setup(
            self._device, 1, num_rows, sizes.dim, sizes.batch_size, sizes.num_layers, sizes.width,
            torch.bfloat16, 0.01, self._transport,
        )  # fmt: skip
        try:
            contenders[name] = BUILDERS[name](setup)
        except Exception:
            self._record("failed", contender=name, traceback=traceback.format_exc())
        built = {"bytes": self._allocated() - before, "seconds": time.perf_counter() - started}
        self._record("built", contender=name, **built)

    def _measure(self, cell: Cell, contenders: dict[str, Contender]) -> None:
        """Time all contenders in one workload, in turn; trace each after the last turn."""
        sizes, world_size = self._settings.sizes, self._settings.world_size
        workload = Workload(
            cell.cut, self._settings.ratio, 1, cell.batch_size * world_size,
            _SMALL_TABLE if cell.even else sizes.num_rows,
            median=cell.cut if cell.even else sizes.median, sigma=0.0 if cell.even else 1.0,
        )  # fmt: skip
        ring = make_ring(workload, self._settings.pace.ring, self._rank, world_size, self._device.type == "cuda")
        tokens = [len(step["history"].values) for step in ring.steps]
        self._record("workload", cell=asdict(cell), ids_of_steps=tokens)
        for turn in range(self._settings.pace.rounds):
            for name, contender in contenders.items():
                if not self._in_time():
                    self._record("skipped", cell=asdict(cell), contender=name)
                    continue
                try:
                    contender.use(ring)
                    self._record("measurement", cell=asdict(cell), contender=name, **self._time(contender))
                    if turn == self._settings.pace.rounds - 1:
                        self._trace(cell, name, contender)
                    contender.leave()
                except Exception:
                    self._record("failed", cell=asdict(cell), contender=name, traceback=traceback.format_exc())
                    raise  # other ranks may have gone on: what was measured so far is kept

    def _time(self, contender: Contender) -> dict[str, Any]:
        """Time steps: on the device where there is one, and on the host."""
        pace, cuda = self._settings.pace, self._device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
        losses = [contender.step() for _ in range(pace.warm_up - _AFTER_MEETING)]
        self._meet()
        before = self._allocated()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        losses += [contender.step() for _ in range(_AFTER_MEETING)]
        contender.waited_s.clear()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(pace.timed + 1)] if cuda else []
        host = [time.perf_counter()]
        if cuda:
            events[0].record()
        for number in range(pace.timed):
            losses.append(contender.step())
            host.append(time.perf_counter())
            if cuda:
                events[number + 1].record()
        self._meet()
        host_ms = [1e3 * (b - a) for a, b in pairwise(host)]
        step_ms = [a.elapsed_time(b) for a, b in pairwise(events)] if cuda else host_ms
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        return {
            "step_ms": step_ms, "host_ms": host_ms, "losses": [float(loss) for loss in losses], "peak_bytes": peak,
            "waited_ms": [1e3 * seconds for seconds in contender.waited_s],
        }  # fmt: skip

    def _trace(self, cell: Cell, name: str, contender: Contender) -> None:
        """Profile a few steps and keep the trace for the command to read."""
        steps = self._settings.pace.traced
        if not steps or self._device.type != "cuda":
            return
        threads = _ExperimentalConfig(profile_all_threads=True) if self._settings.all_threads else None
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, experimental_config=threads) as profiler:
            for number in range(steps):
                with record_function(f"step_{number}"):
                    contender.step()
            self._meet()
        path = self._folder / f"trace-{cell.cut}-{cell.batch_size}-{cell.even}-{name}-{self._rank}.json"
        profiler.export_chrome_trace(str(path))
        self._record("trace", cell=asdict(cell), contender=name, path=str(path))

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def _in_time(self) -> bool:
        """Whether another measurement may start; rank 0 decides, so that no rank starts one alone."""
        flag = torch.tensor([int(time.time() < self._settings.until)])
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def _meet(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def _record(self, kind: str, **found: Any) -> None:
        """Append a line to this rank's file at once: a launch that breaks leaves what it has measured."""
        with (self._folder / f"found-{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "link": self._settings.link, "rank": self._rank, **found}) + "\n")


def run_rank(path: Path, rank: int, port: int) -> None:
    """Be one rank of the launch that a file of settings describes."""
    os.environ["RANK"] = str(rank)
    with rank_main(path):
        settings = Settings.load(path)
        with process_group(settings.link, settings.device, settings.world_size, rank, port):
            Rank(settings, path.parent, rank).run()
