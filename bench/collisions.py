"""`python -m freescale.bench.collisions`: how many rows do consecutive batches share? (paper, section 2.3, Figure 3).

Those are the rows whose update must not be deferred; all others can travel while the model computes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console

from .arguments import at_least_one, output_file, output_folder, picture_file, status_of, write_figures
from .collision_ratio import Collisions, collisions
from .environment import environment
from .id_source import IdSource, id_source
from .progress import progress
from .tables import Table, picture_beside, print_table, write_result

_EPILOG = """\
examples:
  python -m freescale.bench.collisions --ids edits.parquet:uih_page --ids zipf --plot out/collisions.png
  python -m freescale.bench.collisions --ids edits.parquet:uih_page,candidate_page --ranks 2 4 8 --cuts 2000

One setting varies at a time; the others stay at the first value given for each. Histories are cut to their last ids.
"""


@dataclass(frozen=True)
class Outcome:
    """Collisions of one setting.

    Attributes:
        source: Where the ids came from.
        varied: "cut", "batch size" or "ranks".
        cut: Longest history.
        batch_size: Samples a rank.
        num_ranks: Ranks.
        found: Of every pair of consecutive batches.
    """

    source: str
    varied: str
    cut: int
    batch_size: int
    num_ranks: int
    found: list[Collisions]

    @property
    def value(self) -> int:
        """What was varied, as a number."""
        return {"cut": self.cut, "batch size": self.batch_size, "ranks": self.num_ranks}[self.varied]

    def mean(self, field: str) -> float:
        """Average one field of the collisions over the pairs."""
        return statistics.fmean(getattr(each, field) for each in self.found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())))


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .collisions_plot import draw  # before the work, so that a missing library shows at once
    outcomes, sources = [], options.ids or ["zipf"]
    with progress(console, "counting", len(sources)) as advance:
        for text in sources:
            source = id_source(text, options.seed)
            outcomes += measure(source, options.cuts, options.batch_sizes, options.ranks, options.pairs)
            console.print(f"{outcomes[-1].source}: done")
            advance()
    tables = [table(outcomes, source) for source in dict.fromkeys(o.source for o in outcomes)]
    for each in tables:
        print_table(each, console)
    if options.plot is not None:
        draw(outcomes, options.plot)
        console.print(f"picture: {options.plot}")
    if options.json is not None:
        write_figures(options.json, {"environment": environment(), "outcomes": [asdict(o) for o in outcomes]})
    if options.results is not None:
        title = "Rows that consecutive batches share"
        shown = picture_beside(options.plot, options.results, "collision ratios")
        path = write_result(options.results, "collisions", title, environment(), [_note(), *shown, *tables])
        console.print(f"written to {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.collisions",
        description="Count the rows that a global batch shares with the next one, over lengths, batch sizes and ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ids", action="append", metavar="SOURCE", help="path.parquet:column[,column], or zipf[:…]; may be repeated")
    add("--cuts", type=at_least_one, nargs="+", default=[8000, 2000, 21000], help="longest histories")
    add("--batch-sizes", type=at_least_one, nargs="+", default=[128, 32, 64, 256], help="samples a rank")
    add("--ranks", type=at_least_one, nargs="+", default=[4, 2, 8, 16], help="ranks")
    add("--pairs", type=at_least_one, default=4, help="pairs of consecutive batches at most (default 4)")
    add("--seed", type=int, help="shuffle a file's samples with it (default: the order of the file), draw ids with it")
    add("--plot", type=picture_file, metavar="FILE", help="draw the ratios, as in Figure 3")
    add("--json", type=output_file, metavar="FILE", help="write all counts to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def measure(
    source: IdSource, cuts: Sequence[int], batch_sizes: Sequence[int], ranks: Sequence[int], num_pairs: int
) -> list[Outcome]:
    """Count collisions while one setting varies and the others stay at their first value.

    Args:
        source: Where ids come from.
        cuts: Longest histories.
        batch_sizes: Samples a rank.
        ranks: Numbers of ranks.
        num_pairs: Pairs of batches to compare, spread over the source, where it has samples for so many.

    Raises:
        ValueError: The source has not samples for two batches of the largest kind.
    """
    settings = [("cut", cut, batch_sizes[0], ranks[0]) for cut in sorted(cuts)]
    settings += [("batch size", cuts[0], size, ranks[0]) for size in sorted(batch_sizes)]
    settings += [("ranks", cuts[0], batch_sizes[0], count) for count in sorted(ranks)]
    return [
        Outcome(source.title, varied, cut, size, count, _count(source, cut, size, count, num_pairs))
        for varied, cut, size, count in settings
    ]


def _count(source: IdSource, cut: int, batch_size: int, num_ranks: int, num_pairs: int) -> list[Collisions]:
    share = batch_size * num_ranks
    firsts = list(range(num_pairs))
    if source.num_samples is not None:
        most = source.num_samples // share - 1
        firsts = sorted({(2 * i + 1) * most // (2 * num_pairs) for i in firsts})
        if most < 1:
            raise ValueError(
                f"{source.title} are too few for two batches of {num_ranks} ranks x {batch_size} samples; "
                "give smaller --ranks or --batch-sizes"
            )

    def batch(number: int) -> list[torch.Tensor]:
        samples = source.draw(number * share, share, cut)
        return [torch.cat(samples[rank * batch_size :][:batch_size]) for rank in range(num_ranks)]

    return [collisions(batch(first), batch(first + 1)) for first in firsts]


def table(outcomes: Sequence[Outcome], source: str) -> Table:
    """Show what was found in one source."""
    made = Table(
        source,
        ["varied", "cut", "samples a rank", "ranks", "ids", "distinct rows", "rows %", "requests %", "ids %"],
    )
    for outcome in outcomes:
        if outcome.source == source:
            shares = [f"{100 * outcome.mean(field):.2f}" for field in ("rows", "requests", "occurrences")]
            counts = [f"{outcome.mean(field):,.0f}" for field in ("num_occurrences", "num_rows")]
            sizes = [f"{outcome.cut:,}", str(outcome.batch_size), str(outcome.num_ranks)]
            made.add(outcome.varied, *sizes, *counts, *shares)
    return made


def _note() -> str:
    return (
        "Share of a global batch that the next global batch asks for again, mean over pairs of consecutive batches "
        "spread over the source: of its distinct rows, of its requests (a row that one rank asks for; after removing "
        "duplicates this is what travels) and of its ids as they stand, repeats included. Popular rows recur, and they "
        "are repeated most, so the three differ much."
    )


if __name__ == "__main__":
    sys.exit(main())
