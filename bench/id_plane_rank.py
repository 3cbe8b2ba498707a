"""What the ranks of `id_plane` do: rank 0 runs a launch-bound loop and times it, the others only plan their batches.

The loop has a core to itself. All else, the other ranks and the id plane's threads of this one, shares the others.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..embedding.forms import Layout
from ..embedding.host_ids import HostIds
from ..embedding.planner import Planner, Slot
from ..embedding.stages import Batch
from ..embedding.tables import Table
from ..transport import Transport, connect
from .embedding_workload import NUM_CLASSES, Workload
from .launch import rank_main
from .loader_overhead_rank import launch_bound, operations_for

_AHEAD = 4  # batches, as in `PrioritizedLoop`
_SETTLE_S = 0.4  # until what was prefetched is planned
_COUNTED = 8
_THREAD = "freescale-embedding-"


@dataclass(frozen=True)
class Settings:
    """What the ranks are told.

    Attributes:
        cut: Longest history, in ids.
        ratio: Share of distinct rows that collide.
        num_tables: Tables of 10,000,000 rows, in one group.
        step_ms: How long the loop takes by itself.
        block_steps: Steps measured in a row.
        num_blocks: Blocks of either kind.
    """

    cut: int
    ratio: float
    num_tables: int
    step_ms: float
    block_steps: int
    num_blocks: int

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(asdict(self)))


class Plane:
    """The id plane of a rank, on batches of known collisions.

    Args:
        settings: Which batches.
        transport: A channel for it.
    """

    def __init__(self, settings: Settings, transport: Transport) -> None:
        world_size = transport.world_size
        workload = Workload(settings.cut, settings.ratio, world_size, num_tables=settings.num_tables)
        tables = range(settings.num_tables)
        self._ring = [
            [workload.global_ids(step, table)[transport.rank] for table in tables] for step in range(NUM_CLASSES)
        ]
        self.num_ids = sum(map(len, self._ring[0]))
        layout = Layout([Table(f"table_{i}", workload.num_rows, 128) for i in tables], transport.rank, world_size)
        slots = [Slot(f"table_{i}", 0, i, 0) for i in tables]
        self._planner = Planner(transport, [layout], slots, torch.device("cpu"), {})
        self._ahead: deque[Batch] = deque()
        self._numbers = count()

    def step(self) -> None:
        """Have as many batches on their way as a trainer, and wait for two, as a forward does."""
        while len(self._ahead) <= _AHEAD:
            ids = self._ring[next(self._numbers) % NUM_CLASSES]
            self._ahead.append(self._planner.prefetch(HostIds(ids)))
        self._planner.wait(self._ahead.popleft())
        self._planner.wait(self._ahead[0])

    def close(self) -> None:
        """End its threads."""
        self._planner.close()


def measure(settings: Settings, transport: Transport, cores: list[int]) -> dict[str, Any]:
    """Run blocks of steps in turn: beside sleeping threads, and beside the id plane at work, one batch a step.

    Args:
        settings: Numbers of steps and blocks, and which batches.
        transport: The ranks.
        cores: The first is for the loop.

    Returns:
        Milliseconds of every step's loop, by block: "idle", "beside", and "waited" for plans in the latter; how often
        the loop's thread slept in them ("idle_sleeps", "beside_sleeps"), since another had the interpreter; CPU
        milliseconds that each thread of the id plane took a step ("threads"); calls that Python made in each for a
        batch ("calls"); the rounds of the loop ("rounds") and the ids of a batch ("ids"). Other ranks: nothing.
    """
    plane, leads = Plane(settings, transport.channel("measured")), transport.rank == 0
    if leads:  # the threads have begun, with the other cores
        os.sched_setaffinity(0, cores[:1])
    rounds = operations_for(settings.step_ms) if leads else 0
    kinds: tuple[str, ...] = ("idle", "beside", "waited", "idle_sleeps", "beside_sleeps")
    found: dict[str, Any] = {"rounds": rounds, "ids": plane.num_ids} | {kind: [] for kind in kinds}
    threads: Counter[str] = Counter()
    for block in range(settings.num_blocks + 1):
        time.sleep(_SETTLE_S)
        idle = [_timed(rounds) for _ in range(settings.block_steps)] if leads else []
        dist.barrier()
        before, waited, beside = _cpu_of_threads(), [], []
        for _ in range(settings.block_steps):
            started = time.perf_counter()
            plane.step()
            waited.append(1e3 * (time.perf_counter() - started))
            beside.append(_timed(rounds))
        if block:  # the one before warms up
            steps = [step for step, _ in idle], [step for step, _ in beside], waited
            sleeps = [each for _, each in idle], [each for _, each in beside]
            for kind, values in zip(kinds, (*steps, *sleeps), strict=True):
                found[kind].append(values)
            threads.update({name: 1e3 * (spent - before[name]) for name, spent in _cpu_of_threads().items()})
    found["threads"] = {name: spent / settings.num_blocks / settings.block_steps for name, spent in threads.items()}
    plane.close()
    found["calls"] = _count_calls(settings, transport.channel("counted"))
    return found


def _count_calls(settings: Settings, transport: Transport) -> dict[str, float]:
    """Calls of functions in Python and in C, by thread, for one batch."""
    calls: Counter[str] = Counter()

    def look(frame: FrameType, event: str, argument: object) -> None:
        del frame, argument
        if event in ("call", "c_call"):
            calls[threading.current_thread().name] += 1

    threading.setprofile(look)  # of threads that begin from here
    plane = Plane(settings, transport)
    threading.setprofile(None)
    for _ in range(_AHEAD):
        plane.step()
    time.sleep(_SETTLE_S)
    calls.clear()
    for _ in range(_COUNTED):
        plane.step()
    time.sleep(_SETTLE_S)
    plane.close()
    return {_stage(name): number / _COUNTED for name, number in calls.items() if name.startswith(_THREAD)}


def _cpu_of_threads() -> dict[str, float]:
    """CPU seconds so far of each thread of the id plane."""
    return {
        _stage(thread.name): time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith(_THREAD) and thread.ident is not None
    }


def _stage(name: str) -> str:
    return name.removeprefix(_THREAD)


def _timed(rounds: int) -> tuple[float, int]:
    """Milliseconds of the loop, and how often its thread slept: it waits for nothing but the interpreter."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    launch_bound(rounds)
    took, after = 1e3 * (time.perf_counter() - started), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return took, after - before


def main() -> None:
    """Measure on rank 0; the others plan their batches as it does."""
    path = Path(sys.argv[1])
    with rank_main(path):
        torch.set_num_threads(1)
        settings = Settings(**json.loads(path.read_text()))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)  # and that of threads that begin from here
        dist.init_process_group("gloo")
        transport = connect("process_group", timeout_s=120)
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # so that two threads exist always
        found = measure(settings, transport, cores)
        if transport.rank == 0:
            about = {"own_core": len(cores) > 1, "ranks": transport.world_size}
            path.with_name("found.json").write_text(json.dumps(about | found))
        dist.barrier()
        transport.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
