"""How fast jagged operations are, against a PyTorch loop, FBGEMM and a plain copy (paper, section 4.2, Figure 7)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from .environment import environment
from .kernel_cases import LENGTHS, OPERATIONS, ROWS, Case, Inputs, Way, expected, make_inputs, result_bytes
from .kernel_cases import ways as ways_of
from .kernel_timing import call_ms, device_ms
from .tables import Table, print_table, write_result

_EPILOG = """examples:
  python -m freescale.bench.kernels --plot figure7.png        on a GPU: everything, some minutes
  python -m freescale.bench.kernels --quick                   half a minute, also without a GPU
  python -m freescale.bench.kernels --operation dispatch --rows int64 --world-size 32 512

Every output is compared with the plain PyTorch definition before it is timed. Inputs rotate over more memory than the
GPU's caches hold. "device" times are of CUDA graph replays; "call" times, the only ones of the loop,
include the host. Ctrl-C ends the measurements and keeps what was measured.
On a CPU all are call times on one thread."""

_WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
_OTHER_WORLD_SIZES = (512, 1024)  # where lengths are not uniform
_MEAN_LENGTH = {"int32": 1000, "int64": 1000, "fp16x128": 64, "fp32x128": 64}
_LONG_WORLD_SIZES = (8, 64)
_ROTATED_BYTES = 250e6
_CPU_ROTATED_BYTES = 64e6


@dataclass(frozen=True)
class Outcome:
    """One way to do one case; `device_ms` is None where the way synchronises or runs on a CPU."""

    operation: str
    rows: str
    lengths: str
    world_size: int
    megabytes: float
    way: str
    correct: bool
    call_ms: float | None
    device_ms: float | None
    remark: str = ""

    @property
    def ms(self) -> float | None:
        """The device's time where it is known, otherwise the call's."""
        return self.call_ms if self.device_ms is None else self.device_ms


def measure(case: Case, device: str, *, loop: bool = True) -> list[Outcome]:
    """Check and time every way to do a case, and a plain copy of the same bytes."""
    first = make_inputs(case, device, seed=0)
    size = result_bytes(first)
    limit = _ROTATED_BYTES if device == "cuda" else _CPU_ROTATED_BYTES
    sets = [first, *(make_inputs(case, device, seed) for seed in range(1, max(2, min(12, int(limit // size) + 1))))]
    right = expected(case, first)
    outcomes = [_copy(case, sets, device)]
    for name, way in ways_of(case).items():
        if loop or name != "loop":
            outcomes.append(_outcome(case, name, way, sets, right, device))
    return outcomes


def _copy(case: Case, sets: Sequence[Inputs], device: str) -> Outcome:
    targets = [torch.empty_like(inputs.values) for inputs in sets]
    pairs = zip(targets, sets, strict=True)
    calls: list[Callable[[], object]] = [partial(target.copy_, inputs.values) for target, inputs in pairs]
    return _timed(case, "copy", sets, calls, device)


def _outcome(case: Case, name: str, way: Way, sets: Sequence[Inputs], right: Tensor, device: str) -> Outcome:
    megabytes = result_bytes(sets[0]) / 1e6
    place = (case.operation, case.rows, case.lengths, case.world_size, megabytes, name)
    try:
        result = way(sets[0])[0]
    except (RuntimeError, NotImplementedError) as error:  # an operator without this device or dtype
        return Outcome(*place, False, None, None, str(error).splitlines()[0][:90])
    if result.shape != right.shape or not torch.equal(result, right):
        return Outcome(*place, False, None, None, "wrong output, not timed")
    del result
    return _timed(case, name, sets, [partial(way, inputs) for inputs in sets], device)


def _timed(
    case: Case, name: str, sets: Sequence[Inputs], calls: Sequence[Callable[[], object]], device: str
) -> Outcome:
    place = (case.operation, case.rows, case.lengths, case.world_size, result_bytes(sets[0]) / 1e6, name)
    if name == "loop":
        calls = calls[:1]
    host = call_ms(calls, device)
    return Outcome(*place, True, host, device_ms(calls) if device == "cuda" and name != "loop" else None)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for operation in options.operation:
        for rows in options.rows if operation != "bucketize" else ():
            for lengths in options.lengths:
                for world_size in options.world_size:
                    if lengths == "uniform" or world_size in _OTHER_WORLD_SIZES or options.all:
                        yield Case(operation, rows, lengths, world_size, _MEAN_LENGTH[rows])
            for cut in (8000, 21000) if operation == "permute" else ():
                yield Case(operation, rows, f"long {cut}", 1, 0)
        for cut in (8000, 21000) if operation == "bucketize" else ():
            for world_size in _LONG_WORLD_SIZES:
                yield Case(operation, "int64", f"long {cut}", world_size, 0)


def _table(title: str, device: str) -> Table:
    unit = "device ms" if device == "cuda" else "ms"
    columns = [
        "lengths, ranks",
        "MB",
        "loop ms",
        f"vectorised {unit}",
        f"FBGEMM {unit}",
        f"ours {unit}",
        f"copy {unit}",
    ]
    columns += ["loop / ours", "FBGEMM / ours", "copy / ours"]
    return Table(title, columns + (["FBGEMM call ms", "ours call ms"] if device == "cuda" else []))


def _add(table: Table, outcomes: Sequence[Outcome]) -> None:
    by_way = {outcome.way: outcome for outcome in outcomes if outcome.correct}
    rivals = [outcome for name, outcome in by_way.items() if name.startswith("FBGEMM")]
    if rivals:
        by_way["FBGEMM"] = min(rivals, key=lambda outcome: outcome.ms or 0.0)
    times = {name: by_way[name].ms if name in by_way else None for name in _NAMES}
    ours, first = times["ours"], outcomes[0]
    ratios = [
        f"{time / ours:.{digits}f}" if time and ours else "-"
        for time, digits in ((times["loop"], 0), (times["FBGEMM"], 1), (times["copy"], 2))
    ]
    cells = [f"{first.lengths}, {first.world_size}", f"{first.megabytes:.1f}", *map(_ms, times.values()), *ratios]
    if len(table.columns) > len(cells):
        cells += [_ms(by_way[name].call_ms) if name in by_way else "-" for name in ("FBGEMM", "ours")]
    table.add(*cells)


_NAMES = ("loop", "vectorised", "FBGEMM", "ours", "copy")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.kernels",
        description="Time jagged operations against a PyTorch loop, vectorised PyTorch, FBGEMM and a plain copy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    every = (*OPERATIONS, "bucketize")
    add("--operation", nargs="+", choices=every, default=every, help="default: all")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    add("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS, help="default: all")
    add("--world-size", type=int, nargs="+", metavar="N", help="ranks of 16 samples (default 8 to 1024; CPU 8 to 128)")
    add("--all", action="store_true", help="every world size for every kind of lengths, not for uniform ones alone")
    add("--quick", action="store_true", help="few world sizes, int64 and fp32x128 rows, uniform and giant lengths")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--no-loop", action="store_true", help="leave out the loop, which takes most of the time")
    add("--json", type=Path, metavar="FILE", help="write all figures to a file")
    add("--plot", type=Path, metavar="FILE.png", help="draw time over world size, as the paper's Figure 7")
    add("--results", type=Path, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 1 after an error that was printed."""
    options = _parser().parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.quick:
        options.rows, options.lengths = ["int64", "fp32x128"], ["uniform", "giant"]
    if options.world_size is None:
        sizes = _WORLD_SIZES if options.device == "cuda" else (8, 32, 128)
        options.world_size = (8, 32, 512)[: 3 if options.device == "cuda" else 2] if options.quick else sizes
    try:
        _run(options, Console())
    except ValueError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        return 1
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .kernel_plot import draw  # before the work, so that a missing library shows at once
    if options.device == "cpu":
        torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    tables: dict[str, Table] = {}
    interrupted = False
    try:
        for case in _cases(options):
            loop = not options.no_loop and case.lengths not in LENGTHS[1:]
            found = measure(case, options.device, loop=loop)
            outcomes += found
            title = f"{case.operation}, {case.rows} rows, {options.device}"
            if title not in tables:
                for table in list(tables.values())[-1:]:
                    print_table(table, console)
                tables[title] = _table(title, options.device)
            _add(tables[title], found)
            _save(options.json, outcomes)
    except KeyboardInterrupt:
        interrupted = True
    for table in list(tables.values())[-1:]:
        print_table(table, console)
    notes = _notes(outcomes) + ["Interrupted: not all cases were measured."] * interrupted
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False)
    _save(options.json, outcomes)
    if options.plot is not None:
        draw(outcomes, options.plot)
    if options.results is not None:
        name = f"kernels-{options.device}"
        write_result(options.results, name, "Jagged kernels", _environment(), [*tables.values(), *notes])


def _environment() -> dict[str, str]:
    return environment(("torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow"))


def _save(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    if path is not None:
        found = {"environment": _environment(), "outcomes": [asdict(outcome) for outcome in outcomes]}
        path.write_text(json.dumps(found, indent=1) + "\n")


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    notes = []
    if importlib.util.find_spec("fbgemm_gpu") is None:
        notes.append("FBGEMM is not installed: its columns are left out.")
    failed = sorted({f"{o.way}, {o.rows} rows: {o.remark}" for o in outcomes if not o.correct})
    best: dict[str, int] = {}
    for place in {(o.operation, o.rows, o.lengths, o.world_size) for o in outcomes}:
        rivals = [
            o for o in outcomes
            if (o.operation, o.rows, o.lengths, o.world_size) == place and o.correct and o.way.startswith("FBGEMM")
        ]  # fmt: skip
        if rivals:
            way = min(rivals, key=lambda o: o.ms or 0.0).way
            best[way] = best.get(way, 0) + 1
    if best:
        counts = ", ".join(f"{way} in {count}" for way, count in sorted(best.items()))
        notes.append(f"The FBGEMM column is the fastest of its operators in each row: {counts}.")
    return notes + [f"Left out: {text}" for text in failed]


if __name__ == "__main__":
    sys.exit(main())
