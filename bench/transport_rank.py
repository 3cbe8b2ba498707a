"""One rank of bench.transport: link limits, latency and bandwidth, contention (paper, section 5.3)."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..transport import Transport, connect
from .contention import Block, measure
from .launch import rank_main
from .transport_ways import Begin, agree, is_right, largest, make_ways, to_others, together

_LIMIT_BYTES = 256 << 20
_REPEATS = 5
_BUDGET_S = 0.04
BY_THE_HOST = "D2H and H2D at once"
BETWEEN_GPUS = ("peer copy, all GPUs at once", "copy within the GPU, all ranks at once")


@dataclass(frozen=True)
class Settings:
    """What the ranks are to measure.

    Attributes:
        ways: Names for `make_ways`.
        sizes: Bytes that a rank sends to the others, for latency and bandwidth.
        contended: Names of the ways to run beside compute.
        swept: Names of more ways, for `sweep_hidden` alone.
        sequences: Sequence lengths of the workload.
        hiddens: Widths of the workload.
        sweep_hidden: Width at which `swept` run too.
        steps: Timed steps of each workload.
        limit_s: What the user asked for, in seconds.
        until: No measurement is begun after this time, as `time.time()` tells it.
    """

    ways: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    contended: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()
    sequences: tuple[int, ...] = ()
    hiddens: tuple[int, ...] = ()
    sweep_hidden: int = 512
    steps: int = 6
    limit_s: float = 600.0
    until: float = math.inf


@dataclass(frozen=True)
class Transfer:
    """One way with one size.

    Attributes:
        way: Its name.
        size_bytes: What a rank sends to the others.
        correct: Whether the right bytes arrived; otherwise nothing was timed.
        latency_us: From call to arrival, one at a time, the host's work included.
        flight_us: A message when four are under way.
        host_us: What the call and the wait cost the host.
    """

    way: str
    size_bytes: int
    correct: bool
    latency_us: float = 0.0
    flight_us: float = 0.0
    host_us: float = 0.0


def main(path: Path) -> None:
    """Measure and, on rank 0, write `found.json` beside the settings."""
    settings = Settings(**json.loads(path.read_text()))

    def has_time() -> bool:
        return time.time() < settings.until

    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(dist.get_rank() % num_gpus)
    base = connect("process_group", timeout_s=60)
    found: dict[str, object] = {"limits": _limits(base) if settings.sizes else {}}
    names = dict.fromkeys([*settings.ways, *settings.contended, *settings.swept])
    every = make_ways(list(names), base)
    transfers: list[Transfer] = []
    for name in settings.ways:
        if not agree(has_time()):
            break
        transfers += _transfers(name, every[name], base, settings.sizes, has_time)
        found["transfers"] = [asdict(each) for each in transfers]
        _write(path, base, found)
    rows: list[dict[str, object]] = []
    for hidden, sequence in _places(settings):
        if not agree(has_time()):
            break
        swept = settings.swept if hidden == settings.sweep_hidden else ()
        ways = {name: every[name] for name in (*settings.contended, *swept)}
        block = Block(sequence, hidden, computes=base.rank < num_gpus)
        place = (sequence, hidden)
        rows += map(asdict, measure(block, place, ways, base.rank, base.world_size, settings.steps, has_time))
        del block
        found["contention"] = rows
        _write(path, base, found)
        _say(base, f"sequence {sequence}, hidden {hidden}: done")
    _write(path, base, {"transfers": [], "contention": [], **found})  # also where there was no time for anything
    agree(True)
    dist.destroy_process_group()  # or gloo's thread may still be about to free what was agreed on when Python ends


def _places(settings: Settings) -> list[tuple[int, int]]:
    """Widths and sequence lengths, those with the most ways first."""
    widths = sorted(settings.hiddens, key=lambda hidden: hidden != settings.sweep_hidden)
    return [(hidden, sequence) for hidden in widths for sequence in settings.sequences]


def _say(base: Transport, text: str) -> None:
    if base.rank == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _write(path: Path, base: Transport, found: dict[str, object]) -> None:
    if base.rank == 0:
        path.with_name("found.json").write_text(json.dumps(found))


def _transfers(
    name: str, begin: Begin, base: Transport, sizes: Sequence[int], has_time: Callable[[], bool]
) -> list[Transfer]:
    found = []
    for size in sizes:
        if not agree(has_time()):
            break
        try:
            right = is_right(begin, base.rank, base.world_size, size)
            found.append(_timed(name, begin, base, size) if right else Transfer(name, size, correct=False))
        except RuntimeError as error:  # the channel is lost, and with it the larger sizes of this way
            _say(base, f"{name}, {size} bytes: {error}")
            break
    _say(base, f"{name}: done")
    return found


def _timed(name: str, begin: Begin, base: Transport, size: int) -> Transfer:
    splits = to_others(base.rank, base.world_size, size)
    rows = torch.zeros(sum(splits), dtype=torch.uint8, device="cuda")
    outs = [torch.empty_like(rows) for _ in range(4)]

    def take_once() -> float:
        clock = time.perf_counter()
        begin(rows, splits, splits, outs[0])()
        torch.cuda.synchronize()
        return time.perf_counter() - clock

    together(take_once)
    once = largest(together(take_once))
    count = 4 * max(1, min(25, int(_BUDGET_S / once / 4)))
    repeats = _REPEATS if once < _BUDGET_S else 1

    def one_at_a_time() -> None:
        for _ in range(count):
            begin(rows, splits, splits, outs[0])()

    def in_flight() -> None:
        for _ in range(count // 4):
            for join in [begin(rows, splits, splits, out) for out in outs]:
                join()

    together(one_at_a_time)
    latency, _ = _median_us(one_at_a_time, count, repeats)
    flight, host = _median_us(in_flight, count, repeats)
    return Transfer(name, size, True, latency, flight, host)


def _median_us(run: Callable[[], None], count: int, repeats: int = _REPEATS) -> tuple[float, float]:
    """Microseconds of one of `count` on the GPU's clock, and on the host; of the slowest rank."""
    times, hosts = [], []

    def timed() -> None:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        clock = time.perf_counter()
        run()
        hosts.append((time.perf_counter() - clock) / count * 1e6)
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / count * 1e3)

    agree(True)
    for _ in range(repeats):
        together(timed)
    return largest(statistics.median(times)), largest(statistics.median(hosts))


def _limits(base: Transport) -> dict[str, float]:
    """GB/s of plain copies, of this rank while all ranks copy: what no transport can exceed."""
    device = torch.empty(_LIMIT_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(_LIMIT_BYTES, dtype=torch.uint8, pin_memory=True)
    found = {
        "D2H": _rate(lambda: host.copy_(device, non_blocking=True)),
        "H2D": _rate(lambda: device.copy_(host, non_blocking=True)),
    }
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    other = torch.empty_like(device)

    def both() -> None:
        here = torch.cuda.current_stream()
        for stream in (down, up):  # both before either copy: the second must not wait for the first
            stream.wait_stream(here)
        for stream, target, source in ((down, host, device), (up, other, host)):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in (down, up):
            here.wait_stream(stream)

    found[BY_THE_HOST] = _rate(both)
    num_gpus = torch.cuda.device_count()
    if base.world_size > num_gpus:
        found[BETWEEN_GPUS[1]] = _rate(lambda: other.copy_(device))
    else:
        from cuda.bindings import runtime

        peer = torch.empty(_LIMIT_BYTES, dtype=torch.uint8, device=f"cuda:{(base.rank + 1) % num_gpus}")
        peer[:1].copy_(device[:1])  # gives access
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

        def to_peer() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            runtime.cudaMemcpyAsync(peer.data_ptr(), device.data_ptr(), _LIMIT_BYTES, kind, stream)

        found[BETWEEN_GPUS[0]] = _rate(to_peer)
    return found


def _rate(copy: Callable[[], object]) -> float:
    copy()

    def four() -> None:
        for _ in range(4):
            copy()

    us, _ = _median_us(four, 4)
    return _LIMIT_BYTES / us / 1e3


if __name__ == "__main__":
    with rank_main(Path(sys.argv[1])):
        main(Path(sys.argv[1]))
