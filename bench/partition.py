"""How even, how fast and how many bytes: partitioners on any lengths, without MPI (paper, sections 2.2 and 4.1)."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..balancer.metrics import bytes_moved, imbalance, rank_loads, straggler_percentage
from ..balancer.partitioners.constraints import grouped
from ..balancer.partitioners.partition import fixed_batch_size, greedy_batch_size, home_batch_size
from ..balancer.partitioners.variable import VariableBatchSize
from ..balancer.plan import Partitioner, WorldSamples, validate_plan
from .arguments import at_least_one, output_file, output_folder, picture_file, status_of, write_figures
from .environment import environment
from .karmarkar_karp import karmarkar_karp, karmarkar_karp_equal
from .lengths import DISTRIBUTIONS, Lengths, length_source
from .partitioners import load_partitioner
from .tables import Table, picture_beside, print_table, write_result

_EPILOG = """examples:
  python -m freescale.bench.partition --lengths lognormal --max-length 21000 --world-size 64 256
  python -m freescale.bench.partition --lengths data.parquet:uih_page --world-size 256 --batch-size 128
  python -m freescale.bench.partition --lengths lengths.txt --world-size 8 --partitioner my_module:my_partitioner

Straggler percentage: mean waiting time of the ranks as a share of the step, if time is proportional to length.
Imbalance: max / mean - 1, in percent. Both are means over global batches; "least to most" is the spread of the first.
Bytes moved: share of the samples' bytes that leave the rank that loaded them."""

_AS_LOADED = "as loaded"
_LARGEST_WORLD_OF_TEXTBOOK = 256  # it takes minutes beyond


@dataclass(frozen=True)
class Outcome:
    """One partitioner on several global batches: means over them, and the ends where it says so.

    Times are over the repeats, after the output was checked; each repeat plans the next batch.
    """

    partitioner: str
    world_size: int
    batch_size: int
    batches: int
    imbalance: float
    straggler_percentage: float
    straggler_percentage_least: float
    straggler_percentage_most: float
    bytes_moved_percentage: float
    least_samples: int
    most_samples: int
    repeats: int
    plan_ms_median: float
    plan_ms_least: float
    plan_ms_most: float


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.partition",
        description="Compare partitioners: how even their plans are, how long planning takes, how many bytes move.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    sources = f"path.parquet:column, a text file, or {', '.join(DISTRIBUTIONS)}, as in lognormal:median=6000,sigma=0.9"
    add("--lengths", default="lognormal", metavar="SOURCE", help=f"{sources} (default lognormal)")
    add(
        "--world-size",
        type=at_least_one,
        nargs="+",
        default=[64],
        metavar="N",
        help="ranks, one or several (default 64)",
    )
    add("--batch-size", type=at_least_one, default=128, metavar="N", help="samples that a rank loads (default 128)")
    add("--batches", type=at_least_one, default=8, metavar="N", help="global batches, if there are as many (default 8)")
    add("--max-length", type=at_least_one, metavar="N", help="cut longer samples to this length (default: no cut)")
    add("--partitioner", action="append", default=[], metavar="MODULE:NAME", help="add one of yours; may be repeated")
    add("--alpha", type=float, default=1.0, help="exponent of the weights of VariableBatchSize (default 1)")
    add("--repeats", type=at_least_one, default=5, metavar="N", help="times each plan is made and timed (default 5)")
    add("--seed", type=int, default=0, help="of the draw of lengths (default 0)")
    add("--no-reference", action="store_true", help="leave out Karmarkar-Karp, which is slow")
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw imbalance and plan time (needs matplotlib)")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .partition_plot import draw  # before the work, so that a missing library shows at once
    source = length_source(options.lengths)
    extra = {name: load_partitioner(name) for name in options.partitioner}
    built_in = _built_in(options.alpha)
    outcomes: list[Outcome] = []
    parts: list[Table | str] = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("planning", total=None)
        for world_size in options.world_size:
            worlds, remark = _worlds(options, source.draw, world_size)
            references = {} if options.no_reference else _references(world_size)
            chosen = {**built_in, **extra, **references}
            progress.reset(task, total=len(chosen), description=f"{world_size} ranks")
            table = _table(f"{world_size} ranks x {options.batch_size} samples: {source.title}, {remark}")
            for name, partitioner in chosen.items():
                outcome = measure(name, partitioner, worlds, options.batch_size, options.repeats)
                outcomes.append(outcome)
                _add(table, outcome)
                progress.advance(task)
            parts.append(table)
            print_table(table, console)
            if not options.no_reference and world_size > _LARGEST_WORLD_OF_TEXTBOOK:
                console.print(f"textbook Karmarkar-Karp left out above {_LARGEST_WORLD_OF_TEXTBOOK} ranks")
    if options.json is not None:
        found = {"environment": environment(), "outcomes": [asdict(outcome) for outcome in outcomes]}
        write_figures(options.json, found)
        console.print(f"figures: {options.json}")
    if options.plot is not None:
        draw(outcomes, options.plot, source.title)
        console.print(f"picture: {options.plot}")
    if options.results is not None:
        note = (
            f"Times are of one process on one thread, median and range of {options.repeats} plans after the first two. "
            "Straggler percentages are means over the global batches, with the least and the most."
        )
        shown = picture_beside(options.plot, options.results, "waiting and plan time")
        about: list[Table | str] = [note, *shown, *parts]
        path = write_result(options.results, "partition", "Partitioners compared", environment(), about)
        console.print(f"written to {path}")


def _built_in(alpha: float) -> dict[str, Partitioner]:
    return {
        _AS_LOADED: lambda world: world.rank,
        "fixed_batch_size": fixed_batch_size,
        "greedy_batch_size": greedy_batch_size,
        "home_batch_size": home_batch_size,
        "grouped(greedy_batch_size, 8)": grouped(greedy_batch_size, 8),
        f"VariableBatchSize({alpha:g})": VariableBatchSize(alpha),
        f'VariableBatchSize({alpha:g}, cut="prefix")': VariableBatchSize(alpha, cut="prefix"),
    }


def _references(world_size: int) -> dict[str, Partitioner]:
    """Karmarkar-Karp in plain Python: the variant of equal counts, and the textbook's where it ends in time."""

    def reference(algorithm: Callable[[list[float], int], list[int]]) -> Partitioner:
        return lambda world: torch.tensor(algorithm(world.uih_lengths.tolist(), world.world_size), dtype=torch.int64)

    found = {"Karmarkar-Karp, equal counts": reference(karmarkar_karp_equal)}
    if world_size <= _LARGEST_WORLD_OF_TEXTBOOK:
        found["Karmarkar-Karp, textbook"] = reference(karmarkar_karp)
    return found


def _worlds(
    options: argparse.Namespace, draw: Callable[[int, int, int], tuple[Lengths, str]], world_size: int
) -> tuple[list[WorldSamples], str]:
    """Draw global batches, and say how."""
    lengths, remark = draw(world_size * options.batch_size, options.batches, options.seed)
    remark = f"{len(lengths)} batch{'es' * (len(lengths) > 1)} {remark}"
    if options.max_length is not None:
        lengths, remark = np.minimum(lengths, options.max_length), f"{remark}, cut at {options.max_length:,}"
    rank = torch.arange(world_size).repeat_interleave(options.batch_size)
    return [WorldSamples(world_size, rank, torch.from_numpy(batch.copy())) for batch in lengths], remark


def measure(
    name: str, partitioner: Partitioner, worlds: Sequence[WorldSamples], batch_size: int, repeats: int
) -> Outcome:
    """Check one partitioner's plans, then time it.

    Args:
        name: For the outcome and for errors.
        partitioner: What to measure.
        worlds: The global batches, at least one, of the same world size.
        batch_size: Samples that each rank loaded.
        repeats: Times to plan and time.

    Returns:
        Quality and times.

    Raises:
        ValueError: The partitioner raised, a plan is not valid, or it gave another plan the second time.
    """
    plans = [_plan(name, partitioner, world) for world in worlds]
    if not torch.equal(plans[0], _plan(name, partitioner, worlds[0])):
        raise ValueError(f"{name} gave two plans for one batch; ranks would disagree")
    times = sorted(_times(partitioner, worlds, repeats))
    pairs = list(zip(worlds, plans, strict=True))
    loads = [rank_loads(owner, world.uih_lengths, world.world_size) for world, owner in pairs]
    counts = torch.stack([torch.bincount(owner, minlength=world.world_size) for world, owner in pairs])
    stragglers = [straggler_percentage(load) for load in loads]
    moved = [bytes_moved(world, owner) / max(int(world.payload_bytes.sum()), 1) for world, owner in pairs]
    return Outcome(
        partitioner=name,
        world_size=worlds[0].world_size,
        batch_size=batch_size,
        batches=len(worlds),
        imbalance=statistics.fmean(imbalance(load) for load in loads),
        straggler_percentage=statistics.fmean(stragglers),
        straggler_percentage_least=min(stragglers),
        straggler_percentage_most=max(stragglers),
        bytes_moved_percentage=100 * statistics.fmean(moved),
        least_samples=int(counts.min()),
        most_samples=int(counts.max()),
        repeats=repeats,
        plan_ms_median=statistics.median(times),
        plan_ms_least=times[0],
        plan_ms_most=times[-1],
    )


def _plan(name: str, partitioner: Partitioner, world: WorldSamples) -> Tensor:
    try:
        return validate_plan(partitioner(world), world)
    except Exception as error:  # the partitioner is the user's
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error


def _times(partitioner: Partitioner, worlds: Sequence[WorldSamples], repeats: int) -> Iterator[float]:
    """Milliseconds of each plan, batch after batch. The garbage collector stays off meanwhile, as `timeit` does it."""
    gc.collect()
    gc.disable()
    try:
        for index in range(repeats):
            world = worlds[index % len(worlds)]
            start = time.perf_counter()
            partitioner(world)
            yield 1e3 * (time.perf_counter() - start)
    finally:
        gc.enable()


def _table(title: str) -> Table:
    columns = [
        "partitioner",
        "imbalance %",
        "straggler %",
        "least to most",
        "bytes moved %",
        "samples a rank",
        "plan ms",
        "least to most ms",
    ]
    return Table(title, columns)


def _add(table: Table, outcome: Outcome) -> None:
    least, most = outcome.least_samples, outcome.most_samples
    stragglers = [_short(value) for value in (outcome.straggler_percentage_least, outcome.straggler_percentage_most)]
    planned = outcome.partitioner != _AS_LOADED
    table.add(
        outcome.partitioner,
        _short(100 * outcome.imbalance),
        _short(outcome.straggler_percentage),
        " to ".join(dict.fromkeys(stragglers)),
        f"{outcome.bytes_moved_percentage:.1f}",
        f"{least}" if least == most else f"{least} to {most}",
        _short(outcome.plan_ms_median) if planned else "-",
        f"{_short(outcome.plan_ms_least)} to {_short(outcome.plan_ms_most)}" if planned else "-",
    )


def _short(value: float) -> str:
    """Write a figure with the digits that mean something: two, and no more than a decimal where it is large."""
    if value == 0:
        return "0"
    if value >= 10:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
    return "<0.001" if value < 0.001 else f"{float(f'{value:.2g}'):g}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
