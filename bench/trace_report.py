"""`python -m freescale.bench.trace_report TRACE…`: where the time of a step goes in a Kineto trace (section 5.2).

Give one trace a rank, recorded with CPU and CUDA activities and every step inside `record_function("step_<number>")`.
With those of all ranks, over the same steps, what waits for other ranks is told from what moves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .arguments import status_of
from .trace_timeline import StepTimes, Traffic, read_events, shortest_transfers, step_times


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 when a trace cannot be read."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _print(options))


def _print(options: argparse.Namespace) -> None:
    traces = [read_events(path) for path in options.traces]
    shortest = shortest_transfers(traces) if len(traces) > 1 else None
    skipped = {"skip_first": options.skip_first, "skip_last": options.skip_last}
    found = [step_times(events, shortest=shortest, **skipped) for events in traces]
    for path, times in zip(options.traces, found, strict=True):
        sys.stdout.write(json.dumps(asdict(times)) + "\n" if options.json else f"{path}\n{describe(times)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.trace_report",
        description="Divide the steps of a Kineto trace into compute, exposed traffic by kind, and waits of the host.",
        epilog="example: python -m freescale.bench.trace_report rank0.json.gz rank1.json.gz --skip-first 3",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="of torch.profiler, one a rank")
    parser.add_argument("--skip-first", type=int, default=2, help="steps left out at the start (default 2)")
    parser.add_argument("--skip-last", type=int, default=1, help="steps left out at the end (default 1)")
    parser.add_argument("--json", action="store_true", help="one line of JSON a trace")
    return parser


def _moving(of_kind: Traffic) -> str:
    if of_kind.moving_ms is None:
        return ""
    return f" (moving: {of_kind.exposed_moving_ms:.2f} of {of_kind.moving_ms:.2f})"


def describe(times: StepTimes) -> str:
    """Say it in lines."""
    lines = [
        f"  {times.num_steps} steps of {times.step_ms:.2f} ms: computing {times.compute_ms:.2f}, "
        f"bubble {times.bubble_ms:.2f} = exposed traffic {times.exposed_ms:.2f} + other streams {times.side_ms:.2f} "
        f"+ copies {times.copy_ms:.2f} + idle {times.idle_ms:.2f}"
    ]
    if times.exposed_moving_ms is not None:
        waiting = times.exposed_ms - times.exposed_moving_ms
        lines.append(
            f"  of the exposed traffic {times.exposed_moving_ms:.2f} ms move, {waiting:.2f} wait for other ranks"
        )
    for kind, each in times.traffic.items():
        lines.append(
            f"  {kind}: {each.exposed_ms:.2f} exposed of {each.total_ms:.2f} ms{_moving(each)}, {each.calls:g} calls, "
            f"{each.sent_bytes / 1e6:.1f} MB"
        )
    lines += [
        f"  {wait.thread} thread: {wait.call} x {wait.calls:.2g}, {wait.ms:.2f} ms, in {wait.where}"
        for wait in times.host_waits
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
