"""`python -m freescale.bench.end_to_end`: TorchRec against balanced and prioritized, alone and together (section 5.4).

One model on uneven histories, in one run: TorchRec's row-wise EmbeddingCollection under its pipelines, each of our
techniques alone, and both. Step time, what ranks wait for, memory; over fast and slow links, lengths and batch sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import at_least_one, output_file, output_folder
from .embedding_launches import Launcher, read_traces
from .embedding_settings import LINKS, Sizes
from .end_to_end_report import Key, Row, faults, host_stages, rows, tables, verdicts
from .end_to_end_settings import CONTENDERS, Cell, Pace, Settings
from .environment import environment
from .launch import LaunchError, refuse_inside_a_launch
from .tables import Table, print_table, write_result

_PACKAGES = ("torch", "torchrec", "fbgemm_gpu", "numpy")
_LAUNCH_TIMEOUT_S = 30.0  # more than a launch may take after its time is over
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
  python -m freescale.bench.end_to_end --links sockets --cuts 8000 --batch-sizes 128 --seconds 100
  python -m freescale.bench.end_to_end --device cpu

The first batch size goes with all cuts, and the first cut with all batch sizes; --cells takes any. Contenders are timed
in the order given: what --seconds leaves no time for is named.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, 1 when something failed, 2 for a mistake in the arguments.
    """
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        refuse_inside_a_launch()
        _complete(options)
        if options.results is not None:
            from . import end_to_end_plot  # noqa: F401 - a missing matplotlib shows now, not after the run
    except (ValueError, LaunchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    started = time.time()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        broken, version = _run(options, Path(folder), found, started, console)
    result = rows(found, options.ranks)
    for table in [*tables(result), *host_stages(found)]:
        print_table(table, console)
    said = [*faults(found), *broken]
    for line in [*verdicts(result), *said]:
        console.print(line, markup=False)
    _write(options, result, found, [f"torchrec {version}", *said], console)
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
    add("--ranks", type=at_least_one, default=2, help="one a GPU (default 2)")
    add("--contenders", nargs="+", choices=tuple(CONTENDERS), help="default: all that run there")
    add("--links", nargs="+", choices=tuple(LINKS), help="default: nvlink and shared memory")
    add("--cuts", type=at_least_one, nargs="+", help="longest histories, in ids (default 8000 21000 2000)")
    add("--batch-sizes", type=at_least_one, nargs="+", help="samples a rank (default 128 32 512)")
    add("--even", action="store_true", help="also once where there is nothing to gain: equal lengths, tiny table")
    add("--cells", nargs="+", metavar="CELL", help="instead: workloads in this order, as 8000x128 (cut, batch) or even")
    add("--ratio", type=float, default=5.0, help="percent of distinct rows that collide (default 5)")
    add("--rows", type=at_least_one, help="rows of the table (default 10,000,000)")
    add("--rounds", type=at_least_one, default=2, help="turns of all contenders in a launch (default 2)")
    add("--warm-up", type=at_least_one, default=5, help="steps before each measurement, more than 2 (default 5)")
    add("--timed", type=at_least_one, default=12, help="steps of each measurement (default 12)")
    add("--traced", type=int, default=7, help="steps under the profiler (default 7; 0: none)")
    add("--all-threads", action="store_true", help="traces show the balancer's thread too, and cost more")
    add("--seconds", type=float, default=1e5, help="start no measurement after so many seconds")
    add("--keep-traces", type=Path, metavar="FOLDER", help="keep rank 0's traces")
    add("--json", type=output_file, metavar="FILE", help="write everything measured to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file and picture")
    return parser


def _complete(options: argparse.Namespace) -> None:
    """Fill in what depends on the device, and refuse what makes no sense."""
    if options.device == "cpu" and "sdd_dedup" in (options.contenders or []):
        raise ValueError("sdd_dedup runs on GPUs only: FBGEMM removes duplicates there")
    options.contenders = options.contenders or [c for c in CONTENDERS if options.device == "cuda" or c != "sdd_dedup"]
    for name, default in _DEFAULTS[options.device].items():
        setattr(options, name, getattr(options, name) or default)
    cells(options)  # refuses what is no cell
    if not 0 <= options.ratio <= 100:
        raise ValueError(f"--ratio must be from 0 to 100, got {options.ratio}")
    if options.warm_up < 3:
        raise ValueError(f"--warm-up must be at least 3, got {options.warm_up}")
    if 0 < options.traced < 4:
        raise ValueError(f"--traced must be at least 4, because three of the steps are left out, got {options.traced}")
    if options.device == "cuda":
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
    options: argparse.Namespace, folder: Path, found: list[dict[str, Any]], started: float, console: Console
) -> tuple[list[str], str]:
    """Run a launch for each link; what fails is said, and the others go on. Also gives the version of TorchRec."""
    launcher = Launcher(options.device, folder, ranks="end_to_end_rank")
    broken: list[str] = []
    if options.keep_traces is not None:
        options.keep_traces.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(**{**vars(_SIZES[options.device]), **({"num_rows": options.rows} if options.rows else {})})
    pace = Pace(options.warm_up, options.timed, options.rounds, options.traced, ring=4)
    end = started + options.seconds
    try:
        launcher.await_ready()
        for number, link in enumerate(options.links):
            until = time.time() + (end - time.time()) / (len(options.links) - number)
            place = folder / str(number)
            place.mkdir()
            settings = Settings(
                options.device, options.ranks, link, options.contenders, cells(options), sizes, options.ratio / 100,
                pace, options.all_threads, until,
            )  # fmt: skip
            new, fault = launcher.run(settings, place, until - time.time() + _LAUNCH_TIMEOUT_S)
            read_traces(new, options.keep_traces, reader="freescale.bench.straggler_trace")
            found += new
            broken += [] if fault is None else [f"{link}: {fault}"]
            _keep(options, found, broken)
            console.print(f"[{time.time() - started:6.1f} s] {link}: {len(new)} records", markup=False)
            for line in broken[-1:]:
                console.print(line, markup=False)
    except LaunchError as error:
        broken.append(str(error))
    finally:
        launcher.close()
    return broken, launcher.torchrec


def _keep(options: argparse.Namespace, found: list[dict[str, Any]], said: list[str]) -> None:
    """Write what was measured so far, so that a run that is cut short loses nothing."""
    if options.json is not None:
        about = environment(_PACKAGES)
        options.json.write_text(json.dumps({"environment": about, "notes": said, "found": found}, indent=1) + "\n")


def _write(
    options: argparse.Namespace, result: dict[Key, Row], found: list[dict[str, Any]], said: list[str], console: Console
) -> None:
    """Write what was asked for."""
    _keep(options, found, said)
    if options.results is not None:
        told = "\n".join(f"- {line}" for line in verdicts(result))
        parts: list[Table | str] = [*said, *tables(result), told, *host_stages(found)]
        title = "Balanced and prioritized, beside TorchRec"
        about = environment(_PACKAGES)
        path = write_result(options.results, f"end-to-end-{options.device}", title, about, parts)
        if any(row.traced for row in result.values()):
            from .end_to_end_plot import draw

            draw(result, path.with_suffix(".png"))
            with path.open("a") as file:
                file.write(f"\n![Where the time of a step goes]({path.stem}.png)\n")
        console.print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
