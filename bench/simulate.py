"""Training steps on 2 to 4,096 ranks, simulated, with and without each technique (paper, Figures 8(c), 9 and 11)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .arguments import at_least_one, output_file, output_folder, picture_file, status_of, write_figures
from .compute_fit import COMPUTE_PATTERN, RESULTS, ComputeFit
from .environment import environment
from .simulate_check import compare
from .simulate_comparison import comparison_table
from .simulate_comparison import said as said_of
from .simulate_load import Workload, as_loaded, by_measured_cost, step_loads
from .simulate_network import CLUSTERS, Cluster, cluster_of
from .simulate_schedule import Schedule
from .simulate_step import TECHNIQUES, Model, Simulated, simulate
from .simulate_trace import trace, write_trace
from .simulate_traffic import samples_of
from .tables import Table, picture_beside, print_part, write_result

_EPILOG = f"""examples:
  python -m freescale.bench.virtual_ranks --json out/virtual.json        # once, on your GPU: what computing costs
  python -m freescale.bench.simulate --compute out/virtual.json --world-size 2 64 1024 --trace out/steps.json
  python -m freescale.bench.simulate --compute out/virtual.json --cluster ethernet_100 --data data.parquet:uih_page

Nothing here is measured on many GPUs: steps are simulated from measured compute time, real lengths, the real
partitioner, ids as they are, and an alpha-beta model of the network. Clusters: {", ".join(CLUSTERS)};
each parameter can be set, as in paper:between_gb_s=12.5,host_ms=1. Open the trace at https://ui.perfetto.dev."""


@dataclass(frozen=True)
class Row:
    """One technique on one number of ranks. Simulated."""

    technique: str
    cluster: str
    world_size: int
    real_id_sets: bool
    collisions: float
    simulated: Simulated


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.simulate",
        description="Simulate training steps of many ranks, with and without each technique.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, at_least_one
    zipf = "zipf[:exponent=…,rows=…,median=…,sigma=…]"
    add("--compute", type=Path, metavar="FILE", help="JSON of bench.virtual_ranks (default: newest in bench/results)")
    add("--data", default="zipf", metavar="SOURCE", help=f"path.parquet:column, or {zipf} (default zipf)")
    add("--cluster", default=["paper"], nargs="+", metavar="NAME", help="what collectives run on (default paper)")
    add("--world-size", type=count, nargs="+", default=[2, 8, 64, 256, 1024, 4096], metavar="N", help="ranks")
    add("--batch-size", type=count, default=128, metavar="N", help="samples a rank (default 128)")
    add("--max-length", type=count, default=21000, metavar="N", help="longest history (default 21000)")
    add("--row-bytes", type=count, default=512, metavar="N", help="of an embedding row (default 512: 128 floats)")
    add("--dense-bytes", type=count, default=8_000_000, metavar="N", help="of the all-reduced gradients (default 8e6)")
    add("--contention", type=float, default=0.1, metavar="X", help="how much NCCL slows what it overlaps (default 0.1)")
    add("--layers", type=float, default=1.0, metavar="X", help="compute time as a multiple of the measured model's")
    add("--steps", type=count, default=4, metavar="N", help="steps that count, after one that does not (default 4)")
    add("--most-ids", type=count, default=10_000_000, metavar="N", help="count real sets up to so many ids (1e7)")
    add("--collisions", type=float, metavar="X", help="share of the rows that collide (default: as the ids have it)")
    add("--seed", type=int, default=0, help="of what is drawn (default 0)")
    add(
        "--check",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="JSON of bench.embedding or bench.end_to_end: compare with their measured steps first",
    )
    add("--trace", type=output_file, metavar="FILE.json", help="write the smallest and largest run for Perfetto")
    steps = "draw two steps of the smallest run, with and without"
    add("--trace-plot", type=output_file, metavar="FILE.png", help=steps)
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None or options.trace_plot is not None:
        from . import pictures  # noqa: F401 - before the work, so that a missing library shows at once
    _check_ranges(options)
    clusters = {name: cluster_of(name) for name in options.cluster}
    fit, came_from = compute_of(options.compute, options.layers)
    samples = samples_of(options.data, options.seed)
    limits = (options.max_length, options.batch_size, options.steps + 1, options.most_ids, options.seed)
    workload = Workload(samples, fit, *limits, collisions=options.collisions)
    model = Model(options.row_bytes, options.dense_bytes, options.contention)
    compared = [each for path in options.check for each in compare(path)]
    checks: list[Table | str] = [comparison_table(compared), said_of(compared)] if compared else [_UNCHECKED]
    for check in checks:
        print_part(check, console)
    rows, schedules = _simulate_sizes(options.world_size, workload, clusters, model, console)
    tables = [_table(rows, name, options) for name in clusters]
    said = [verdict(rows), _method(samples.title, came_from, fit, clusters, options.collisions)]
    parts: list[Table | str] = [*tables, *said]
    for part in parts:
        print_part(part, console)
    _write_traces(options, schedules, samples.title, came_from, console)
    if options.json is not None:
        found_all = {
            "kind": "simulate",
            "simulated": True,
            "environment": environment(),
            "clusters": {name: asdict(cluster) for name, cluster in clusters.items()},
            "fit": fit.to_dict(),
            "rows": [asdict(row) for row in rows],
            "compared": [asdict(each) for each in compared],
        }
        write_figures(options.json, found_all)
        console.print(f"figures: {options.json}")
    if options.plot is not None:
        from .simulate_plot import draw

        draw(rows, options.plot, samples.title)
        console.print(f"picture: {options.plot}")
    if options.results is not None:
        shown = picture_beside(options.plot, options.results, "simulated steps")
        about: list[Table | str] = [*said, *checks, *shown, *tables]
        path = write_result(options.results, "simulate", "Many ranks, simulated", environment(), about)
        console.print(f"written to {path}")


def _check_ranges(options: argparse.Namespace) -> None:
    if not 0 <= options.contention < 10 or not 0 < options.layers < 1e6:
        raise ValueError(
            f"--contention must be in [0, 10) and --layers over 0, got {options.contention}, {options.layers}"
        )
    if options.collisions is not None and not 0 <= options.collisions <= 1:
        raise ValueError(f"--collisions must be from 0 to 1, got {options.collisions}")


def _simulate_sizes(
    sizes: Sequence[int], workload: Workload, clusters: dict[str, Cluster], model: Model, console: Console
) -> tuple[list[Row], dict[str, Schedule]]:
    """Rows of every number of ranks, and the schedules of the smallest and the largest, which traces show."""
    rows: list[Row] = []
    schedules: dict[str, Schedule] = {}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for world_size in progress.track(sizes, description="simulating"):
            found, events = simulate_all(workload, world_size, clusters, model)
            rows += found
            if world_size in (min(sizes), max(sizes)):
                schedules |= {f"{world_size} ranks, {name}": schedule for name, schedule in events.items()}
    return rows, schedules


def _write_traces(
    options: argparse.Namespace, schedules: Mapping[str, Schedule], title: str, came_from: str, console: Console
) -> None:
    if options.trace is not None:
        write_trace(options.trace, schedules, f"{title}; {came_from}")
        console.print(f"trace, for https://ui.perfetto.dev: {options.trace}")
    if options.trace_plot is not None:
        from .trace_picture import draw_steps

        techniques = ("TorchRec, SDD", "FreeScale")
        shown = [f"{min(options.world_size)} ranks, {each}, {options.cluster[0]}" for each in techniques]
        draw_steps(trace(schedules, title), shown, options.trace_plot)
        console.print(f"picture: {options.trace_plot}")


_UNCHECKED = (
    "Not checked against measured steps: give --check the JSON of bench.embedding or bench.end_to_end for that."
)


def compute_of(path: Path | None, layers: float = 1.0) -> tuple[ComputeFit, str]:
    """Read what computing costs, and say where that was measured.

    Args:
        path: JSON of bench.virtual_ranks; None for the newest in bench/results.
        layers: Factor on the seconds.

    Raises:
        ValueError: There is none, or it is no such file; says how to make one.
    """
    if path is None:
        there = sorted(RESULTS.glob(COMPUTE_PATTERN))
        if not there:
            raise ValueError(
                "compute time is not known: run python -m freescale.bench.virtual_ranks --json FILE, then give "
                "--compute FILE"
            )
        path = there[-1]
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found.get("kind") != "virtual_ranks":
            raise ValueError(f"{path} was not written by bench.virtual_ranks")
        fit = ComputeFit.from_dict(found["fit"])
    except (OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot read compute time from {path}: {error}") from error
    terms = {name: layers * value for name, value in fit.to_dict().items() if name not in ("error", "noise")}
    scaled = ComputeFit(**terms, error=fit.error, noise=fit.noise)
    return scaled, f"compute time as measured on {found.get('device', 'an unknown device')} ({path.name})"


def simulate_all(
    workload: Workload, world_size: int, clusters: dict[str, Cluster], model: Model
) -> tuple[list[Row], dict[str, Schedule]]:
    """Simulate every technique on every cluster."""
    loads = {
        False: step_loads(workload, world_size, as_loaded),
        True: step_loads(workload, world_size, by_measured_cost(workload.fit)),
    }
    rows, events = [], {}
    for cluster_name, cluster in clusters.items():
        for technique in TECHNIQUES:
            steps = loads[technique.balanced]
            found, schedule = simulate(technique, steps, cluster, model)
            real, share = steps[1].traffic.real, steps[1].traffic.collisions
            rows.append(Row(technique.name, cluster_name, world_size, real, share, found))
            events[f"{technique.name}, {cluster_name}"] = schedule
    return rows, events


def _table(rows: Sequence[Row], cluster: str, options: argparse.Namespace) -> Table:
    heads = ["ranks, technique (simulated)", "step ms", "straggler %", "exposed ms", "bubble ms", "samples/s", "gain"]
    heads.append("collisions %")
    title = f"Simulated: {cluster}, {options.max_length:,} / {options.batch_size}"
    table = Table(title, heads)
    for row in rows:
        if row.cluster == cluster:
            base = _found(rows, row.cluster, row.world_size, "TorchRec")
            found = row.simulated
            table.add(
                f"{row.world_size:,}{'' if row.real_id_sets else ' ~'}, {row.technique}",
                f"{found.step_ms:.1f}",
                f"{found.straggler_percentage:.2f}",
                f"{found.exposed_ms:.2f}",
                f"{found.bubble_ms:.2f}",
                f"{found.samples_per_s:,.0f}",
                f"{found.samples_per_s / base.samples_per_s:.2f} x",
                f"{100 * row.collisions:.1f}",
            )
    return table


def _found(rows: Sequence[Row], cluster: str, world_size: int, technique: str) -> Simulated:
    same = (r for r in rows if (r.cluster, r.world_size, r.technique) == (cluster, world_size, technique))
    return next(same).simulated


def verdict(rows: Sequence[Row]) -> str:
    """Say in one sentence what everything together does to the bubble."""
    cluster = rows[0].cluster
    most = max(row.world_size for row in rows)
    names = ("TorchRec", "TorchRec, SDD", "TorchRec, SDD, ids deduplicated", "FreeScale")
    base, sdd, deduplicated, ours = (_found(rows, cluster, most, name) for name in names)
    less = [100 * (1 - ours.bubble_ms / other.bubble_ms) for other in (base, sdd, deduplicated)]
    faster = ours.samples_per_s / base.samples_per_s
    return (
        f"Simulated, {most:,} ranks, {cluster}: everything together leaves a bubble of {ours.bubble_ms:.1f} ms of "
        f"{base.bubble_ms:.1f} ms: {less[0]:.1f} % less than TorchRec, {less[1]:.1f} % less than with SDD, "
        f"{less[2]:.1f} % less than with SDD and ids deduplicated; {faster:.2f} times TorchRec's samples a second."
    )


def _method(
    samples: str, came_from: str, fit: ComputeFit, clusters: dict[str, Cluster], collisions: float | None
) -> str:
    said = "; ".join(f"{name}: {cluster}" for name, cluster in clusters.items())
    how = "as the ids have them" if collisions is None else f"set to {100 * collisions:g} % by --collisions"
    return (
        f"Simulated, not measured. Samples: {samples}. Computing: {came_from}, what the fit leaves over "
        f"({100 * fit.error:.2f} %) drawn anew for each rank and step. Balanced: the default partitioner on fitted "
        f"seconds. Rows: real sets of ids; with ~ after the number of ranks, expected from their popularity. Gain: "
        f"samples a second over TorchRec's. Collisions, the share of the rows a rank asks for that the next step asks "
        f"for too: {how}. {said}."
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
