"""`python -m freescale.bench.straggler_trace TRACE…`: a step's time on average, and compute step by step (section 5.1).

Ranks that wait for each other do so in another direction at every step; averages over steps do not show it. So the
compute time of every single step is told too, for whoever has the traces of all ranks; and how long the host spends in
each range that our code names, on whichever thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .arguments import status_of
from .trace_timeline import Durations, Event, read_events, shortest_transfers, step_times


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 when a trace cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.straggler_trace",
        description="Tell a step's time on average, and what every single step computed, from a Kineto trace a rank.",
        epilog="example: python -m freescale.bench.straggler_trace rank0.json.gz rank1.json.gz",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="of torch.profiler, one a rank")
    parser.add_argument("--json", action="store_true", help="one line of JSON a trace (there is no other form)")
    options = parser.parse_args(arguments)
    return status_of(lambda: _print(options.traces))


def _print(traces: Sequence[Path]) -> None:
    all_events = [read_events(path) for path in traces]
    shortest = shortest_transfers(all_events) if len(traces) > 1 else None
    for events in all_events:
        sys.stdout.write(json.dumps(_read(events, shortest)) + "\n")


def _read(events: Sequence[Event], shortest: Durations | None) -> dict[str, Any]:
    times = step_times(events, shortest=shortest)
    last = times.num_steps + 3
    single = [step_times(events, skip_first=step, skip_last=last - step - 1) for step in range(2, last - 1)]
    stages: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("freescale"):
            stages[event["name"]] = stages.get(event["name"], 0.0) + event.get("dur", 0) / 1e3 / last
    return asdict(times) | {"compute_by_step": [each.compute_ms for each in single], "stages": stages}


if __name__ == "__main__":
    sys.exit(main())
