"""What the ranks of `loader_overhead` do: rank 0 runs a launch-bound loop and times it, the others keep it company.

The loop has a core to itself. All else, the other ranks and the balancer's thread of this one, shares the others.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..balancer import BalancedLoader, JaggedBatch, Report, balance, read_parquet
from ..balancer.protocol.step import Posted
from ..transport import Transport, connect
from .launch import rank_main

_SETTLE_S = 0.3  # the balancer fills its queue and falls asleep, and the loop's core takes up its speed


@dataclass(frozen=True)
class Settings:
    """What the ranks are told.

    Attributes:
        data: Parquet file with a column uih_page.
        batch_size: Samples that a rank loads in a step.
        step_ms: How long the loop takes by itself.
        block_steps: Steps of either kind measured in a row.
        num_blocks: Blocks, which are compared in themselves.
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
        """Batches that a rank takes in all; the block before the first measured one warms up, the last one counts."""
        return self.block_steps * (self.num_blocks + 2)

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


@dataclass
class Stage:
    """What the balancer's thread did in one stage, over some steps.

    Attributes:
        cpu_ms: Milliseconds of CPU. Most of it holds the interpreter lock, copies of samples do not.
        sleeps: Times that it gave its core away: naps, and waits for the lock.
        preempted: Times that its core was taken away, maybe while it held the lock: the loop waits for both then.
        calls: Calls that Python makes, of functions in Python and in C; counted only where `Watch.counts` is set.
    """

    cpu_ms: float = 0.0
    sleeps: int = 0
    preempted: int = 0
    calls: int = 0

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        """For `sys.setprofile`."""
        del frame, argument
        self.calls += event in ("call", "c_call")


@dataclass
class Watch:
    """Looks over the shoulder of the balancer's thread.

    Attributes:
        stages: What was done since it was last emptied, by stage.
        counts: Whether calls are counted, which takes time itself.
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    counts: bool = False

    def over(self, run: Generator[Posted | None, None, None]) -> Generator[Posted | None, None, None]:
        """The same run of an epoch, watched between its pauses. A stage lasts from its messages to the next ones."""
        name = "load"
        while True:
            stage = self.stages.setdefault(name, Stage())
            cpu, before = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
            if self.counts:
                sys.setprofile(stage.count)
            posted = next(run, _ENDED)
            sys.setprofile(None)
            stage.cpu_ms += 1e3 * (time.thread_time() - cpu)
            now = resource.getrusage(resource.RUSAGE_THREAD)
            stage.sleeps += now.ru_nvcsw - before.ru_nvcsw
            stage.preempted += now.ru_nivcsw - before.ru_nivcsw
            if posted is _ENDED:
                return
            name = posted.stage if isinstance(posted, Posted) else "load"
            yield posted if isinstance(posted, Posted) else None


_ENDED = object()


def measure(settings: Settings, batches: Iterator[tuple[JaggedBatch, Report]], watch: Watch) -> dict[str, Any]:
    """Run steps in turn: one beside the sleeping thread, one beside it at work, for which a batch is taken.

    So both meet the same machine. Before each block the loop runs unmeasured: a core that has slept is slow at first.

    Args:
        settings: Numbers of steps and blocks.
        batches: What the balancer gives; at least `settings.num_batches`.
        watch: Is over the thread.

    Returns:
        Milliseconds of every step's loop, by block: "idle", "beside", and "waited" for the batch in the latter; CPU
        milliseconds of the other threads a step ("balancer_cpu"), what the balancer's did in the blocks beside it
        ("stages") and in one more, where calls were counted ("counted"), and the rounds of the loop.
    """
    rounds = operations_for(settings.step_ms)
    found: dict[str, Any] = {"rounds": rounds, "idle": [], "beside": [], "waited": [], "balancer_cpu": []}
    for block in range(settings.num_blocks + 1):
        _settle(rounds)
        taken = _block(settings.block_steps, rounds, batches)
        if block:
            for name, value in taken.items():
                found[name].append(value)
        else:
            watch.stages = {}
    found["stages"] = _a_step(watch, settings.block_steps * settings.num_blocks)
    watch.stages, watch.counts = {}, True
    for _ in range(settings.block_steps):
        next(batches)
        time.sleep(settings.step_ms / 1e3)
    found["counted"] = _a_step(watch, settings.block_steps)
    return found


def _settle(rounds: int) -> None:
    until = time.perf_counter() + _SETTLE_S
    while time.perf_counter() < until:
        launch_bound(rounds)


def _block(steps: int, rounds: int, batches: Iterator[tuple[JaggedBatch, Report]]) -> dict[str, Any]:
    """A step beside the sleeping thread, one beside it at work, and so on."""
    idle, beside, waited = [], [], []
    elsewhere = _cpu_elsewhere()
    for _ in range(steps):
        idle.append(_timed(rounds))
        started = time.perf_counter()
        next(batches)
        waited.append(1e3 * (time.perf_counter() - started))
        beside.append(_timed(rounds))
    cpu_ms = 1e3 * (_cpu_elsewhere() - elsewhere) / steps
    return {"idle": idle, "beside": beside, "waited": waited, "balancer_cpu": cpu_ms}


def _a_step(watch: Watch, steps: int) -> dict[str, dict[str, float]]:
    return {
        name: {kind: amount / steps for kind, amount in asdict(stage).items()} for name, stage in watch.stages.items()
    }


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
            watch, worker = Watch(), loader._worker
            assert worker is not None
            worker._run = watch.over(worker._run)
            os.sched_setaffinity(0, cores[:1])
            found = {"own_core": len(cores) > 1, "ranks": transport.world_size, **measure(settings, batches, watch)}
            path.with_name("found.json").write_text(json.dumps(found))
        remaining = sum(1 for _ in batches)
        assert transport.rank > 0 or remaining == 0
        transport.close()
        if settings.transport == "process_group":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
