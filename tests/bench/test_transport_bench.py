"""What bench.transport makes of figures, what it says without GPUs, and that a rank's failure is everybody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freescale.bench import contention as bench_contention
from freescale.bench.tables import Table, markdown
from freescale.bench.transport import _kept_for_shm, _parser, _ranks, _report, _settings, main
from freescale.bench.transport_ways import to_others

from rank_processes import launch


def contention(sequence: int, traffic: str, way: str, ms: float, slowdown: float) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "hidden": 512,
        "traffic": traffic,
        "way": way,
        "compute_ms": ms,
        "slowdown": slowdown,
        "moved_gb": 1.0,
        "rate": 100.0,
        "outlasted": way != "segment",
    }


def found() -> dict[str, Any]:
    rows = []
    for sequence in (1024, 8192):
        rows.append(contention(sequence, "none", "alone", 30.0, 0.0))
        rows.append(contention(sequence, "endless", "NCCL", 36.0, 0.2))
        rows.append(contention(sequence, "endless", "copy_engine", 30.6, 0.02))
    rows.append(contention(8192, "endless", "segment", 33.0, 0.1))
    transfers = [
        {"way": "NCCL", "size_bytes": 1 << 20, "correct": True, "latency_us": 20.0, "flight_us": 10.0, "host_us": 5.0},
        {"way": "staged", "size_bytes": 1 << 20, "correct": False},
    ]
    return {"limits": {"peer copy, all GPUs at once": 400.0}, "transfers": transfers, "contention": rows}


def test_a_report_compares_the_same_workloads_and_times_no_wrong_output() -> None:
    parts = _report(found())
    text = "\n".join(markdown(part) if isinstance(part, Table) else part for part in parts)
    assert "| NCCL | 1,048,576 | 20.0 | 10.0 | 104.9 | 26% | 5 |" in text
    assert "| staged | 1,048,576 | wrong output, not timed |" in text
    assert "| 1024, 512 | 30.0 | 20.0% (100) | 2.0% (100) | - |" in text
    assert "10.0% (100, ended early)" in text
    assert "endless: copy_engine adds 0.10 of the time that NCCL adds." in text
    assert "endless: segment adds 0.50 of the time that NCCL adds." in text, "compared on the one workload both ran"


def test_a_rank_sends_to_the_others_alone() -> None:
    assert to_others(1, 3, 20) == [10, 0, 10]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs a CUDA GPU, and torch sees none; for host memory: bench.transport_host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "num_gpus", "found"), [(None, 4, (4, False)), (2, 4, (2, False)), (2, 1, (2, True)), (8, 4, (8, True))]
)
def test_ranks_share_gpus_only_where_there_are_more_of_them(
    asked: int | None, num_gpus: int, found: tuple[int, bool]
) -> None:
    assert _ranks(asked, num_gpus) == found


@pytest.mark.parametrize(
    ("asked", "num_gpus", "text"),
    [(1, 2, "--ranks must be at least 2, got 1"), (None, 1, "--ranks 2 lets two ranks share")],
)
def test_too_few_ranks_are_named(asked: int | None, num_gpus: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _ranks(asked, num_gpus)


def test_ranks_that_share_a_gpu_leave_out_nccl(tmp_path: Path) -> None:
    options = _parser().parse_args([])
    assert _settings(options, share=True).ways == ("copy_engine", "segment", "staged")
    assert _settings(options, share=True).swept == ()
    assert _settings(options, share=False).ways[0] == "NCCL"


class Clock:
    """Streams of one GPU and a host, as far as time goes. A way's stream holds so many milliseconds of messages.

    Attributes:
        now: Milliseconds, of the host.
        ends: When each stream will be through with what it has.
    """

    def __init__(self, message_ms: float, holds_ms: float, host_ms: float) -> None:
        self.message_ms, self.holds_ms, self.host_ms = message_ms, holds_ms, host_ms
        self.now, self.ends = 0.0, {"compute": 0.0, "traffic": 0.0}
        self.current = "compute"

    def enqueue(self, ms: float) -> None:
        self.ends[self.current] = max(self.now, self.ends[self.current]) + ms

    def begin(self, *_: object) -> Callable[[], None]:
        self.now = max(self.now + self.host_ms, self.ends["traffic"] - self.holds_ms)
        self.enqueue(self.message_ms)
        return lambda: None

    def event(self, enable_timing: bool) -> Event:
        return Event(self)

    @contextmanager
    def on_traffic(self, _: object) -> Iterator[None]:
        self.current = "traffic"
        yield
        self.current = "compute"


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, 0.0

    def record(self, stream: str | None = None) -> None:
        self.at = max(self.clock.now, self.clock.ends[stream or self.clock.current])

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.mark.parametrize(
    ("message_ms", "holds_ms", "host_ms"),
    [(1.87, 38.0, 0.6), (0.19, 500.0, 0.1), (0.26, 500.0, 0.05), (46.0, 1000.0, 6.0), (0.05, 100.0, 0.1)],
)
def test_endless_traffic_outlasts_the_step_whatever_a_stream_holds(
    message_ms: float, holds_ms: float, host_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(message_ms, holds_ms, host_ms)
    for name, model in (("Event", clock.event), ("Stream", lambda: "traffic"), ("stream", clock.on_traffic)):
        monkeypatch.setattr(torch.cuda, name, model)
    for name, alone in (("together", lambda part: part()), ("agree", bool), ("largest", float)):
        monkeypatch.setattr(bench_contention, name, alone)
    monkeypatch.setattr(bench_contention.Traffic, "_begin_to_send", begin_to_send)
    block = bench_contention.Block.__new__(bench_contention.Block)
    block.launch_ms = 5.0

    def step() -> None:
        clock.now += block.launch_ms
        clock.enqueue(60.0)

    monkeypatch.setattr(block, "step", step)
    traffic = bench_contention.Traffic(clock.begin, 0, 2)
    took, rate, outlasted = traffic.endless(block, 55.0)
    assert outlasted
    assert took >= 60.0
    assert rate == pytest.approx((64 << 20) / max(message_ms, host_ms) / 1e6, rel=0.2)


def begin_to_send(traffic: Any, size: int) -> Any:
    """Without memory on a GPU."""
    rows = torch.empty(0)
    return bench_contention._Sending(traffic._begin, traffic._stream, [0, size], rows, [rows] * 4)


def test_time_for_nccl_over_host_memory_is_kept_where_there_is_enough() -> None:
    assert [_kept_for_shm(limit) for limit in (24.0, 47.0, 60.0, 600.0)] == [0.0, 0.0, 15.0, 20.0]


def test_ways_for_which_no_time_is_left_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([True, False])
    monkeypatch.setattr(bench_contention, "agree", bool)
    monkeypatch.setattr(bench_contention, "largest", float)
    monkeypatch.setattr(bench_contention, "_beside", lambda block, place, name, begin, here: [name])
    block = SimpleNamespace(timed=lambda: 30.0)
    ways: dict[str, Any] = {"NCCL": None, "copy_engine": None, "segment": None}
    rows: list[Any] = bench_contention.measure(block, (1, 2), ways, 0, 2, 3, lambda: next(left))  # type: ignore[arg-type]  # of a Block
    assert [rows[0].way, *rows[1:]] == ["alone", "NCCL"]


FAILS_ON_RANK_1 = """
import torch.distributed as dist
from freescale.bench.transport_ways import agree, together

def part():
    if dist.get_rank() == 1:
        raise RuntimeError("as planted")
    return 7

dist.init_process_group("gloo")
try:
    together(part)
except RuntimeError as error:
    print(f"raised: {error}", flush=True)
print("together again", together(lambda: 5), agree(True), flush=True)
dist.destroy_process_group()
"""


def test_what_fails_on_one_rank_is_raised_on_all_and_they_go_on_together(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS_ON_RANK_1)
    done = launch("process_group", 2, script, [])
    assert done.returncode == 0, done.explain()
    assert "it failed on another rank" in done.outputs[0]
    assert "as planted" in done.outputs[1]
    assert all("together again 5 True" in output for output in done.outputs)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from freescale.bench.transport_plot import draw

    draw(found()["contention"], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
