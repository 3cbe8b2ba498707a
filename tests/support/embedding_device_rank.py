"""Long checks of the tables on GPUs: `python embedding_device_rank.py ENGINE [CHECK…]` on the ranks it was started on.

ENGINE is "nccl", "peer", "segment" or "staged"; "cpu" is a dry run over gloo. Ranks may share a GPU, but for NCCL: then
only what is right can be seen, not how long it takes.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from freescale.bench.trace_timeline import read_events, step_times
from freescale.embedding import Adam, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table
from freescale.transport import Transport, connect

from device_contract import connect_device
from embedding_runs import Data, assert_equal, loss_of, train

TABLES = [Table("item", 600, 64, ["clicked", "shown"]), Table("user", 5, 64), Table("shop", 90, 12)]
RULES: list[Any] = [Sgd(lr=0.05), RowwiseAdagrad(lr=0.05), Adam(lr=0.05)]
RATIOS = (0.25, 1.0, 0.0, 0.01, 0.05)  # last what has been shown most often
FEW_STEPS = "FREESCALE_TEST_FEW_STEPS"


def steps_of(usual: int) -> int:
    """How many steps: as many as said, or fewer where the environment asks for a dry run of what takes long."""
    return min(usual, int(os.environ.get(FEW_STEPS, usual)))


def check_two_hundred_steps(transport: Transport, device: str) -> None:
    """Weights, states and losses of 200 steps equal those of the synchronous order, for all ratios and optimizers."""
    for collision in RATIOS:
        for rule in RULES:
            data = Data(TABLES, steps=steps_of(200), num_ids=60, collision=collision, empty=[1])
            options: dict[str, Any] = {"optimizer": rule, "device": device, "look": lambda step: step % 60 == 13}
            ours = train(transport, data, ids_on=device if collision else "cpu", **options)
            theirs = train(transport, data, ahead=0, synchronous=True, **options)
            assert_equal([ours], [theirs])
            print(f"equal: {type(rule).__name__}, {100 * collision:g} % of ids collide, {data.steps} steps", flush=True)


def check_popular_rows(transport: Transport, device: str) -> None:
    """Two tables whose most popular rows recur, thousands of times a batch: so small a rate that they stay finite."""
    data = Data([Table("item", 40, 64), Table("user", 30, 64)], steps=40, num_ids=6000, collision=0.5)
    for rule in (Sgd(lr=1e-4), *RULES[1:]):
        options: dict[str, Any] = {"optimizer": rule, "device": device, "rate": rule.lr}
        ours = train(transport, data, ahead=2, ids_on=device, **options)
        assert_equal([ours], [train(transport, data, ahead=0, synchronous=True, **options)])


class Loop:
    """Two tables of two optimizers, trained on batches that were made before."""

    def __init__(self, transport: Transport, device: str, num_ids: int = 400) -> None:
        tables = [Table("item", 5000, 64), Table("user", 500, 16)]
        rules: dict[str, Any] = {"item": RowwiseAdagrad(lr=0.01), "user": Adam(lr=0.01)}
        self.tables = PrioritizedEmbeddingCollection(tables, transport, optimizer=rules, device=device)
        data = Data(tables, num_ids=num_ids)
        self._batches = [data.batch(transport.rank, step) for step in range(8)]
        if device != "cpu":
            self._batches = [{name: ids.pin_memory() for name, ids in batch.items()} for batch in self._batches]
        self._step = self._ahead = 0

    def step(self) -> None:
        """Prefetch some batches ahead, and train on one."""
        while self._ahead < self._step + 4:
            self.tables.prefetch(self._batches[self._ahead % 8])
            self._ahead += 1
        loss_of(self.tables(self._batches[self._step % 8]), self._step % 7).backward()
        self._step += 1


def check_memory_is_flat(transport: Transport, device: str) -> None:
    """10,000 steps need as much memory, of the GPU and of the host, as 1,000 do."""
    loop, steps, found = Loop(transport, device, num_ids=30), steps_of(10_000), []
    for number in range(steps + 1):
        if number % max(steps // 10, 1) == 0:
            loop.tables.flush()
            gc.collect()
            if device != "cpu":
                torch.cuda.synchronize()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            on_gpu = [] if device == "cpu" else [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
            found.append((number, *on_gpu, round(resident, 1)))
            print(f"memory after {number} steps: {found[-1][1:]} (bytes of the GPU's, MiB of the host's)", flush=True)
        loop.step()
    loop.tables.close()
    early, last = found[1], found[-1]
    assert last[-1] < early[-1] + 16, found
    if device != "cpu":
        assert last[1] <= early[1] + 65_536, found
        assert last[2] <= early[2] + 2**21, found


def check_no_call_synchronises(transport: Transport, device: str) -> None:
    """20 steps in a row, profiled: no runtime call of the trainer's thread waits for the device."""
    loop = Loop(transport, device)
    for _ in range(steps_of(100)):  # until allocators have found their sizes
        loop.step()
    activities = [ProfilerActivity.CPU] if device == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        for number in range(23):
            with record_function(f"step_{number}"):
                loop.step()
        if device != "cpu":
            torch.cuda.synchronize()
    loop.tables.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        if device == "cpu":
            return  # nothing to look at
        times = step_times(read_events(path))
    for wait in times.host_waits:
        print(
            f"{wait.thread} thread: {wait.calls:g} x {wait.call} a step, {wait.ms:.3f} ms, in {wait.where}", flush=True
        )
    waits = [wait for wait in times.waits_of_trainer() if wait.call != "cudaMalloc"]  # which is printed above
    assert not waits, waits
    print(f"none of the trainer's runtime calls synchronises in {times.num_steps} steps", flush=True)


CHECKS = [check_no_call_synchronises, check_two_hundred_steps, check_popular_rows, check_memory_is_flat]


def main(engine: str, *names: str) -> None:
    """Run checks and say which passed."""
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    device = "cpu"
    if engine == "cpu":
        dist.init_process_group("gloo")
        transport: Transport = connect("process_group", timeout_s=60)
    else:
        transport = connect_device("process_group", engine, 60)
        device = f"cuda:{torch.cuda.current_device()}"
        if transport.world_size > torch.cuda.device_count():
            print("ranks share a GPU: this shows what is right, not how long it takes", flush=True)
    failed = 0
    for check in CHECKS:
        if names and check.__name__ not in names:
            continue
        torch.use_deterministic_algorithms(check in (check_two_hundred_steps, check_popular_rows))
        try:
            check(transport.channel(check.__name__), device)
            print(f"passed {check.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
    transport.close()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
