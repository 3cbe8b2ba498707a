"""`python -m freescale.bench.id_plane`: do the threads that plan ids slow a launch-bound trainer? (section 3.2).

A loop of thousands of tiny operations needs the interpreter all the time, and so does any thread that calls NumPy.
Rank 0 runs the loop in turn beside the sleeping id plane of prioritized embeddings and beside the working one; other
ranks only plan their batches. The loop is pinned to a core of its own, as a trainer's thread would have. Runs without a
GPU; index arrays stay in host memory.
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
from .id_plane_rank import Settings
from .launch import launch, refuse_inside_a_launch
from .loader_overhead import slowdowns
from .progress import progress
from .tables import Table, print_part, write_result

_STAGES = {"ask": "distinct ids", "talk": "messages", "index": "index arrays"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 when a rank failed, 2 for a mistake in the arguments."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())))


def _run(options: argparse.Namespace, console: Console) -> None:
    refuse_inside_a_launch()
    if not 0 <= options.ratio <= 100:
        raise ValueError(f"--ratio must be from 0 to 100, got {options.ratio:g}")
    with progress(console, "measuring"):
        runs = [_measure(options, ranks) for ranks in options.ranks]
    parts: list[Table | str] = []
    for found in runs:
        parts += [note(found), _steps(found), _threads(found)]
    for part in parts:
        print_part(part, console)
    if options.json is not None:
        write_figures(options.json, {"environment": environment(), "runs": runs})
    if options.results is not None:
        title = "A launch-bound loop beside the id plane"
        path = write_result(options.results, "id_plane", title, environment(), parts)
        console.print(f"written to {path}")


def note(found: dict[str, Any]) -> str:
    """What was found, in words."""
    low, middle, high = statistics.quantiles(slowdowns(found), n=4)
    own = "The loop has a core to itself, all else the others." if found["own_core"] else "All shared one core."
    return (
        f"With {found['ranks']} rank{'s' * (found['ranks'] > 1)} and {found['ids']:,} ids a rank the loop is "
        f"{middle:.1f} % slower beside the working id plane (median of {len(found['idle'])} pairs of blocks of "
        f"{len(found['idle'][0])} steps, run in turn in one process; half of the pairs lie between {low:.1f} % and "
        f"{high:.1f} %). {own}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.id_plane",
        description="Time a launch-bound loop beside the threads that plan embedding ids, asleep and at work, in turn.",
        epilog="example: python -m freescale.bench.id_plane --blocks 20 --results bench/results",
    )
    add = parser.add_argument
    add("--ranks", type=at_least_one, nargs="+", default=[1, 2], help="numbers of ranks, one after the other (1 2)")
    add("--cut", type=at_least_one, default=2000, help="longest history, in ids, of 128 a rank (default 2000)")
    add("--ratio", type=float, default=5.0, help="percent of distinct rows that collide (default 5)")
    add("--tables", type=at_least_one, default=1, help="tables of 10,000,000 rows (default 1)")
    add("--step-ms", type=over_zero, default=30.0, help="what a step of the loop takes by itself (default 30)")
    add("--block-steps", type=at_least_one, default=10, help="steps in a row beside either (default 10)")
    add("--blocks", type=at_least_two, default=20, help="blocks of either kind, at least 2 (default 20)")
    add("--json", type=output_file, metavar="FILE", help="write every step's time to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def at_least_two(text: str) -> int:
    """Read a whole number, for quartiles."""
    number = at_least_one(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {number}")
    return number


def _measure(options: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(
            options.cut, options.ratio / 100, options.tables, options.step_ms, options.block_steps, options.blocks
        )
        settings.save(folder / "settings.json")
        launch("process_group", num_ranks, "freescale.bench.id_plane_rank", folder / "settings.json")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


def _steps(found: dict[str, Any]) -> Table:
    ranks = "1 rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"
    table = Table(
        f"{ranks}, {found['rounds']:,} rounds a step", ["", "median ms", "quarter below", "quarter above", "sleeps"]
    )
    for label, name in (
        ("loop beside the idle id plane", "idle"),
        ("loop beside the working id plane", "beside"),
        ("waited for plans", "waited"),
    ):
        low, middle, high = statistics.quantiles([step for block in found[name] for step in block], n=4)
        sleeps = [each for block in found.get(f"{name}_sleeps", []) for each in block]
        slept = f"{statistics.mean(sleeps):.1f}" if sleeps else ""
        table.add(label, f"{middle:.2f}", f"{low:.2f}", f"{high:.2f}", slept)
    return table


def _threads(found: dict[str, Any]) -> Table:
    """What each thread does in a step; calls are those of a run of their own, where counting does not disturb."""
    table = Table("The threads in a step", ["", "CPU ms", "calls"])
    for name, label in _STAGES.items():
        table.add(label, f"{found['threads'][name]:.2f}", f"{found['calls'][name]:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
