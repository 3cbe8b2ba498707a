"""`python -m freescale.bench.soak`: does anything grow when ranks balance and train for a long time? (section 3.1).

Ranks balance tiny batches and train prioritized embeddings on them, epoch after epoch, and look at their own memory,
threads, file descriptors and pinned memory. Every epoch is checked: each sample is trained on once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .arguments import at_least_one, output_file, output_folder, status_of, write_figures
from .environment import environment
from .launch import TRANSPORTS, launch, refuse_inside_a_launch
from .progress import progress
from .soak_rank import Settings
from .tables import Table, print_table, write_result

_MIB = 2**20
_MOST_MIB = 4.0  # of growth in 10,000 steps, over the second half: allocators settle in the first
_NOTICED_MIB = 8.0  # less than this in all says nothing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 when a rank failed or something grew, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())))


def _run(options: argparse.Namespace, console: Console) -> int:
    refuse_inside_a_launch()
    settings = Settings(options.steps, 60 * options.minutes, options.epoch_steps, options.looks, options.transport)
    with progress(console, f"{options.steps:,} steps"):
        found = _soak(settings, options.ranks)
    table, note, grown = looks_table(found), summary(found, options.transport), growth(found)
    print_table(table, console)
    console.print(note)
    for line in grown:
        console.print(f"grew: {line}")
    if options.json is not None:
        write_figures(options.json, {"environment": environment(), "ranks": found})
    if options.results is not None:
        ends = [note, *(f"Grew: {line}" for line in grown)]
        path = write_result(options.results, "soak", "Training for a long time", environment(), [*ends, table])
        console.print(f"written to {path}")
    return 1 if grown else 0


def growth(found: Sequence[dict[str, Any]]) -> list[str]:
    """What grew in the second half, in words; empty when all is flat."""
    grown = []
    for rank, one in enumerate(found):
        looks = [look for look in one["looks"] if look["step"] >= one["steps"] / 2]
        slope = memory_slope(looks)
        if slope > _MOST_MIB and slope * (looks[-1]["step"] - looks[0]["step"]) > 1e4 * _NOTICED_MIB:
            grown.append(f"memory of rank {rank} by {slope:.1f} MiB in 10,000 steps")
        before = looks[: max(1, len(looks) // 2)]
        grown += [
            f"{name} of rank {rank} from {looks[0][name]} to {looks[-1][name]}"
            for name in ("threads", "files", "pinned_bytes")
            if looks[-1][name] > max(look[name] for look in before)
        ]
    return grown


def memory_slope(looks: Sequence[dict[str, Any]]) -> float:
    """MiB of memory in 10,000 steps, by least squares.

    Example:
        >>> memory_slope([{"step": 0, "memory_bytes": 0}, {"step": 20_000, "memory_bytes": 2**20}])
        0.5
    """
    steps = np.array([look["step"] for look in looks], dtype=np.float64)
    memory = np.array([look["memory_bytes"] for look in looks], dtype=np.float64)
    if len(looks) < 2 or np.ptp(steps) == 0:
        return 0.0
    centred = steps - steps.mean()
    return round(float(1e4 * (centred * (memory - memory.mean())).sum() / (centred**2).sum()) / _MIB, 9)


def looks_table(found: Sequence[dict[str, Any]]) -> Table:
    """At most twelve of the looks, rank 0's in full and the most that any rank has."""
    looks = found[0]["looks"]
    chosen = sorted({round(k) for k in np.linspace(0, len(looks) - 1, min(12, len(looks)))})
    columns = ["steps", "seconds", "memory MiB", "most of any rank", "threads", "files", "pinned MiB"]
    table = Table("What rank 0 holds", columns)
    for k in chosen:
        look = looks[k]
        most = max(one["looks"][min(k, len(one["looks"]) - 1)]["memory_bytes"] for one in found)
        cells = [
            f"{look['step']:,}",
            f"{look['seconds']:.0f}",
            f"{look['memory_bytes'] / _MIB:.1f}",
            f"{most / _MIB:.1f}",
        ]
        table.add(*cells, str(look["threads"]), str(look["files"]), f"{look['pinned_bytes'] / _MIB:.1f}")
    return table


def summary(found: Sequence[dict[str, Any]], transport: str) -> str:
    """What was run, in a sentence."""
    slopes = [memory_slope([look for look in one["looks"] if look["step"] >= one["steps"] / 2]) for one in found]
    samples = sum(one["samples"] for one in found)
    return (
        f"{len(found)} ranks over {transport} ran {found[0]['steps']:,} steps in {found[0]['epochs']:,} epochs and "
        f"{found[0]['looks'][-1]['seconds']:.0f} s; {samples:,} samples, each trained on once in its epoch. In the "
        f"second half memory grew by {min(slopes):.2f} to {max(slopes):.2f} MiB in 10,000 steps."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.soak",
        description="Balance and train tiny batches for a long time, and watch memory, threads, files, pinned memory.",
        epilog="example: python -m freescale.bench.soak --steps 100000 --ranks 2 --results bench/results",
    )
    add = parser.add_argument
    add("--steps", type=at_least_one, default=100_000, help="steps to run (default 100,000)")
    add("--minutes", type=float, default=600.0, help="stop earlier, after about so many (default 600)")
    add("--ranks", type=at_least_one, default=2, help="default 2")
    add("--epoch-steps", type=at_least_one, default=500, help="batches of rank 0 in an epoch (default 500)")
    add("--looks", type=at_least_one, default=100, help="how often ranks look at themselves (default 100)")
    add("--transport", choices=TRANSPORTS, default="mpi", help="default mpi")
    add("--json", type=output_file, metavar="FILE", help="write every look to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _soak(settings: Settings, ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        launch(settings.transport, ranks, "freescale.bench.soak_rank", path)
        return [json.loads(path.with_name(f"found-{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    sys.exit(main())
