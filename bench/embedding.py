"""`python -m freescale.bench.embedding`: prioritized embeddings beside TorchRec's pipelines, in one run (section 5.2).

On two GPUs or more, over NVLink, shared memory and sockets: step time, bubble, exposed traffic by kind, memory, over
lengths and collision ratios, after a check that all train alike. With `--device cpu` a small dry run of all of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import at_least_one, input_files, output_file, output_folder, picture_file, seconds, write_figures
from .embedding_launches import Launcher, read_traces, run_all
from .embedding_report import LEGEND, Report, faults, found_checks, notes, tables
from .embedding_settings import LINKS, Cell, Pace, Settings, Sizes
from .environment import environment
from .launch import LaunchError, refuse_inside_a_launch
from .progress import progress
from .tables import Table, picture_beside, print_table, write_result

_CONTENDERS = ("base", "sdd", "sdd_dedup", "synchronous", "prioritized")

_SIZES = {
    "cuda": Sizes(batch_size=128, num_rows=10_000_000, dim=128, width=256, num_layers=3, median=3500.0),
    "cpu": Sizes(batch_size=8, num_rows=4000, dim=16, width=64, num_layers=1, median=30.0),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "links": list(LINKS),
        "cuts": [8000, 2000, 21000],
        "ratios": [5.0, 0.0, 1.0, 25.0, 100.0],
        "contenders": list(_CONTENDERS),
    },
    "cpu": {
        "links": ["sockets"],
        "cuts": [60, 20],
        "ratios": [5.0, 50.0],
        "contenders": [name for name in _CONTENDERS if name != "sdd_dedup"],
    },
}

_EPILOG = """\
examples:
  python -m freescale.bench.embedding --results bench/results --json out/embedding.json
  python -m freescale.bench.embedding --links nvlink --ratios 5 --tables 1 2 --popular --limit-s 120
  python -m freescale.bench.embedding --device cpu

One of cut, ratio and number of tables varies at a time; the others stay at the first value given. A cell that --limit-s
leaves no time for is named; where a launch breaks off, the rest goes on without what broke it. PEC is part of torchrec
1.9: where another version is installed, put 1.9 into a folder (pip install --no-deps --target FOLDER torchrec==1.9.2)
and give --pec-packages FOLDER.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, 1 when a launch failed or the contenders do not train alike, 2 for a mistake in the arguments.
    """
    options = _parser().parse_args(arguments)
    console = Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        refuse_inside_a_launch()
        _complete(options)
        report, about = read_runs(options.read) if options.read else (Report(_sizes(options), [], [], []), {})
        if options.results is not None or options.plot is not None:
            from . import embedding_plot  # noqa: F401 - a missing matplotlib shows now, not after the run
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.read:
        started = time.time()
        with tempfile.TemporaryDirectory() as folder, progress(console, "measuring"):
            _run(options, Path(folder), report, lambda line: _say(console, started, line))
        about = _environment()
    for table in tables(report):
        print_table(table, console)
    for line in [*notes(report), *faults(report)]:
        console.print(line, markup=False)
    _write(options, report, about, console)
    return 1 if faults(report) else 0


def _say(console: Console, started: float, line: str) -> None:
    console.print(f"[{time.time() - started:6.1f} s] {line}", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.embedding",
        description="Train one model with its tables under TorchRec's pipelines and under ours, and time all in turn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run over gloo, small (default cuda)")
    add("--ranks", type=at_least_one, default=2, help="one a GPU (default 2)")
    add("--contenders", nargs="+", choices=_CONTENDERS, help="default: all that run there")
    add("--pec-packages", type=Path, metavar="FOLDER", help="folder with torchrec 1.9, for PEC")
    add("--links", nargs="+", choices=tuple(LINKS), help="default: all")
    add("--cuts", type=at_least_one, nargs="+", help="longest histories, in ids (default 8000 2000 21000)")
    add("--ratios", type=float, nargs="+", help="percent of distinct rows that collide (default 5 0 1 25 100)")
    add("--ratio-links", nargs="+", choices=tuple(LINKS), help="links on which ratios vary (default: all)")
    add("--tables", type=at_least_one, nargs="+", default=[1], help="numbers of tables (default 1)")
    add("--popular", action="store_true", help="also once with the most popular rows recurring")
    add("--rows", type=at_least_one, help="rows of a table (default 10,000,000)")
    add("--batch-size", type=at_least_one, help="samples a rank (default 128)")
    add("--launches", type=at_least_one, default=1, help="launches of each link, interleaved (default 1)")
    add("--rounds", type=at_least_one, default=2, help="turns of all contenders in a launch (default 2)")
    add("--warm-up", type=at_least_one, default=5, help="steps before each measurement (default 5)")
    add("--timed", type=at_least_one, default=10, help="steps of each measurement (default 10)")
    add("--traced", type=int, default=7, help="steps under the profiler (default 7; 0: none)")
    add("--memory-steps", type=int, default=0, help="watch memory over so many steps (default 0)")
    add("--unchecked", action="store_true", help="neither compare weights nor look for waits: after a run that did")
    add("--limit-s", "--seconds", type=seconds, default=1e5, metavar="S", help="start no measurement after S seconds")
    add("--keep-traces", type=Path, metavar="FOLDER", help="keep rank 0's traces")
    add("--plot", type=picture_file, metavar="FILE", help="draw exposed traffic, as in Figure 9")
    add("--json", type=output_file, metavar="FILE", help="write everything measured to a file")
    add("--read", type=Path, nargs="+", default=[], metavar="FILE", help="measure nothing: report on what --json wrote")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file and picture")
    return parser


def _complete(options: argparse.Namespace) -> None:
    """Fill in what depends on the device, and refuse what makes no sense."""
    if options.device == "cpu" and "sdd_dedup" in (options.contenders or []):
        raise ValueError("sdd_dedup runs on GPUs only: FBGEMM removes duplicates there")
    for name, default in _DEFAULTS[options.device].items():
        setattr(options, name, getattr(options, name) or default)
    if any(not 0 <= ratio <= 100 for ratio in options.ratios):
        raise ValueError(f"--ratios must be from 0 to 100, got {options.ratios}")
    if 0 < options.traced < 4:
        raise ValueError(f"--traced must be at least 4, because three of the steps are left out, got {options.traced}")
    if options.pec_packages is not None and not (options.pec_packages / "torchrec").is_dir():
        raise ValueError(f"--pec-packages must be a folder with torchrec in it, {options.pec_packages} is not")
    if options.device == "cuda" and not options.read:
        import torch

        if torch.cuda.device_count() < options.ranks:
            raise ValueError(f"--ranks {options.ranks} needs as many GPUs, there are {torch.cuda.device_count()}")


def _sizes(options: argparse.Namespace) -> Sizes:
    base = _SIZES[options.device]
    given = {"batch_size": options.batch_size, "num_rows": options.rows}
    return Sizes(**{**vars(base), **{name: value for name, value in given.items() if value is not None}})


def cells(options: argparse.Namespace, link: str) -> list[Cell]:
    """The workloads of a link, most important first, those with as many tables next to each other."""
    cut, ratio, num_tables = options.cuts[0], options.ratios[0] / 100, options.tables[0]
    chosen = [Cell(each, ratio, num_tables) for each in options.cuts]
    if options.ratio_links is None or link in options.ratio_links:
        chosen += [Cell(cut, each / 100, num_tables) for each in options.ratios[1:]]
    if options.popular:
        chosen.append(Cell(cut, ratio, num_tables, "popular"))
    return chosen + [Cell(cut, ratio, each) for each in options.tables[1:]]


# ---- launches ----------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, folder: Path, report: Report, say: Any) -> None:
    """Run all launches; what fails is noted, and the others go on."""
    launchers = {"installed": Launcher(options.device, folder)}
    if options.pec_packages is None:
        report.notes.append("PEC: skipped, it is part of torchrec 1.9 (see --pec-packages)")
    else:
        launchers["pec"] = Launcher(options.device, folder, options.pec_packages)
    if options.keep_traces is not None:
        options.keep_traces.mkdir(parents=True, exist_ok=True)
    try:
        for name, launcher in list(launchers.items()):
            try:
                launcher.await_ready()
                report.notes.append(_versions(name, launcher))
                say(report.notes[-1])
            except LaunchError as error:
                report.faults.append(f"{name}: {error}")
                launchers.pop(name).close()
        _run_launches(options, folder, report, say, launchers)
    finally:
        for launcher in launchers.values():
            launcher.close()


def _versions(name: str, launcher: Launcher) -> str:
    supplied = f", {len(launcher.supplied)} modules supplied from an older FBGEMM" if launcher.supplied else ""
    return f"{'PEC' if name == 'pec' else 'all but PEC'}: torchrec {launcher.torchrec}{supplied}"


def _run_launches(
    options: argparse.Namespace, folder: Path, report: Report, say: Any, launchers: dict[str, Launcher]
) -> None:
    """Interleave links and versions; each launch gets a share of what time is left, by how much it is to measure."""
    end, late = time.time() + options.limit_s, 0.0
    planned = list(_plan(options, launchers))
    shares = [len(cells(options, link)) * len(_contenders(options, name)) for _, link, name in planned]
    for number, (launch, link, name) in enumerate(planned):
        left = end - late - time.time()
        if left <= 0:
            report.notes.append(f"no time for launch {launch + 1} of {name} over {link}")
            continue
        until = time.time() + left * shares[number] / sum(shares[number:])
        place = folder / str(number)
        place.mkdir()
        found, broken = run_all(launchers[name], _settings(options, link, name, launch, until), place)
        ended = time.time()
        late = max(late, ended - until)  # a measurement that has begun is ended, and the ranks end: what it takes
        read_traces(found, options.keep_traces)
        report.found += [{**each, "launch": launch} for each in found]
        report.faults += [f"{name} over {link}: {fault}" for fault in broken]
        say(
            f"{name} over {link}, launch {launch + 1}: {len(found)} records, traces read in {time.time() - ended:.1f} s"
        )
        for line in found_checks(found) + broken:
            say(line)
        if options.json is not None:  # at once: a run that is cut keeps what it has
            _write_json(options.json, report, _environment())


def _plan(options: argparse.Namespace, launchers: dict[str, Launcher]) -> Iterator[tuple[int, str, str]]:
    for launch in range(options.launches):
        for link in options.links:
            for name in launchers:
                yield launch, link, name


def _contenders(options: argparse.Namespace, name: str) -> list[str]:
    return ["pec"] if name == "pec" else options.contenders


def _settings(options: argparse.Namespace, link: str, name: str, launch: int, until: float) -> Settings:
    first = launch == 0 and link == options.links[0]
    looks = first and not options.unchecked
    pace = Pace(
        options.warm_up,
        options.timed,
        options.rounds,
        options.traced,
        traced_ours=23 if looks and options.traced else 0,
        memory_steps=options.memory_steps if first else 0,
    )
    contenders = _contenders(options, name)
    check = looks and name != "pec"
    return Settings(
        options.device, options.ranks, link, contenders, cells(options, link), _sizes(options), pace, check, until
    )


def read_runs(paths: Sequence[Path]) -> tuple[Report, dict[str, str]]:
    """Put several runs together, the launches of one after those of the other.

    Returns:
        What they found, and where the first came from, with the commands of all.
    """
    runs = input_files(paths, ("environment", "sizes", "found", "faults", "notes"))
    report = Report(Sizes(**runs[0]["sizes"]), found=[], faults=[], notes=[])
    for run in runs:
        before = 1 + max((each["launch"] for each in report.found), default=-1)
        report.found += [{**each, "launch": each["launch"] + before} for each in run["found"]]
        report.faults += run["faults"]
        report.notes += [note for note in run["notes"] if note not in report.notes]
    return report, {**runs[0]["environment"], "command": "; ".join(run["environment"]["command"] for run in runs)}


def _environment() -> dict[str, str]:
    return environment(("torch", "torchrec", "fbgemm_gpu", "numpy"))


def _write_json(path: Path, report: Report, about: dict[str, str]) -> None:
    write_figures(path, {"environment": about, **asdict(report)})


def _write(options: argparse.Namespace, report: Report, about: dict[str, str], console: Console) -> None:
    """Write what was asked for."""
    if options.json is not None:
        _write_json(options.json, report, about)
        console.print(f"measurements: {options.json}")
    name, title = f"embedding-{options.device}", "Prioritized embeddings beside TorchRec"
    if options.results is not None and options.plot is None:
        options.plot = options.results / f"{datetime.now(UTC):%Y-%m-%d}-{name}.png"
    traced = any(each["kind"] == "trace" for each in report.found)
    if options.plot is not None and traced:
        from .embedding_plot import draw

        draw(report, options.plot)
        console.print(f"picture: {options.plot}")
    if options.results is not None:
        said = "\n".join(f"- {line}" for line in notes(report))
        picture = picture_beside(options.plot, options.results, title) if traced else []
        parts: list[Table | str] = [said, LEGEND, *picture, *tables(report), *faults(report)]
        path = write_result(options.results, name, title, about, parts)
        console.print(f"written to {path}")


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended from outside"))  # and with it the ranks
    sys.exit(main())
