"""What the ranks of `loader_overhead` do: rank 0 runs a launch-bound loop and times it, the others keep it company.

The loop has a core to itself. All else, the other rank and the balancer's thread of this one, shares the others.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..balancer import BalancedLoader, JaggedBatch, Report, balance, read_parquet
from ..transport import Transport, connect
from .launch import rank_main

_SETTLE_S = 0.3  # the balancer fills its queue and falls asleep


@dataclass(frozen=True)
class Settings:
    """What the ranks are told.

    Attributes:
        data: Parquet file with a column uih_page.
        batch_size: Samples that a rank loads in a step.
        step_ms: How long the loop takes by itself.
        block_steps: Steps measured in a row.
        num_blocks: Blocks of either kind.
        transport: "mpi" or "process_group".
    """

    data: str
    batch_size: int
    step_ms: float
    block_steps: int
    num_blocks: int
    transport: str

    @property
    def num_batches(self) -> int:
        """Batches that a rank takes in all; the blocks before the first measured one warm up."""
        return self.block_steps * (self.num_blocks + 1)

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(asdict(self)))


def launch_bound(num_operations: int) -> None:
    """Do nothing but call tiny operations: what a trainer does whose GPU waits for its launches."""
    x = torch.ones(4)
    for _ in range(num_operations):
        x = x.mul(0.5).add_(1.0)


def operations_for(step_ms: float) -> int:
    """Find how many rounds of the loop take so long on a free core."""
    rounds = 2000
    fastest = min(_timed(rounds) for _ in range(20))
    return max(1, round(rounds * step_ms / fastest))


def measure(settings: Settings, batches: Iterator[tuple[JaggedBatch, Report]]) -> dict[str, Any]:
    """Run blocks of steps in turn: beside the sleeping thread, and beside it at work, one batch a step.

    Args:
        settings: Numbers of steps and blocks.
        batches: What the balancer gives; at least `settings.num_batches`.

    Returns:
        Milliseconds of every step's loop, by block: "idle", "beside", and "waited" for the batch in the latter; CPU
        milliseconds of the balancer a step ("balancer_cpu"), and the rounds of the loop.
    """
    rounds = operations_for(settings.step_ms)
    found: dict[str, Any] = {"rounds": rounds, "idle": [], "beside": [], "waited": [], "balancer_cpu": []}
    for block in range(settings.num_blocks + 1):
        time.sleep(_SETTLE_S)
        idle = [_timed(rounds) for _ in range(settings.block_steps)]
        beside, waited = [], []
        elsewhere = _cpu_elsewhere()
        for _ in range(settings.block_steps):
            started = time.perf_counter()
            next(batches)
            waited.append(1e3 * (time.perf_counter() - started))
            beside.append(_timed(rounds))
        if block:
            found["idle"].append(idle)
            found["beside"].append(beside)
            found["waited"].append(waited)
            found["balancer_cpu"].append(1e3 * (_cpu_elsewhere() - elsewhere) / settings.block_steps)
    return found


def _timed(rounds: int) -> float:
    started = time.perf_counter()
    launch_bound(rounds)
    return 1e3 * (time.perf_counter() - started)


def _cpu_elsewhere() -> float:
    """CPU seconds of the other threads of this process."""
    return time.process_time() - time.thread_time()


class _Loaded:
    """Batches in memory, again and again: reading them is the wrapped loader's affair, often that of its workers."""

    def __init__(self, settings: Settings, transport: Transport) -> None:
        source = read_parquet(settings.data, settings.batch_size, rank=transport.rank, world_size=transport.world_size)
        self._batches, self._num_batches = list(source), settings.num_batches

    def __iter__(self) -> Iterator[JaggedBatch]:
        return itertools.islice(itertools.cycle(self._batches), self._num_batches)


def main() -> None:
    """Measure on rank 0; the others take their batches as they come."""
    path = Path(sys.argv[1])
    with rank_main(path):
        torch.set_num_threads(1)
        settings = Settings(**json.loads(path.read_text()))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)  # and that of threads that begin from here
        if settings.transport == "process_group":
            torch.distributed.init_process_group("gloo")
        transport = connect(settings.transport, timeout_s=120)
        loader: BalancedLoader[JaggedBatch] = balance(_Loaded(settings, transport), transport, lengths="uih_page")
        batches = loader.with_reports()
        if transport.rank == 0:
            threading.Thread(target=threading.Event().wait, daemon=True).start()  # so that two threads exist always
            os.sched_setaffinity(0, cores[:1])
            found = {"own_core": len(cores) > 1, **measure(settings, batches)}
            path.with_name("found.json").write_text(json.dumps(found))
        remaining = sum(1 for _ in batches)
        assert transport.rank > 0 or remaining == 0
        transport.close()
        if settings.transport == "process_group":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
