"""`python -m freescale.bench.transport`: transports against NCCL and the link, alone and beside compute (Figure 10)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from .arguments import output_file, output_folder, picture_file, seconds, status_of, write_figures
from .environment import environment
from .launch import LaunchError, launch, refuse_inside_a_launch
from .progress import progress
from .tables import Table, print_part, write_result
from .transport_rank import BETWEEN_GPUS, BY_THE_HOST, Settings

_EPILOG = """examples:
  python -m freescale.bench.transport --plot figure10.png        two or more GPUs of one host, some minutes
  python -m freescale.bench.transport --quick                    a minute
  python -m freescale.bench.transport --ranks 2                  on one GPU: what two ranks that share it can show

Starts one rank a GPU, or more where --ranks says so: ranks that share a GPU share its link to the host too, NCCL
refuses them, a copy between them stays within the GPU, and only the first of them computes. Every way is checked to
bring the right bytes before it is timed. "alone" is the same workload without traffic, measured just before and after.
The ways: NCCL as torch.distributed calls it; NCCL n with n thread blocks; NCCL shm over host memory
(NCCL_P2P_DISABLE=1); process_group, our transport over NCCL; copy_engine; segment, the same through host memory that
both GPUs registered; staged, through pinned memory and gloo. A rank sends the given bytes to the others, and keeps
none. Host memory over MPI: python -m freescale.bench.transport_host."""

_SIZES = tuple(8 << shift for shift in (0, 6, 11, 14, 17, 20, 23, 25))
_WAYS = ("NCCL", "process_group", "copy_engine", "segment", "staged")
_CONTENDED = ("NCCL", "copy_engine", "segment")
_NEEDS_GPUS_APART = ("NCCL", "process_group")
_SHM = {"NCCL_P2P_DISABLE": "1"}
_SHM_MOST_S, _SHM_LEAST_S = 20.0, 12.0  # of which the ranks' start takes some


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.transport",
        description="Time transports of CUDA tensors alone and beside attention and matrix products.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="default: one a GPU")
    add("--sizes", type=int, nargs="+", metavar="BYTES", default=_SIZES, help="default: 8 bytes to 256 MiB")
    add("--sequences", type=int, nargs="+", metavar="S", default=(1024, 4096, 8192, 21000), help="default: 1k to 21k")
    add("--hidden", type=int, nargs="+", metavar="H", default=(256, 512, 1024, 2048), help="default: 256 to 2048")
    add(
        "--channels",
        type=int,
        nargs="*",
        metavar="C",
        default=(1, 2, 4, 8, 32),
        help="thread blocks to sweep NCCL over",
    )
    add("--steps", type=int, metavar="K", default=6, help="timed steps of each workload (default 6)")
    add("--limit-s", type=seconds, metavar="S", default=600.0, help="begin no measurement after so many seconds")
    add("--quick", action="store_true", help="two sequence lengths, one width, few sizes")
    add("--no-contention", action="store_true", help="latency and bandwidth alone")
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw slowdowns, as the paper's Figure 10")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 2 for a mistake, 1 if ranks failed; what it was is printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False)))


def _settings(options: argparse.Namespace, share: bool) -> Settings:
    if options.quick:
        options.sizes, options.sequences, options.hidden = (8, 1 << 16, 64 << 20), (1024, 8192), (512,)
    ways = tuple(way for way in _WAYS if not share or way not in _NEEDS_GPUS_APART)
    settings = Settings(ways=ways, sizes=tuple(options.sizes), limit_s=options.limit_s)
    if options.no_contention:
        return settings
    contended = tuple(way for way in _CONTENDED if way in ways)
    return replace(
        settings,
        contended=(*contended, "staged") if share else contended,
        swept=() if share else tuple(f"NCCL {count}" for count in options.channels),
        sequences=tuple(options.sequences),
        hiddens=tuple(options.hidden),
        sweep_hidden=512 if 512 in options.hidden else options.hidden[0],
        steps=options.steps,
    )


def _run(options: argparse.Namespace, console: Console) -> None:
    refuse_inside_a_launch()
    if options.plot is not None:
        from . import transport_plot  # noqa: F401  before the work, so that a missing library shows at once
    end = time.time() + options.limit_s
    num_ranks, share = _ranks(options.ranks, torch.cuda.device_count())
    settings = _settings(options, share)
    also_shm = bool(settings.contended) and not share
    settings = replace(settings, until=end - (_kept_for_shm(options.limit_s) if also_shm else 0.0))
    found = _launched(settings, num_ranks, {}, console)
    if also_shm and end - time.time() < _SHM_LEAST_S:
        console.print(f"no time is left for NCCL shm: --limit-s is {options.limit_s:g}")
    elif also_shm:
        _save(options, settings, found)
        hidden = (settings.sweep_hidden,)
        shm = replace(settings, ways=(), sizes=(), contended=("NCCL",), swept=(), hiddens=hidden, until=end)
        rows = _launched(shm, num_ranks, _SHM, console)["contention"]
        found["contention"] += [row | {"way": "NCCL shm"} for row in rows if row["way"] == "NCCL"]
    _save(options, settings, found)
    for part in _report(found):
        print_part(part, console)


def _kept_for_shm(limit_s: float) -> float:
    """Seconds of the limit that are kept for NCCL shm, whose ranks are started later: a quarter, if that is enough."""
    quarter = min(_SHM_MOST_S, limit_s / 4)
    return quarter if quarter >= _SHM_LEAST_S else 0.0


def _ranks(asked: int | None, num_gpus: int) -> tuple[int, bool]:
    """How many ranks to start, and whether some share a GPU.

    Raises:
        ValueError: No GPU, fewer than two ranks, or one GPU and no word that ranks are to share it.
    """
    if not num_gpus:
        raise ValueError("this bench needs a CUDA GPU, and torch sees none; for host memory: bench.transport_host")
    if asked is not None and asked < 2:
        raise ValueError(f"--ranks must be at least 2, got {asked}: one rank sends nothing")
    if asked is None and num_gpus == 1:
        raise ValueError("this bench needs two GPUs of one host, found 1; --ranks 2 lets two ranks share it")
    return asked or num_gpus, (asked or num_gpus) > num_gpus


def _report(found: Mapping[str, Any]) -> list[Table | str]:
    parts: list[Table | str] = [_limits_table(found["limits"]), _transfer_table(found)]
    if found["contention"]:
        parts += [_contention_table(found, traffic) for traffic in ("256 MB a step", "endless")]
        parts += _verdicts(found["contention"])
    return parts


def _save(options: argparse.Namespace, settings: Settings, found: Mapping[str, Any]) -> None:
    about = environment(("torch", "cuda-bindings", "numpy"))
    if options.json is not None:
        whole = {"environment": about, "settings": asdict(settings), **found}
        write_figures(options.json, whole)
    if options.plot is not None and found["contention"]:
        from .transport_plot import draw

        draw(found["contention"], options.plot)
    if options.results is not None:
        write_result(options.results, "transport", "Transports of CUDA tensors", about, _report(found))


def _launched(settings: Settings, num_ranks: int, variables: Mapping[str, str], console: Console) -> dict[str, Any]:
    """Run the ranks with more environment variables. What was measured before one failed is kept."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    with tempfile.TemporaryDirectory(prefix="freescale-bench-") as folder, progress(console, "measuring"):
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(asdict(settings)))
        try:
            launch(
                "process_group",
                num_ranks,
                "freescale.bench.transport_rank",
                path,
                lambda line: console.print(line.rstrip()),
            )
        except LaunchError as error:
            if not path.with_name("found.json").exists():
                raise
            console.print(f"[bold]the ranks failed; below is what they had measured:[/bold] {error}")
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        found: dict[str, Any] = json.loads(path.with_name("found.json").read_text())
    found.setdefault("contention", [])
    return found


# ---- tables ------------------------------------------------------------------------------------------------------


def _limits_table(limits: Mapping[str, float]) -> Table:
    table = Table("What the links do: plain copies of 256 MiB", ["copy", "GB/s"])
    for name, rate in limits.items():
        table.add(name, f"{rate:.0f}")
    return table


def _transfer_table(found: Mapping[str, Any]) -> Table:
    columns = ["way", "bytes", "one at a time µs", "four under way µs", "GB/s each way", "of plain copies", "host µs"]
    table = Table("all_to_all, bytes that a rank sends", columns)
    limits = found["limits"]
    between = next((limits[name] for name in BETWEEN_GPUS if name in limits), 0.0)
    for each in sorted(found["transfers"], key=lambda e: e["size_bytes"]):
        if not each["correct"]:
            table.add(each["way"], f"{each['size_bytes']:,}", *["wrong output, not timed"] * 5)
            continue
        limit = limits.get(BY_THE_HOST, 0.0) if each["way"] in ("segment", "staged") else between
        rate = each["size_bytes"] / each["flight_us"] / 1e3
        share = f"{rate / limit:.0%}" if limit else "-"
        times = (f"{each['latency_us']:.1f}", f"{each['flight_us']:.1f}", f"{rate:.1f}", share)
        table.add(each["way"], f"{each['size_bytes']:,}", *times, f"{each['host_us']:.0f}")
    return table


def _contention_table(found: Mapping[str, Any], traffic: str) -> Table:
    rows = [row for row in found["contention"] if row["traffic"] == traffic]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    title = f"Compute beside traffic, {traffic}: slowdown" + (" (GB/s each way)" if traffic == "endless" else "")
    table = Table(title, ["sequence, hidden", "alone ms", *ways])
    for place in dict.fromkeys((row["sequence"], row["hidden"]) for row in rows):
        at = {
            row["way"]: row
            for row in found["contention"]
            if (row["sequence"], row["hidden"]) == place and row["traffic"] in (traffic, "none")
        }
        cells = [_slowdown(at[way], traffic) if way in at else "-" for way in ways]
        table.add(f"{place[0]}, {place[1]}", f"{at['alone']['compute_ms']:.1f}", *cells)
    return table


def _slowdown(row: Mapping[str, Any], traffic: str) -> str:
    ended = "" if row["outlasted"] else ", ended early"
    rate = f" ({row['rate']:.0f}{ended})" if traffic == "endless" else ""
    return f"{row['slowdown']:.1%}{rate}"


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Slowdowns over all workloads, and the time that ours add against what NCCL adds to the same ones."""
    notes = []
    for traffic in ("256 MB a step", "endless"):
        added: dict[str, dict[tuple[int, int], float]] = {}
        for row in rows:
            if row["traffic"] == traffic:
                ms = row["slowdown"] * row["compute_ms"] / (1 + row["slowdown"])
                added.setdefault(row["way"], {})[row["sequence"], row["hidden"]] = ms
        slow = {way: [r["slowdown"] for r in rows if (r["way"], r["traffic"]) == (way, traffic)] for way in added}
        text = ", ".join(f"{way} {median(each):.2%} (largest {max(each):.2%})" for way, each in slow.items())
        notes.append(f"{traffic}, slowdown, median over workloads: {text}.")
        for ours in ("copy_engine", "segment"):
            for theirs in ("NCCL", "NCCL shm"):
                both = added.get(ours, {}).keys() & added.get(theirs, {}).keys()
                whole = sum(added[theirs][place] for place in both)
                if whole > 0:
                    share = sum(added[ours][place] for place in both) / whole
                    notes.append(f"{traffic}: {ours} adds {share:.2f} of the time that {theirs} adds.")
    return notes


if __name__ == "__main__":
    sys.exit(main())
