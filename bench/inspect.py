"""What would FreeScale bring on my data? From lengths and ids alone, in seconds (paper, sections 2.2, 2.3 and 5)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from .arguments import at_least_one, output_file, picture_file, status_of, write_figures
from .environment import environment
from .histories import Histories, read_histories
from .inspection import Finding, inspect_histories
from .tables import Table, print_table

_EPILOG = """examples:
  python -m freescale.bench.inspect data.parquet:uih_page
  python -m freescale.bench.inspect 'logs/*.parquet:user.history' --world-size 64 512 --batch-size 128 --plot gain.png
  python -m freescale.bench.inspect monday.parquet tuesday.parquet:uih_page

The column holds one history a row: a list, a list of lists, a list of structs (column.field), text, or a length.
Nothing is trained: a rank's time is taken to grow with its items. Rows are taken in the order of the file, as many as
the largest global batch needs, dealt to the ranks in turn."""

_LITTLE, _MOST = 2.0, 50.0  # percent of waiting; of collisions
_MOST_SAMPLES = 4_000_000  # in a global batch
_MOST_IDS, _MOST_ITEMS = 40_000_000, 100_000_000  # so that it takes seconds


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.inspect",
        description="See what FreeScale would bring on your data, by number of ranks (GPUs) and batch size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, at_least_one
    add("data", nargs="+", metavar="DATA", help="path.parquet:column; a folder, wildcards, several files work too")
    add("--world-size", type=count, nargs="+", default=[8, 64, 256], metavar="N", help="ranks (default 8 64 256)")
    add("--batch-size", type=count, nargs="+", default=[32, 128], metavar="N", help="samples a rank (default 32 128)")
    add("--max-length", type=count, metavar="N", help="cut histories to their last N items (default: no cut)")
    add("--batches", type=count, default=8, metavar="N", help="global batches to look at, at most (default 8)")
    add("--shuffle", action="store_true", help="draw rows at random, as a shuffling DataLoader; else in file order")
    add("--seed", type=int, default=0, help="of --shuffle (default 0)")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw it (needs matplotlib)")
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    return parser


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .inspect_plot import draw  # before the work, so that a missing library shows at once
    start = time.monotonic()
    most = max(options.world_size) * max(options.batch_size)
    if most > _MOST_SAMPLES:
        raise ValueError(
            f"--world-size times --batch-size must be at most {_MOST_SAMPLES:,} samples, so that it takes seconds, "
            f"got {most:,}; --batch-size is the samples of one rank"
        )
    settings = [(world, batch) for batch in options.batch_size for world in options.world_size]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("reading", total=None)
        most_rows = max(world * batch for world, batch in settings) * options.batches
        histories = read_histories(options.data, most_rows, _MOST_IDS, _MOST_ITEMS)
        progress.reset(task, total=len(settings), description="counting")
        findings = []
        for world, batch in settings:
            seed = options.seed if options.shuffle else None
            found = inspect_histories(histories, world, batch, options.max_length, options.batches, seed)
            findings.append(found)
            progress.advance(task)
    console.print(about(histories, options.max_length), highlight=False, soft_wrap=True)
    print_table(_table(findings), console)
    for line in [*explain(findings), *remarks(histories, findings), *verdict(findings)]:
        console.print(line, highlight=False, soft_wrap=True)
    if options.json is not None:
        found_all = {
            "kind": "inspect",
            "environment": environment(),
            "data": histories.title,
            "rows": len(histories.lengths),
            "lengths": _quantiles(histories, options.max_length),
            "findings": [asdict(found) for found in findings],
        }
        write_figures(options.json, found_all)
        console.print(f"figures: {options.json}")
    if options.plot is not None:
        draw(histories, findings, options.max_length, options.plot)
        console.print(f"picture: {options.plot}")
    console.print(f"({time.monotonic() - start:.1f} s)", highlight=False)


def _quantiles(histories: Histories, max_length: int | None) -> dict[str, float]:
    lengths = histories.lengths if max_length is None else np.minimum(histories.lengths, max_length)
    return {
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p90": float(np.quantile(lengths, 0.9)),
        "max": float(lengths.max()),
        "empty": float((lengths == 0).mean()),
    }


def about(histories: Histories, max_length: int | None) -> str:
    """Say what the data are."""
    found = _quantiles(histories, max_length)
    cut = f", cut to their last {max_length:,} items" if max_length is not None else ""
    return (
        f"{histories.title}: {len(histories.lengths):,} rows{cut}. Items a row: median {found['median']:,.0f}, mean "
        f"{found['mean']:,.0f}, 90 % below {found['p90']:,.0f}, longest {found['max']:,.0f}; "
        f"{100 * found['empty']:.1f} % of the rows are empty."
    )


_HEADS = (
    "ranks x batch",
    "padding %",
    "waiting %, now",
    "waiting %, balanced",
    "speed-up",
    "speed-up, attention",
    "rows a rank",
    "collisions %",
)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("What FreeScale would bring", _HEADS)
    for f in findings:
        table.add(
            f"{f.world_size} x {f.batch_size}{' *' if f.repeated else ''}",
            f"{100 * f.sparsity:.0f}",
            f"{f.waiting:.1f}",
            "<0.1" if 0 < f.waiting_balanced < 0.05 else f"{f.waiting_balanced:.1f}",
            f"{f.speedup:.2f} x",
            f"{f.speedup_squared:.2f} x",
            "-" if f.rows_per_rank is None else f"{f.rows_per_rank:,.0f}",
            "-" if f.collisions is None else f"{f.collisions:.1f}",
        )
    return table


def explain(findings: Sequence[Finding]) -> list[str]:
    """Say what the columns mean, in words."""
    lines = [
        "padding: what would be empty if each batch were padded to its longest history (the paper's sparsity, Eq. 1).",
        "waiting: part of a step that a rank waits for the slowest one, on average (straggler percentage); now, and "
        "with samples moved between ranks by the default partitioner.",
        "speed-up: of the computing part of a step by balancing alone, if its time grows with the items; in the next "
        "column if it grows with the square of each history's length, as attention does. Yours lies in between.",
    ]
    if any(f.collisions is not None for f in findings):
        lines.append(
            "rows, collisions: different ids that a rank looks up in a step, and how many of them any rank looks up in "
            "the next step as well. Only those have to wait for their update; the rest of the embedding traffic can "
            "travel while GPUs compute."
        )
    return lines


def remarks(histories: Histories, findings: Sequence[Finding]) -> list[str]:
    """Say what has to be known of how this was found."""
    lines = list(histories.remarks)
    short = [f for f in findings if f.repeated]
    if short:
        lines.append(
            f"*: {len(histories.lengths):,} rows were read and a global batch needs more, so rows were drawn at "
            "random and again; collisions cannot be told then."
        )
    if histories.num_rows_with_ids and any(f.collisions is None and not f.repeated for f in findings):
        lines.append(
            f"- : two consecutive global batches are needed for collisions; ids were kept of the first "
            f"{histories.num_rows_with_ids:,} rows."
        )
    return lines


def verdict(findings: Sequence[Finding]) -> list[str]:
    """Sum up for the setting where most is waited."""
    worst = max(findings, key=lambda f: f.waiting)
    where = f"On {worst.world_size} ranks with {worst.batch_size} samples each"
    if worst.waiting < _LITTLE:
        lines = [f"{where} ranks wait {worst.waiting:.1f} % of a step: balancing would bring little on these data."]
    else:
        lines = [
            f"{where} ranks wait {worst.waiting:.0f} % of a step; balanced, {worst.waiting_balanced:.1f} %: the same "
            f"batches in {100 / worst.speedup:.0f} % of the computing time."
        ]
    known = [f for f in findings if f.collisions is not None]
    if known:
        most = max(known, key=lambda f: f.collisions or 0.0)
        assert most.collisions is not None
        at = f"on {most.world_size} ranks x {most.batch_size}"
        if most.collisions > _MOST:
            lines.append(
                f"Most rows recur from one step to the next ({most.collisions:.0f} % {at}): they wait for their "
                "update, and prioritized embeddings hide the rest of the traffic only."
            )
        else:
            lines.append(f"At most {most.collisions:.1f} % of the rows looked up have to wait for an update ({at}).")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
