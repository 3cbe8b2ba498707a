"""`python -m freescale.bench.loader_overhead`: does the balancer's thread slow a launch-bound trainer? (section 3.1).

A loop of thousands of tiny operations needs the interpreter all the time, and so does any thread that polls. Rank 0
runs the loop in turn beside the sleeping balancer and beside the working one; another rank only takes its batches. The
loop is pinned to a core of its own, as a trainer's thread would have.
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

from .arguments import at_least_one, output_file, output_folder
from .environment import environment
from .launch import TRANSPORTS, LaunchError, launch, refuse_inside_a_launch
from .loader_overhead_rank import Settings
from .synthetic import write_synthetic
from .tables import Table, print_table, write_result

_NUM_RANKS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 when a rank failed, 2 for a mistake in the arguments."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        refuse_inside_a_launch()
        found = _measure(options)
    except LaunchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    table = _table(
        found, f"{options.transport}, {options.batch_size} samples a rank, {found['rounds']:,} rounds a step"
    )
    print_table(table, console)
    console.print(_note(found))
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment(), **found}, indent=1) + "\n")
    if options.results is not None:
        title = "A launch-bound loop beside the balancer's thread"
        path = write_result(options.results, "loader_overhead", title, environment(), [_note(found), table])
        console.print(f"written to {path}")
    return 0


def slowdowns(found: dict[str, Any]) -> list[float]:
    """Percentage that each block's median step beside the balancer is over that of the idle block before it."""
    pairs = zip(found["idle"], found["beside"], strict=True)
    return [100 * (statistics.median(beside) / statistics.median(idle) - 1) for idle, beside in pairs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.loader_overhead",
        description="Time a launch-bound loop beside the balancer's thread, asleep and at work, in turn.",
        epilog="example: python -m freescale.bench.loader_overhead --blocks 30 --results bench/results",
    )
    add = parser.add_argument
    add("--batch-size", type=at_least_one, default=64, help="samples a rank loads in a step (default 64)")
    add("--step-ms", type=float, default=50.0, help="what a step of the loop takes by itself (default 50)")
    add("--block-steps", type=at_least_one, default=10, help="steps in a row beside either (default 10)")
    add("--blocks", type=at_least_one, default=30, help="blocks of either kind (default 30)")
    add("--transport", choices=TRANSPORTS, default="mpi", help="default mpi")
    add("--json", type=output_file, metavar="FILE", help="write every step's time to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.parquet"
        write_synthetic(data, num_samples=40 * _NUM_RANKS * options.batch_size, num_row_groups=4 * _NUM_RANKS)
        settings = Settings(
            str(data),
            options.batch_size,
            options.step_ms,
            options.block_steps,
            options.blocks,
            options.transport,
        )
        settings.save(folder / "settings.json")
        launch(options.transport, _NUM_RANKS, "freescale.bench.loader_overhead_rank", folder / "settings.json")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


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


def _note(found: dict[str, Any]) -> str:
    low, middle, high = statistics.quantiles(slowdowns(found), n=4)
    cpu = statistics.median(found["balancer_cpu"])
    where = "The loop is pinned to one core, the balancer's thread and the other rank to the rest."
    if not found["own_core"]:
        where = "All shared one core."
    return (
        f"The loop is {middle:.2f} % slower beside the working balancer (median of {len(found['idle'])} pairs of "
        f"blocks of {len(found['idle'][0])} steps, run in turn in one process; half of the pairs lie between "
        f"{low:.2f} % and {high:.2f} %). The balancer uses {cpu:.2f} ms of CPU a step. {where}"
    )


if __name__ == "__main__":
    sys.exit(main())
