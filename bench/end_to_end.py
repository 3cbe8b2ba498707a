"""`python -m freescale.bench.end_to_end`: TorchRec against balanced and prioritized, alone and together (section 5.4).

One model on uneven histories, in one run: TorchRec's row-wise EmbeddingCollection under its pipelines, each of our
techniques alone, and both. Step time, what ranks wait for, memory; over fast and slow links, lengths and batch sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import at_least_one, input_files, output_file, output_folder, picture_file, seconds, write_figures
from .embedding_launches import Launcher, read_traces, run_all
from .embedding_settings import LINKS, Sizes
from .end_to_end_report import Key, Row, faults, host_stages, rows, tables, verdicts
from .end_to_end_settings import ALL_LINKS, ALONE, CONTENDERS, Cell, Pace, Settings
from .environment import environment
from .launch import LaunchError, refuse_inside_a_launch
from .progress import progress
from .tables import Table, picture_beside, print_table, write_result

_PACKAGES = ("torch", "torchrec", "fbgemm_gpu", "numpy")
_SIZES = {
    "cuda": Sizes(batch_size=128, num_rows=10_000_000, dim=128, width=256, num_layers=3, median=3500.0),
    "cpu": Sizes(batch_size=8, num_rows=4000, dim=16, width=64, num_layers=1, median=30.0),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"links": list(LINKS)[:2], "cuts": [8000, 21000, 2000], "batch_sizes": [128, 32, 512]},
    "cpu": {"links": ["sockets"], "cuts": [60, 20], "batch_sizes": [8, 4]},
}
_EPILOG = """\
examples:
  python -m freescale.bench.end_to_end --results bench/results --json out/end_to_end.json
  python -m freescale.bench.end_to_end --links sockets --cuts 8000 --batch-sizes 128 --limit-s 100
  python -m freescale.bench.end_to_end --ranks 1 --cells even 2000x128     # one GPU is enough
  python -m freescale.bench.end_to_end --device cpu

The first batch size goes with all cuts, and the first cut with all batch sizes; --cells takes any. Contenders are timed
in the order given: what --limit-s leaves no time for is named. Where a launch breaks off, the rest goes on without what
broke it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, 1 when something failed, 2 for a mistake in the arguments.
    """
    options = _parser().parse_args(arguments)
    console = Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        refuse_inside_a_launch()
        _complete(options)
        if options.results is not None or options.plot is not None:
            from . import end_to_end_plot  # noqa: F401 - a missing matplotlib shows now, not after the run
        found, notes, about = read_runs(options.read) if options.read else ([], [], environment(_PACKAGES))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    broken: list[str] = []
    if not options.read:
        with tempfile.TemporaryDirectory() as folder, progress(console, "measuring"):
            broken, version = _run(options, Path(folder), found, console)
        about, notes = environment(_PACKAGES), [f"torchrec {version}"]
    result = rows(found, 1 + max((each["rank"] for each in found), default=0))
    for table in [*tables(result), *host_stages(found)]:
        print_table(table, console)
    said = [*notes, *faults(found), *broken]
    for line in [*verdicts(result), *said]:
        console.print(line, markup=False)
    _write(options, result, found, said, about, console)
    return 1 if broken or any(each["kind"] == "failed" for each in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.end_to_end",
        description="Train one model on uneven histories under TorchRec's pipelines and under ours, and time all.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run over gloo, small (default cuda)")
    add("--ranks", type=at_least_one, default=2, help="one a GPU (default 2; 1: what pipelines cost by themselves)")
    add("--contenders", nargs="+", choices=tuple(CONTENDERS), help="default: all that run there")
    add("--links", nargs="+", choices=ALL_LINKS, help="default: nvlink and shared memory, or one rank")
    add("--cuts", type=at_least_one, nargs="+", help="longest histories, in ids (default 8000 21000 2000)")
    add("--batch-sizes", type=at_least_one, nargs="+", help="samples a rank (default 128 32 512)")
    add("--even", action="store_true", help="also once where there is nothing to gain: equal lengths, tiny table")
    add("--cells", nargs="+", metavar="CELL", help="instead: workloads in this order, as 8000x128 (cut, batch) or even")
    add("--ratio", type=float, default=5.0, help="percent of distinct rows that collide (default 5)")
    add("--rows", type=at_least_one, help="rows of the table (default 10,000,000)")
    add("--launches", type=at_least_one, default=1, help="launches of each link, interleaved (default 1)")
    add("--rounds", type=at_least_one, default=2, help="turns of all contenders in a launch (default 2)")
    add("--warm-up", type=at_least_one, default=5, help="steps before each measurement, more than 2 (default 5)")
    add("--timed", type=at_least_one, default=12, help="steps of each measurement (default 12)")
    add("--traced", type=int, default=7, help="steps under the profiler (default 7; 0: none)")
    add("--all-threads", action="store_true", help="traces show the balancer's thread too, and cost more")
    add("--limit-s", "--seconds", type=seconds, default=1e5, metavar="S", help="start no measurement after S seconds")
    add("--keep-traces", type=Path, metavar="FOLDER", help="keep rank 0's traces")
    add("--plot", type=picture_file, metavar="FILE", help="draw where the time of a step goes, as in Figure 11")
    add("--json", type=output_file, metavar="FILE", help="write everything measured to a file")
    add("--read", type=Path, nargs="+", default=[], metavar="FILE", help="measure nothing: report on what --json wrote")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file and picture")
    return parser


def _complete(options: argparse.Namespace) -> None:
    """Fill in what depends on the device, and refuse what makes no sense."""
    if options.device == "cpu" and "sdd_dedup" in (options.contenders or []):
        raise ValueError("sdd_dedup runs on GPUs only: FBGEMM removes duplicates there")
    options.contenders = options.contenders or [c for c in CONTENDERS if options.device == "cuda" or c != "sdd_dedup"]
    if any((link == ALONE) != (options.ranks == 1) for link in options.links or []):
        raise ValueError(f"--links must be {ALONE!r} for --ranks 1 and only then, got {', '.join(options.links)}")
    if options.ranks == 1:
        options.links = [ALONE]
    for name, default in _DEFAULTS[options.device].items():
        setattr(options, name, getattr(options, name) or default)
    cells(options)  # refuses what is no cell
    if not 0 <= options.ratio <= 100:
        raise ValueError(f"--ratio must be from 0 to 100, got {options.ratio}")
    if options.warm_up < 3:
        raise ValueError(f"--warm-up must be at least 3, got {options.warm_up}")
    if 0 < options.traced < 4:
        raise ValueError(f"--traced must be at least 4, because three of the steps are left out, got {options.traced}")
    if options.device == "cuda" and not options.read:
        import torch

        if torch.cuda.device_count() < options.ranks:
            raise ValueError(f"--ranks {options.ranks} needs as many GPUs, there are {torch.cuda.device_count()}")


def cells(options: argparse.Namespace) -> list[Cell]:
    """The workloads, most important first.

    Raises:
        ValueError: One that was named is not of the form CUTxBATCH.
    """
    even = Cell(options.cuts[-1], options.batch_sizes[0], even=True)
    if options.cells is not None:
        return [even if each == "even" else Cell(*_numbers(each)) for each in options.cells]
    chosen = [Cell(cut, options.batch_sizes[0]) for cut in options.cuts]
    chosen += [Cell(options.cuts[0], size) for size in options.batch_sizes[1:]]
    return [*chosen, even] if options.even else chosen


def _numbers(cell: str) -> tuple[int, int]:
    cut, _, size = cell.partition("x")
    if not (cut.isdecimal() and size.isdecimal() and int(cut) and int(size)):
        raise ValueError(f"--cells must be of the form CUTxBATCH, such as 8000x128, or even; got {cell!r}")
    return int(cut), int(size)


def _run(
    options: argparse.Namespace, folder: Path, found: list[dict[str, Any]], console: Console
) -> tuple[list[str], str]:
    """Run all launches, links in turn; what fails is said, and the others go on. Also gives the version of TorchRec."""
    started, late = time.time(), 0.0
    launcher = Launcher(options.device, folder, ranks="end_to_end_rank")
    broken: list[str] = []
    if options.keep_traces is not None:
        options.keep_traces.mkdir(parents=True, exist_ok=True)
    planned = [(launch, link) for launch in range(options.launches) for link in options.links]
    try:
        launcher.await_ready()
        for number, (launch, link) in enumerate(planned):
            left = started + options.limit_s - late - time.time()
            if left <= 0:
                broken.append(f"no time for launch {launch + 1} over {link}")
                continue
            place = folder / str(number)
            place.mkdir()
            settings = _settings(options, link, time.time() + left / (len(planned) - number))
            new, faulty = run_all(launcher, settings, place)
            late = max(late, time.time() - settings.until)  # to end the measurement under way, and the ranks
            read_traces(new, options.keep_traces, reader="freescale.bench.straggler_trace")
            found += [{**each, "launch": launch} for each in new]
            broken += [f"{link}: {fault}" for fault in faulty]
            _keep(options, found, broken, environment(_PACKAGES))
            taken = time.time() - started
            console.print(f"[{taken:6.1f} s] {link}, launch {launch + 1}: {len(new)} records", markup=False)
            for line in faulty:
                console.print(line, markup=False)
    except LaunchError as error:
        broken.append(str(error))
    finally:
        launcher.close()
    return broken, launcher.torchrec


def _settings(options: argparse.Namespace, link: str, until: float) -> Settings:
    sizes = Sizes(**{**vars(_SIZES[options.device]), **({"num_rows": options.rows} if options.rows else {})})
    pace = Pace(options.warm_up, options.timed, options.rounds, options.traced, ring=4)
    return Settings(
        options.device, options.ranks, link, options.contenders, cells(options), sizes, options.ratio / 100, pace,
        options.all_threads, until,
    )  # fmt: skip


def read_runs(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """Put several runs together, the launches of one after those of the other.

    Returns:
        What they found, their notes, and where the first came from, with the commands of all.

    Raises:
        ValueError: One of the files is no such run.
    """
    found: list[dict[str, Any]] = []
    runs = input_files(paths, ("environment", "notes", "found"))
    for run in runs:
        before = 1 + max((each["launch"] for each in found), default=-1)
        found += [{**each, "launch": each.get("launch", 0) + before} for each in run["found"]]
    notes = list(dict.fromkeys(note for run in runs for note in run["notes"]))
    commands = "; ".join(run["environment"]["command"] for run in runs)
    return found, notes, {**runs[0]["environment"], "command": commands}


def _keep(options: argparse.Namespace, found: list[dict[str, Any]], said: list[str], about: dict[str, str]) -> None:
    """Write what was measured so far, so that a run that is cut short loses nothing."""
    if options.json is not None:
        write_figures(options.json, {"environment": about, "notes": said, "found": found})


def _write(
    options: argparse.Namespace,
    result: dict[Key, Row],
    found: list[dict[str, Any]],
    said: list[str],
    about: dict[str, str],
    console: Console,
) -> None:
    """Write what was asked for."""
    _keep(options, found, said, about)
    name = f"end-to-end-{options.device}"
    if options.results is not None and options.plot is None:
        options.plot = options.results / f"{datetime.now(UTC):%Y-%m-%d}-{name}.png"
    traced = any(row.traced for row in result.values())
    if options.plot is not None and traced:
        from .end_to_end_plot import draw

        draw(result, options.plot)
        console.print(f"picture: {options.plot}")
    if options.results is not None:
        told = "\n".join(f"- {line}" for line in verdicts(result))
        picture = picture_beside(options.plot, options.results, "Where the time of a step goes") if traced else []
        parts: list[Table | str] = [*said, *picture, *tables(result), told, *host_stages(found)]
        path = write_result(options.results, name, "Balanced and prioritized, beside TorchRec", about, parts)
        console.print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
