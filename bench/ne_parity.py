"""`python -m freescale.bench.ne_parity --data FILE`: balancing and prioritizing change nothing that is learnt (5.4).

Trains the same model on the same global batches of a Parquet log, an epoch in each way: as loaded and synchronous,
balanced, prioritized, both. The curves of the normalized entropy have to be one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from ..balancer import read_parquet
from .arguments import at_least_one, output_file, output_folder, picture_file, status_of, write_figures
from .demo_data import choose_columns
from .environment import environment
from .launch import LaunchError, launch, refuse_inside_a_launch, tracebacks
from .ne_parity_rank import WAYS, Settings
from .normalized_entropy import curve
from .roles import infer_roles
from .synthetic import write_synthetic
from .tables import Table, picture_beside, print_table, write_result

_STEPS = 64  # of generated data, where no number is given

Runs = dict[str, list[list[float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, 1 when curves differ by more than the tolerance or a rank failed, 2 for a mistake in the
        arguments.
    """
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())))


def _run(options: argparse.Namespace, console: Console) -> int:
    refuse_inside_a_launch()
    if options.results is not None or options.plot is not None:
        from . import ne_parity_plot  # noqa: F401 - a missing matplotlib shows now, not after the run
    with tempfile.TemporaryDirectory() as folder:
        options.data = options.data or _generated(options, Path(folder))
        settings = _settings(options, console)
        console.print(f"{options.data.name}: {settings.roles.describe()}", markup=False)
        runs = _train(settings, options.ranks, console)
    table, largest = compare(runs)
    print_table(table, console)
    verdict = f"largest difference {largest:.1e}: {'within' if largest <= options.tolerance else 'beyond'} "
    console.print(f"{verdict}{options.tolerance:g}")
    _write(options, runs, table, f"{verdict}{options.tolerance:g}.", settings, console)
    return 0 if largest <= options.tolerance else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.ne_parity",
        description="Train an epoch in four ways that should make no difference, and compare normalized entropies.",
        epilog="example: python -m freescale.bench.ne_parity --data clicks.parquet --ranks 4 --plot out/curves.png",
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="Parquet, with a label (default: a heavy-tailed set is generated)")
    add("--ranks", type=at_least_one, default=4, help="processes (default 4)")
    add("--batch-size", type=at_least_one, default=32, help="samples a rank (default 32)")
    add("--steps", type=at_least_one, help="at most so many (default: an epoch)")
    add("--rows", type=at_least_one, default=4096, help="rows of each table (default 4096)")
    add("--width", type=at_least_one, default=32, help="of the model (default 32)")
    add("--seed", type=int, default=0, help="of the weights (default 0)")
    add("--tolerance", type=float, default=1e-6, help="of the normalized entropy (default 1e-6)")
    add("--uih", help="column of the history (default: guessed, as by bench.demo)")
    add("--label", help="column of the label (default: guessed)")
    add("--candidates", help="column of the candidates (default: guessed)")
    add("--plot", type=picture_file, metavar="FILE", help="draw the curves")
    add("--json", type=output_file, metavar="FILE", help="write everything measured to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file and picture")
    return parser


def _generated(options: argparse.Namespace, folder: Path) -> Path:
    """Generate data, as bench.demo does, for so many steps as are asked for."""
    path = folder / "generated.parquet"
    num_samples = options.ranks * options.batch_size * (options.steps or _STEPS)
    write_synthetic(path, num_samples, num_row_groups=options.ranks, seed=options.seed)
    return path


def _settings(options: argparse.Namespace, console: Console) -> Settings:
    """What the ranks are told.

    Raises:
        ValueError: The file has no history or no label.
    """
    try:
        roles = infer_roles(options.data, options.uih, options.candidates, options.label)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {options.data}: {str(error).splitlines()[0]}") from error
    if roles.label is None:
        raise ValueError(f"{options.data} has no label that a click rate could be told of; name its column by --label")
    roles, columns = choose_columns(options.data, roles, None, lambda line: console.print(line, markup=False))
    return Settings(
        str(options.data.resolve()), columns, roles, options.batch_size, options.steps, options.rows, options.width,
        options.seed,
    )  # fmt: skip


def _train(settings: Settings, world_size: int, console: Console) -> Runs:
    """Run the ranks. For each way a list of steps: sum of losses, clicks, items."""
    loaders = [
        read_parquet(settings.data, settings.batch_size, rank=r, world_size=world_size) for r in range(world_size)
    ]
    steps = min(max(len(loader) for loader in loaders), settings.num_steps or sys.maxsize)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        path = Path(folder) / "settings.json"
        settings.save(path)
        task = progress.add_task("training", total=steps * len(WAYS))
        try:
            launch(
                "process_group", world_size, "freescale.bench.ne_parity_rank", path, lambda _: progress.advance(task)
            )
        except LaunchError as error:
            raise LaunchError(f"{error}\n{tracebacks(Path(folder))}") from None
        runs: Runs = json.loads(path.with_name("runs.json").read_text())
        return runs


def curves(runs: Runs) -> dict[str, list[float]]:
    """Normalized entropy after each step, by title."""
    return {WAYS[name].title: curve(*map(list, zip(*steps, strict=True))) for name, steps in runs.items()}


def compare(runs: Runs) -> tuple[Table, float]:
    """A row for each way, and the largest difference from the first, at any step."""
    table = Table(
        "Normalized entropy", ["", "steps", "items", "first step", "whole epoch", "largest difference", "at step"]
    )
    found = curves(runs)
    reference = next(iter(found.values()))
    largest = 0.0
    for (title, values), steps in zip(found.items(), runs.values(), strict=True):
        apart = [abs(a - b) for a, b in zip(values, reference, strict=True)]
        largest = max(largest, *apart)
        items = sum(step[2] for step in steps)
        place = apart.index(max(apart)) + 1
        table.add(
            title, str(len(values)), f"{items:,.0f}", f"{values[0]:.6f}", f"{values[-1]:.6f}", f"{max(apart):.1e}",
            str(place),
        )  # fmt: skip
    return table, largest


def _write(
    options: argparse.Namespace, runs: Runs, table: Table, verdict: str, settings: Settings, console: Console
) -> None:
    """Write what was asked for."""
    about = environment()
    if options.json is not None:
        write_figures(options.json, {"environment": about, "runs": runs})
    if options.plot is None and options.results is None:
        return
    from .ne_parity_plot import draw

    if options.plot is not None:
        draw(curves(runs), options.tolerance, options.plot)
    if options.results is not None:
        method = (
            f"{options.ranks} ranks, {settings.batch_size} samples a rank and step, float32, one epoch in each way on "
            "the same global batches; rowwise Adagrad for the tables, Adagrad for the rest; every loss is scaled by "
            "`report.loss_scale`. Normalized entropy is the log loss of everything up to a step over that of the "
            f"average click rate. {settings.roles.describe()}."
        )
        path = write_result(options.results, "ne-parity", "Normalized entropy does not change", about, [method, table])
        picture = options.plot or path.with_suffix(".png")
        if options.plot is None:
            draw(curves(runs), options.tolerance, picture)
        with path.open("a") as file:
            file.write("\n".join(["", verdict, "", *picture_beside(picture, options.results, "Curves"), ""]))
        console.print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
