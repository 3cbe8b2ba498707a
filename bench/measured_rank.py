"""What ranks of bench.embedding and bench.end_to_end do alike: meet, time and trace steps, note it (section 5)."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ..transport import connect
from .embedding_settings import LINKS
from .launch import rank_main

_DEADLINE_S = 60.0  # more than any step takes


class MeasuredRank:
    """One rank of one launch.

    Args:
        link: A name in `embedding_settings.LINKS`.
        device_type: "cuda" or "cpu".
        until: No measurement starts after that time (of `time.time`).
        folder: Where measurements and traces go.
        rank: This rank.
    """

    def __init__(self, link: str, device_type: str, until: float, folder: Path, rank: int) -> None:
        self._link, self._until, self._folder, self._rank = link, until, folder, rank
        self._device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
        self._cuda = device_type == "cuda"
        self._transport = connect("process_group", timeout_s=_DEADLINE_S)

    def _time_steps(self, step: Callable[[], Tensor], count: int, filling: int = 0) -> dict[str, Any]:
        """Time steps, on the device where there is one and on the host.

        Args:
            step: Does one and returns its loss.
            count: How many are timed.
            filling: Steps between the ranks' meeting and the first timed one, which fill the device's queue.
        """
        self._meet()
        before = self._allocated()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        losses = [step() for _ in range(filling)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] if self._cuda else []
        host = [time.perf_counter()]
        if self._cuda:
            events[0].record()
        for number in range(count):
            losses.append(step())
            host.append(time.perf_counter())
            if self._cuda:
                events[number + 1].record()
        self._meet()
        host_ms = [1e3 * (b - a) for a, b in pairwise(host)]
        return {
            "step_ms": [a.elapsed_time(b) for a, b in pairwise(events)] if self._cuda else host_ms,
            "host_ms": host_ms,
            "losses": [float(loss) for loss in losses],
            "peak_bytes": torch.cuda.max_memory_allocated() - before if self._cuda else 0,
        }

    def _trace_steps(self, step: Callable[[], Tensor], count: int, name: str, *, all_threads: bool = False) -> Path:
        """Profile steps on a GPU; returns where the trace is, for the command to read."""
        threads = _ExperimentalConfig(profile_all_threads=True) if all_threads else None
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, experimental_config=threads) as profiler:
            for number in range(count):
                with record_function(f"step_{number}"):
                    step()
            self._meet()
        path = self._folder / f"trace-{name}-{self._rank}.json"
        profiler.export_chrome_trace(str(path))
        return path

    def _in_time(self) -> bool:
        """Whether another measurement may start; rank 0 decides, so that no rank starts one alone."""
        flag = torch.tensor([int(time.time() < self._until)])
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def _meet(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0

    def _tidy(self) -> None:
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def _record(self, kind: str, **found: Any) -> None:
        """Append a line to this rank's file at once: a launch that breaks leaves what it has measured."""
        with (self._folder / f"found-{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "link": self._link, "rank": self._rank, **found}) + "\n")


@contextmanager
def process_group(link: str, device_type: str, world_size: int, rank: int, port: int) -> Iterator[None]:
    """Enter the process group of all ranks, over a link; over what NCCL takes by itself if the name is none of them."""
    os.environ.update(LINKS.get(link, {}))
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


def run_measured(
    path: Path, rank: int, port: int, settings_of: Callable[[Path], Any], make: Callable[..., Any]
) -> None:
    """Be a rank of the launch whose settings lie at a path; what goes wrong is written beside them.

    Args:
        path: Of the settings.
        rank: This rank.
        port: Where ranks meet.
        settings_of: Reads the settings: `link`, `device`, `world_size` and what `make` needs.
        make: Makes what is `run()`, of the settings, their folder and the rank.
    """
    os.environ["RANK"] = str(rank)
    with rank_main(path):
        settings = settings_of(path)
        with process_group(settings.link, settings.device, settings.world_size, rank, port):
            make(settings, path.parent, rank).run()
