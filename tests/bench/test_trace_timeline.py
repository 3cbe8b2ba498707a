"""Traces made by hand are divided as one divides them on paper."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from freescale.bench import trace_report
from freescale.bench.embedding_launches import read_traces
from freescale.bench.intervals import clip, length, subtract, union
from freescale.bench.trace_timeline import read_events, shortest_transfers, step_times

TRAINER, AUTOGRAD, POLLER = 1, 2, 3
MAIN, SIDE, WIRE = 7, 9, 20


class Script:
    """Writes a trace: steps of 1000 us, each launched 900 us before its first kernel starts."""

    def __init__(self, num_steps: int = 6) -> None:
        self.events: list[dict[str, Any]] = []
        self.num_steps = num_steps
        for step in range(num_steps):
            self._add("user_annotation", f"step_{step}", 1000 * step - 910, 900)

    def _add(self, cat: str, name: str, ts: float, dur: float, tid: int = TRAINER, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}
        )

    def kernel(
        self,
        name: str,
        start: float,
        dur: float,
        stream: int,
        inside: str = "",
        tid: int = TRAINER,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Launch a kernel in every step, `start` after the step's own start on the device."""
        for step in range(self.num_steps):
            correlation = len(self.events)
            launched = 1000 * step - 900 + start / 2
            if inside:
                self._add("user_annotation", inside, launched - 1, 4, tid)
            self._add("cuda_runtime", "cudaLaunchKernel", launched, 2, tid, correlation=correlation)
            at = 1000 * step + start
            self._add("kernel", name, at, dur, 100 + stream, correlation=correlation, stream=stream, **more or {})

    def runtime(self, name: str, start: float, dur: float, tid: int = TRAINER, **args: Any) -> None:
        """Make a runtime call in every step, `start` after the host began the step."""
        for step in range(self.num_steps):
            self._add("cuda_runtime", name, 1000 * step - 900 + start, dur, tid, **args)

    def op(self, cat: str, name: str, start: float, dur: float, tid: int = TRAINER) -> None:
        for step in range(self.num_steps):
            self._add(cat, name, 1000 * step - 900 + start, dur, tid)


def test_intervals_are_joined_cut_and_taken_away() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert subtract([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert subtract([(0, 1), (4, 6)], [(0, 5)]) == [(5, 6)]
    assert subtract([(0, 4)], []) == [(0, 4)]
    assert clip([(0, 2), (3, 9)], 1, 5) == [(1, 2), (3, 5)]
    assert length([(1, 2), (3, 5)]) == 3


def test_a_step_is_compute_exposed_traffic_copies_and_idle_time() -> None:
    script = Script()
    script.kernel("gemm", 0, 400, MAIN)
    script.kernel(
        "ncclDevKernel_SendRecv",
        300,
        200,
        WIRE,
        "## All2All_Seq_fwd ##",
        more={"In msg nelems": 1000, "dtype": "Float"},
    )
    script.op("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1400, 50, 105)
    times = step_times(script.events)
    assert (times.num_steps, times.step_ms) == (3, 1.0)
    assert [times.compute_ms, times.bubble_ms] == pytest.approx([0.4, 0.6])
    assert times.exposed_ms == pytest.approx(0.1)
    assert times.copy_ms == pytest.approx(0.05)
    assert times.idle_ms == pytest.approx(0.45)
    rows = times.traffic["rows"]
    assert [rows.total_ms, rows.exposed_ms, rows.calls] == pytest.approx([0.2, 0.1, 1])
    assert rows.sent_bytes == 4000


def test_a_kernel_on_a_side_stream_does_not_hide_traffic() -> None:
    script = Script()
    script.kernel("gemm", 0, 500, MAIN)
    script.kernel("unique_by_key", 480, 300, SIDE)
    script.kernel("ncclDevKernel_SendRecv", 500, 100, WIRE, "## kjt all2all ##")
    times = step_times(script.events)
    assert times.exposed_ms == pytest.approx(0.1)
    assert times.side_ms == pytest.approx(0.18)
    assert times.traffic["ids"].exposed_ms == pytest.approx(0.1)


def test_traffic_is_sorted_by_what_encloses_its_launch_on_its_own_thread() -> None:
    script = Script()
    script.kernel("gemm", 0, 500, MAIN)
    script.kernel("ncclDevKernel_SendRecv", 500, 50, WIRE, "urgent gradients", tid=AUTOGRAD)
    script.kernel("ncclDevKernel_SendRecv", 560, 50, WIRE, "urgent rows")
    script.kernel("ncclDevKernel_AllGather", 620, 10, WIRE, more={"Collective name": "_allgather_base"})
    kinds = [("urgent (gradients|rows)", "urgent")]
    times = step_times(script.events, kinds)
    assert times.traffic["urgent"].calls == 2
    assert times.traffic["urgent"].exposed_ms == pytest.approx(0.1)
    assert times.traffic["other: _allgather_base"].total_ms == pytest.approx(0.01)


def test_traffic_is_sorted_by_the_description_of_its_group() -> None:
    script = Script()
    script.kernel("gemm", 0, 500, MAIN)
    script.kernel("ncclDevKernel_SendRecv", 400, 50, WIRE, more={"Process Group Description": "background"})
    times = step_times(script.events, [("^background/", "background")])
    assert times.traffic["background"].exposed_ms == 0


def test_ranges_on_the_host_can_be_traffic() -> None:
    script = Script()
    script.kernel("gemm", 0, 400, MAIN)
    script.op("user_annotation", "gloo: rows", 900 + 350, 100, POLLER)
    times = step_times(script.events, host_kinds=[("^gloo: rows", "rows")])
    assert times.traffic["rows"].total_ms == pytest.approx(0.1)
    assert times.exposed_ms == pytest.approx(0.05)
    assert times.idle_ms == pytest.approx(0.55)


def test_waits_of_the_host_are_listed_with_their_thread_and_place() -> None:
    script = Script()
    script.kernel("gemm", 0, 400, MAIN)
    script.op("cpu_op", "aten::nonzero", 100, 200)
    script.runtime("cudaStreamSynchronize", 110, 150)
    script.runtime("cudaStreamWaitEvent", 120, 1)
    script.op("cpu_op", "autograd::engine::evaluate_function: Lookup", 300, 100, AUTOGRAD)
    script.runtime("cudaEventSynchronize", 310, 20, AUTOGRAD)
    script.runtime("cudaEventSynchronize", 310, 500, POLLER)
    times = step_times(script.events)
    assert [(w.call, w.thread) for w in times.host_waits] == [
        ("cudaEventSynchronize", "other"),
        ("cudaStreamSynchronize", "trainer"),
        ("cudaEventSynchronize", "autograd"),
    ]
    trainer, autograd = times.waits_of_trainer()
    assert (trainer.where, trainer.calls) == ("aten::nonzero", 1)
    assert trainer.ms == pytest.approx(0.15)
    assert autograd.where == "autograd::engine::evaluate_function: Lookup"


def test_a_copy_from_pageable_memory_is_a_wait() -> None:
    script = Script()
    script.kernel("gemm", 0, 400, MAIN)
    script.runtime("cudaMemcpyAsync", 100, 30, correlation=-5)
    script.runtime("cudaMemcpyAsync", 200, 30, correlation=-6)
    for number, kind in ((-5, "Pageable"), (-6, "Pinned")):
        script.events.append(
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": f"Memcpy HtoD ({kind} -> Device)",
                "ts": 20,
                "dur": 5,
                "pid": 0,
                "tid": 105,
                "args": {"correlation": number},
            }
        )
    (wait,) = step_times(script.events).host_waits
    assert (wait.call, wait.calls) == ("cudaMemcpyAsync", 1)


def two_ranks() -> tuple[Script, Script]:
    """The second rank is 40 us late for its rows and the first one 10 us for gradients; a row more ends the first."""
    early, late = Script(), Script()
    for rank, rows_at, rows, gradients_at, gradients in ((early, 380, 100, 700, 30), (late, 420, 60, 690, 40)):
        rank.kernel("gemm", 0, 400, MAIN)
        rank.kernel("ncclDevKernel_SendRecv", rows_at, rows, WIRE, "freescale: early rows")
        rank.kernel("ncclDevKernel_SendRecv", gradients_at, gradients, SIDE, "freescale: urgent gradients")
    return early, late


def test_with_the_traces_of_all_ranks_waiting_for_others_is_told_from_moving() -> None:
    early, late = two_ranks()
    first = next(event for event in early.events if event["name"] == "freescale: early rows")
    early.events.remove(first)  # begun before the profiler was: only the last ones are the same on all ranks
    shortest = shortest_transfers([early.events, late.events])
    assert shortest == {"early rows": [60] * 5, "urgent gradients": [30] * 6}
    times = [step_times(rank.events, shortest=shortest) for rank in (early, late)]
    rows, gradients = ([each.traffic[kind] for each in times] for kind in ("early rows", "urgent gradients"))
    assert [each.total_ms for each in rows] == pytest.approx([0.1, 0.06])
    assert [each.moving_ms for each in rows] == pytest.approx([0.06, 0.06])
    assert [each.exposed_ms for each in rows] == pytest.approx([0.08, 0.06])
    assert [each.exposed_moving_ms for each in rows] == pytest.approx([0.06, 0.06])
    assert [each.moving_ms for each in gradients] == pytest.approx([0.03, 0.03])
    assert [each.exposed_ms for each in times] == pytest.approx([0.11, 0.1])
    assert [each.exposed_moving_ms for each in times] == pytest.approx([0.09, 0.09])


@pytest.mark.parametrize("reader", ["freescale.bench.trace_report", "freescale.bench.straggler_trace"])
def test_the_traces_of_all_ranks_are_read_together_and_a_broken_one_leaves_the_others(
    reader: str, tmp_path: Path
) -> None:
    found: list[dict[str, Any]] = []
    for contender in ("sdd", "prioritized"):
        for rank, script in enumerate(two_ranks()):
            path = tmp_path / f"{contender}-{rank}.json"
            broken = contender == "sdd" and rank == 1
            path.write_text("" if broken else json.dumps({"traceEvents": script.events}))
            about = {"link": "nvlink", "cell": {"cut": 9}, "contender": contender, "path": str(path)}
            found.append({"kind": "trace", "rank": rank, **about})
    read_traces(found, reader=reader)
    alone, broken_one, *ours = found
    assert alone["times"]["exposed_moving_ms"] is None
    assert "is no trace of torch.profiler" in broken_one["fault"]
    assert [each["times"]["exposed_ms"] for each in ours] == pytest.approx([0.11, 0.1])
    assert [each["times"]["exposed_moving_ms"] for each in ours] == pytest.approx([0.09, 0.09])
    assert not list(tmp_path.iterdir())


def test_without_other_ranks_nobody_says_what_waits() -> None:
    times = step_times(two_ranks()[0].events)
    assert times.exposed_moving_ms is None
    assert {each.moving_ms for each in times.traffic.values()} == {None}


def test_too_few_steps_or_no_kernels_are_refused() -> None:
    script = Script(3)
    script.kernel("gemm", 0, 400, MAIN)
    with pytest.raises(ValueError, match=r"more than skip_first \+ skip_last = 2 \+ 1 steps .* it has 3"):
        step_times(script.events)
    with pytest.raises(ValueError, match="compute kernels of a device, it has none"):
        step_times(Script().events)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_from_a_file(name: str, tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [*Script().events, {"ph": "M", "name": "process_name"}]})
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert len(read_events(path)) == 6


def test_the_report_says_where_the_time_goes_and_names_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    script.kernel("gemm", 0, 400, MAIN)
    script.kernel("ncclDevKernel_SendRecv", 400, 50, WIRE, "freescale: late rows")
    script.runtime("cudaStreamSynchronize", 110, 150)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": script.events}))
    assert trace_report.main([str(path), str(path)]) == 0
    assert "of the exposed traffic 0.05 ms move, 0.00 wait for other ranks" in capsys.readouterr().out
    assert trace_report.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "3 steps of 1.00 ms: computing 0.40, bubble 0.60 = exposed traffic 0.05" in said
    assert "late rows: 0.05 exposed of 0.05 ms" in said
    assert "trainer thread: cudaStreamSynchronize x 1, 0.15 ms" in said
    assert trace_report.main(["--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["traffic"]["late rows"]["calls"] == 1
    assert trace_report.main([str(tmp_path / "absent.json")]) == 2
