"""`python -m freescale.bench.loader_overhead`: does the balancer's thread slow a launch-bound trainer? (section 3.1).

A loop of thousands of tiny operations needs the interpreter all the time, and so does any thread that polls. Rank 0
runs the loop in turn beside the sleeping balancer and beside the working one; other ranks only take their batches. The
loop is pinned to a core of its own, as a trainer's thread would have. One rank alone has nobody to wait for and sends
nothing; else it does all that a rank of many does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import at_least_one, output_file, output_folder, over_zero, status_of, write_figures
from .environment import environment
from .launch import TRANSPORTS, launch, refuse_inside_a_launch
from .loader_overhead_rank import Settings
from .progress import progress
from .synthetic import write_synthetic
from .tables import Table, print_part, write_result

_STAGES = {
    "load": "load, say lengths",
    "gather_lengths": "stage I, plan, pack",
    "gather_candidates": "stage II, plan, pack",
    "plan": "agree, send",
    "shuffle": "stage III, unpack, queue",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 when a rank failed, 2 for a mistake in the arguments."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())))


def _run(options: argparse.Namespace, console: Console) -> None:
    refuse_inside_a_launch()
    with progress(console, "measuring"):
        runs = [_measure(options, ranks) for ranks in options.ranks]
    parts: list[Table | str] = []
    for found in runs:
        parts += [_note(found), _table(found, _title(options, found)), _stages(found)]
    for part in parts:
        print_part(part, console)
    if options.json is not None:
        write_figures(options.json, {"environment": environment(), "runs": runs})
    if options.results is not None:
        title = "A launch-bound loop beside the balancer's thread"
        path = write_result(options.results, "loader_overhead", title, environment(), parts)
        console.print(f"written to {path}")


def slowdowns(found: dict[str, Any]) -> list[float]:
    """Percentage that each block's median step beside the balancer is over the one beside the idle thread."""
    pairs = zip(found["idle"], found["beside"], strict=True)
    return [100 * (statistics.median(beside) / statistics.median(idle) - 1) for idle, beside in pairs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.loader_overhead",
        description="Time a launch-bound loop beside the balancer's thread, asleep and at work, in turn.",
        epilog="example: python -m freescale.bench.loader_overhead --blocks 30 --results bench/results",
    )
    add = parser.add_argument
    add("--ranks", type=at_least_one, nargs="+", default=[1, 2], help="numbers of ranks, one after the other (1 2)")
    add("--batch-size", type=at_least_one, default=64, help="samples a rank loads in a step (default 64)")
    add("--step-ms", type=over_zero, default=50.0, help="what a step of the loop takes by itself (default 50)")
    add("--block-steps", type=at_least_one, default=10, help="steps in a block beside either (default 10)")
    add("--blocks", type=at_least_one, default=30, help="blocks (default 30)")
    add("--transport", choices=TRANSPORTS, default="mpi", help="default mpi")
    add("--json", type=output_file, metavar="FILE", help="write every step's time to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _measure(options: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.parquet"
        write_synthetic(data, num_samples=40 * num_ranks * options.batch_size, num_row_groups=4 * num_ranks)
        settings = Settings(
            str(data),
            options.batch_size,
            options.step_ms,
            options.block_steps,
            options.blocks,
            options.transport,
        )
        settings.save(folder / "settings.json")
        launch(options.transport, num_ranks, "freescale.bench.loader_overhead_rank", folder / "settings.json")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


def _title(options: argparse.Namespace, found: dict[str, Any]) -> str:
    ranks = "1 rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"
    return f"{ranks}, {options.transport}, {options.batch_size} samples a rank, {found['rounds']:,} rounds a step"


def _table(found: dict[str, Any], title: str) -> Table:
    table = Table(title, ["", "median ms", "quarter below", "quarter above", "fastest"])
    for label, name in (
        ("loop beside the idle thread", "idle"),
        ("loop beside the working balancer", "beside"),
        ("waited for the batch", "waited"),
    ):
        steps = [step for block in found[name] for step in block]
        low, middle, high = statistics.quantiles(steps, n=4)
        table.add(label, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}", f"{min(steps):.3f}")
    return table


def _stages(found: dict[str, Any]) -> Table:
    """What the thread does in a step. Calls are those of a block of their own, where counting does not disturb."""
    stages, counted = found["stages"], found["counted"]
    table = Table("The thread in a step", ["", "CPU ms", "sleeps", "preempted", "calls"])
    kinds = {"cpu_ms": ".3f", "sleeps": ".1f", "preempted": ".2f"}
    for name in (name for name in _STAGES if name in stages):
        calls = counted.get(name, {"calls": 0})["calls"]
        table.add(_STAGES[name], *(f"{stages[name][kind]:{form}}" for kind, form in kinds.items()), f"{calls:.0f}")
    sums = (f"{sum(stage[kind] for stage in stages.values()):{form}}" for kind, form in kinds.items())
    table.add("all", *sums, f"{sum(stage['calls'] for stage in counted.values()):.0f}")
    return table


def _note(found: dict[str, Any]) -> str:
    blocks = slowdowns(found)
    low, middle, high = statistics.quantiles(blocks if len(blocks) > 1 else blocks * 2, n=4)
    cpu = statistics.median(found["balancer_cpu"])
    where = "The loop is pinned to one core, the balancer's thread to the rest, which it has to itself."
    if found["ranks"] > 1:
        where = (
            "The loop is pinned to one core, the balancer's thread and the other ranks to the rest. So ranks take the "
            "core from the thread, also where it holds the interpreter lock, and then the loop waits for them too."
        )
    if not found["own_core"]:
        where = "All shared one core."
    return (
        f"With {found['ranks']} rank{'s' * (found['ranks'] > 1)} the loop is {middle:.2f} % slower beside the working "
        f"balancer (median of {len(found['idle'])} blocks of {len(found['idle'][0])} steps beside either, run in "
        f"turn in one process; half of the blocks lie between {low:.2f} % and {high:.2f} %). The process uses "
        f"{cpu:.2f} ms of CPU a step outside the loop's thread. {where}"
    )


if __name__ == "__main__":
    sys.exit(main())
