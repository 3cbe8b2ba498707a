"""How long ranks wait, with real kernels on one device: ranks' batches in turn, the barrier computed (Figures 2, 8)."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .arguments import at_least_one, output_file, output_folder, picture_file, seconds, status_of, write_figures
from .compute_fit import ComputeFit
from .environment import environment
from .lengths import length_source
from .stopping import Stopping
from .tables import Table, picture_beside, print_table, write_result
from .virtual_rank_timing import ModelSize, RankTimer, reference_step
from .virtual_runs import read_runs
from .virtual_study import AS_LOADED, COST_MODEL, FLOOR, LEARNING_STEPS, Outcome, Point, Scale, Study, points

_EPILOG = """examples:
  python -m freescale.bench.virtual_ranks                      # on a GPU if there is one, else small on the CPU
  python -m freescale.bench.virtual_ranks --lengths data.parquet:uih_page --base 2000 64 16 --limit-s 60

Every rank's batch is trained on, forward and backward, by the reference model on this one device. The ranks of a step
then wait for the slowest of them: that alone is computed. Straggler percentage is the mean waiting time as a share of
the step. The floor gives all ranks the same batch: what is left is the noise of timing. The cost model has learned from
other global batches."""

_ENOUGH_S = 0.04  # of repeats, on a GPU: steps of 40 ms are timed once
_SCALES = {
    "cuda": Scale(
        Point(21000, 128, 64), (2000, 4000, 8000, 16000), (32, 64, 256), (16, 32, 128, 256), 1.0, ModelSize(256, 4, 1)
    ),
    "cpu": Scale(Point(21000, 32, 32), (2000, 8000), (8, 64), (8, 64), 1 / 64, ModelSize(32, 2, 1, dim=32)),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 if a point failed, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.virtual_ranks",
        description="Measure how long ranks wait for the slowest, with and without balancing, on one device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, at_least_one
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--lengths", default="lognormal", metavar="SOURCE", help="as of bench.partition (default lognormal)")
    add("--base", type=count, nargs=3, metavar=("LENGTH", "BATCH", "RANKS"), help="longest history, batch size, ranks")
    add("--max-length", type=count, nargs="*", metavar="N", help="other cuts of the history, at the base's rest")
    add("--batch-size", type=count, nargs="*", metavar="N", help="other batch sizes, at the base's rest")
    add("--world-size", type=count, nargs="*", metavar="N", help="other numbers of ranks, at the base's rest")
    add("--length-scale", type=float, metavar="X", help="factor on all lengths after the cut (CPU: 1/64)")
    add("--batches", type=count, default=1, metavar="N", help="global batches that are judged (default 1)")
    add(
        "--repeats",
        type=count,
        metavar="N",
        help="take the least of so many times (default 3; on a GPU of short steps)",
    )
    add("--width", type=count, metavar="N", help="width of the model")
    add("--heads", type=count, metavar="N", help="attention heads of the model")
    add("--layers", type=count, metavar="N", help="layers of the model (default 1: more take longer alike)")
    limit = "begin no point that would end later (default 120)"
    add("--limit-s", "--budget-s", type=seconds, default=120.0, metavar="S", help=limit)
    add("--seed", type=int, default=0, help="of lengths, ids and weights (default 0)")
    add("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing: put together what --json wrote")
    add("--json", type=output_file, metavar="FILE", help="write all figures, and the fit that bench.simulate reads")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.plot is not None:
        from . import virtual_plot  # noqa: F401 - before the work, so that a missing library shows at once
    if options.read:
        found, outcomes = read_runs(options.read)
        _show(options, found, outcomes, [], console)
        return 0
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, there is none")
    scale = _scale(options, _SCALES[device.type])
    source = length_source(options.lengths)
    enough_s = _ENOUGH_S if device.type == "cuda" and options.repeats is None else math.inf
    timer = RankTimer(reference_step(scale.model, device, options.seed), device, options.repeats or 3, enough_s)
    study = Study(timer, source, scale, options.seed)

    def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
        about = {"device": _device_name(device), "lengths": options.lengths, "title": source.title}
        return {**_figures(study, scale, outcomes), **about}

    def keep(outcomes: Sequence[Outcome]) -> None:  # at once: a run that is cut keeps what it has
        if options.json is not None:
            write_figures(options.json, figures(outcomes))

    outcomes, failed = _measure_all(study, scale, options, console, keep)
    _show(options, figures(outcomes), outcomes, study.remarks, console)
    return int(failed)


def _show(
    options: argparse.Namespace,
    found: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    remarks: Sequence[str],
    console: Console,
) -> None:
    """Print everything, and write what was asked for."""
    if options.plot is not None:
        from .virtual_plot import draw
    base = Point(outcomes[0].max_length, outcomes[0].batch_size, outcomes[0].world_size)
    titled = f"{found.get('title', found['lengths'])}, lengths x {found['length_scale']:g}, on {found['device']}"
    table = _table(titled, outcomes)
    print_table(table, console)
    remarks = [*remarks, verdict(outcomes, base), _said(ComputeFit.from_dict(found["fit"]))]
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False)
    if options.json is not None:
        write_figures(options.json, {**found, "outcomes": [asdict(outcome) for outcome in outcomes]})
        console.print(f"figures: {options.json}")
    if options.plot is not None:
        draw(outcomes, base, options.plot, titled)
        console.print(f"picture: {options.plot}")
    if options.results is not None:
        title = "Virtual ranks: how long ranks wait for the slowest"
        shown = picture_beside(options.plot, options.results, "virtual ranks")
        about: list[Table | str] = [_METHOD, *shown, table, *remarks]
        path = write_result(options.results, "virtual_ranks", title, found["environment"], about)
        console.print(f"written to {path}")


def _figures(study: Study, scale: Scale, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "kind": "virtual_ranks",
        "environment": environment(),
        "model": asdict(scale.model),
        "length_scale": scale.length_scale,
        "fit": study.fit().to_dict(),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


_METHOD = (
    "Every rank's batch is trained on, forward and backward, on one device, rank after rank and all plans in turn; "
    "only the barrier is computed. Sparsity is Eq. 1, the mean over ranks. The floor gives all ranks the same batch. "
    f"The cost model has learned from {LEARNING_STEPS} other global batches, as loaded and by VBS in turn."
)


def _scale(options: argparse.Namespace, usual: Scale) -> Scale:
    """What was asked for, or what is usual on the device. With a base of one's own the axes are empty."""
    own = options.base is not None
    base = Point(*options.base) if own else usual.base

    def axis(asked: list[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(asked) if asked is not None else () if own else default

    length_scale = usual.length_scale if options.length_scale is None else options.length_scale
    if not 0 < length_scale <= 1:
        raise ValueError(f"--length-scale must be over 0 and at most 1, got {length_scale}")
    given = {"width": options.width, "num_heads": options.heads, "num_layers": options.layers}
    model = replace(usual.model, **{name: value for name, value in given.items() if value is not None})
    if model.width % model.num_heads:
        raise ValueError(f"--width must be a multiple of --heads, got {model.width} and {model.num_heads}")
    return Scale(
        base,
        axis(options.max_length, usual.lengths),
        axis(options.batch_size, usual.batch_sizes),
        axis(options.world_size, usual.world_sizes),
        length_scale,
        model,
    )


def _measure_all(
    study: Study,
    scale: Scale,
    options: argparse.Namespace,
    console: Console,
    keep: Callable[[Sequence[Outcome]], None],
) -> tuple[list[Outcome], bool]:
    """Measure all points, the base first. One that fails is said, and the others go on; also tells whether one did."""
    start, outcomes, failed = time.monotonic(), list[Outcome](), False
    with (
        Stopping() as stopping,
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        task = progress.add_task("learning", total=None)
        study.learn(lambda: progress.advance(task))
        for point in points(scale):
            spent = time.monotonic() - start
            if outcomes and (stopping.requested or spent + study.predicted_s(point, options.batches) > options.limit_s):
                why = "stopped before" if stopping.requested else f"it would not end within {options.limit_s:g} s"
                study.remarks.append(f"{point}: left out, {why}")
                continue
            progress.reset(task, total=point.world_size * options.batches, description=str(point))
            try:
                outcomes += study.measure(point, options.batches, lambda: progress.advance(task))
            except RuntimeError as error:  # out of memory, say
                if not outcomes:
                    raise ValueError(f"the base {point} cannot be measured: {error}") from error
                study.remarks.append(f"{point}: failed, {str(error).splitlines()[0]}")
                failed = True
            keep(outcomes)
    return outcomes, failed


def verdict(outcomes: Sequence[Outcome], base: Point) -> str:
    """Say in one sentence what the base point shows, beside the paper's goals."""
    at_base = {
        o.partitioner: o.straggler_percentage
        for o in outcomes
        if Point(o.max_length, o.batch_size, o.world_size) == base
    }
    before, after, floor = at_base[AS_LOADED], at_base["FBS"], at_base[FLOOR]
    return (
        f"At {base} (longest history / batch size / ranks) ranks wait {before:.1f} % of a step as loaded and "
        f"{after:.2f} % with FBS, {before / max(after, 1e-9):.1f} times less (the paper: more than nine times at "
        f"21,000 / 128 / 64). The measured cost model is at {at_base[COST_MODEL]:.2f} %, "
        f"{at_base[COST_MODEL] - floor:+.2f} points from the floor of {floor:.2f} %."
    )


def _said(fit: ComputeFit) -> str:
    return (
        f"Compute time, fitted to all batches: {1e3 * fit.step:.3g} ms a step + {1e9 * fit.item:.3g} ns an item + "
        f"{1e12 * fit.item_squared:.3g} ps a squared length + {1e6 * fit.sample:.3g} us a sample; what is left over is "
        f"{100 * fit.error:.2f} % (root mean square), of which timing noise {100 * fit.noise:.2f} %."
    )


def _table(title: str, outcomes: Sequence[Outcome]) -> Table:
    heads = [
        "length / batch / ranks, partitioner",
        "batches",
        "straggler %",
        "least to most",
        "sparsity %",
        "mean rank ms",
        "step ms",
    ]
    table = Table(title, heads)
    for o in outcomes:
        point = Point(o.max_length, o.batch_size, o.world_size)
        ends = dict.fromkeys(f"{v:.2f}" for v in (o.straggler_percentage_least, o.straggler_percentage_most))
        table.add(
            f"{point}, {o.partitioner}",
            str(o.batches),
            f"{o.straggler_percentage:.2f}",
            " to ".join(ends),
            f"{100 * o.sparsity:.1f}",
            f"{o.mean_ms:.2f}",
            f"{o.step_ms:.2f}",
        )
    return table


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
