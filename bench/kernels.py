"""How fast jagged operations are, against a PyTorch loop, FBGEMM and a plain copy (paper, section 4.2, Figure 7)."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from .arguments import at_least_one, output_file, output_folder, picture_file, seconds, status_of
from .kernel_cases import (
    LENGTHS,
    OPERATIONS,
    ROWS,
    SIZED_WORLD_SIZE,
    SIZES,
    Case,
    Inputs,
    Way,
    expected,
    make_inputs,
    mean_length,
    result_bytes,
)
from .kernel_cases import ways as ways_of
from .kernel_report import Outcome, Report, read_outcomes
from .kernel_timing import call_ms, device_ms, in_turn_ms
from .progress import progress
from .stopping import Stopping

_EPILOG = """examples:
  python -m freescale.bench.kernels --plot figure7.png        on a GPU: everything, five minutes
  python -m freescale.bench.kernels --quick                   half a minute, also without a GPU
  python -m freescale.bench.kernels --operation dispatch --rows int64 --world-size 32 512
  python -m freescale.bench.kernels --json k.json --resume k.json    the cases that an earlier run did not come to

Every output is compared with the plain PyTorch definition before it is timed. Inputs rotate over more memory than the
GPU's caches hold. "device" times are of CUDA graph replays; "call" times, the only ones of the loop, include the host;
all are medians, on a CPU of turns that the ways take. Ctrl-C and SIGTERM end the measurements and keep
what was measured; files are also written after every case. On a CPU all are call times on one thread."""

_WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
_OTHER_WORLD_SIZES = {"cuda": (512, 1024), "cpu": (128,)}  # where lengths are lognormal or one is a giant
_MEAN_LENGTH = {"int32": 1000, "int64": 1000, "fp16x128": 64, "fp32x128": 64}
_SHORT_LENGTH = 10
_CUTS = (8000, 21000)
_LONG_WORLD_SIZES = (8, 64)
_ROTATED_BYTES = 250e6
_CPU_ROTATED_BYTES = 64e6
_SHORT_MS = 20.0


def measure(case: Case, device: str, *, loop: bool = True, fbgemm: bool = True) -> list[Outcome]:
    """Check and time every way to do a case, and a plain copy of the same bytes."""
    first = make_inputs(case, device, seed=0)
    size = result_bytes(first)
    limit = _ROTATED_BYTES if device == "cuda" else _CPU_ROTATED_BYTES
    sets = [first, *(make_inputs(case, device, seed) for seed in range(1, max(2, min(12, int(limit // size) + 1))))]
    right = expected(case, first)
    outcomes = [_copy(case, sets, device)]
    for name, way in ways_of(case, fbgemm=fbgemm).items():
        if loop or not name.startswith("loop"):
            outcomes.append(_outcome(case, name, way, sets, right, device))
    return outcomes if device == "cuda" else _in_turn(case, outcomes, sets, fbgemm=fbgemm)


def _in_turn(case: Case, outcomes: list[Outcome], sets: Sequence[Inputs], *, fbgemm: bool) -> list[Outcome]:
    """Time short calls on a CPU once more, one way after the other: other programs slow down some at a time."""
    known = {o.way: o.call_ms / 1e3 for o in outcomes if o.call_ms is not None and o.call_ms < _SHORT_MS}
    times = in_turn_ms(
        {
            name: ([partial(way, inputs) for inputs in sets], known[name])
            for name, way in ways_of(case, fbgemm=fbgemm).items()
            if name in known and not name.startswith("loop")
        }
    )
    return [replace(o, call_ms=times.get(o.way, o.call_ms)) for o in outcomes]


def _copy(case: Case, sets: Sequence[Inputs], device: str) -> Outcome:
    """Time a plain copy. A graph copies by a slower way than a call does: what counts is the faster one."""
    targets = [torch.empty_like(inputs.values) for inputs in sets]
    pairs = zip(targets, sets, strict=True)
    calls: list[Callable[[], object]] = [partial(target.copy_, inputs.values) for target, inputs in pairs]
    copied = _timed(case, "copy", sets, calls, device)
    if copied.device_ms is None or copied.call_ms is None:
        return copied
    return replace(copied, device_ms=min(copied.device_ms, copied.call_ms))


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
    if name.startswith("loop"):
        return Outcome(*place, True, call_ms(calls[:1], device), None)
    host = call_ms(calls, device)
    return Outcome(*place, True, host, device_ms(calls, host / 1e3) if device == "cuda" else None)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """The cases of each table, few long sequences first."""
    for operation in options.operation:
        for rows in options.rows if operation != "bucketize" else ("int64",):
            for cut in _CUTS if "long" in options.lengths else ():
                for world_size in _LONG_WORLD_SIZES if operation == "bucketize" else (1,):
                    yield Case(operation, rows, f"long {cut}", world_size, 0)
            for size in SIZES if "sizes" in options.lengths and operation != "bucketize" else ():
                if (mean := mean_length(size, rows)) > 0:
                    yield Case(operation, rows, size, SIZED_WORLD_SIZE, mean)
            for lengths in LENGTHS if operation != "bucketize" else ():
                if lengths not in options.lengths:
                    continue
                mean = _SHORT_LENGTH if lengths == "short" else _MEAN_LENGTH[rows]
                for world_size in options.world_size:
                    if options.all or lengths in LENGTHS[:2] or world_size in _OTHER_WORLD_SIZES[options.device]:
                        yield Case(operation, rows, lengths, world_size, mean)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.kernels",
        description="Time jagged operations against a PyTorch loop, vectorised PyTorch, FBGEMM and a plain copy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    every = ("bucketize", *OPERATIONS)
    add("--operation", nargs="+", choices=every, default=every, help="default: all")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    add(
        "--lengths",
        nargs="+",
        choices=("long", "sizes", *LENGTHS),
        help="default: all but sizes (128 uniform ones, of 10 kB to 64 MB in all); on a GPU all but short, of 10 rows, "
        "too",
    )
    add(
        "--world-size",
        type=at_least_one,
        nargs="+",
        metavar="N",
        help="ranks of 16 samples (default 8 to 1024; CPU 8 to 128)",
    )
    add("--all", action="store_true", help="every world size for every kind of lengths, not for uniform ones alone")
    add("--quick", action="store_true", help="few world sizes, int64 and fp32x128 rows, uniform and giant lengths")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--no-loop", action="store_true", help="leave out the loops, which take most of the time")
    add("--no-fbgemm", action="store_true", help="as if FBGEMM were not installed")
    add("--resume", type=Path, metavar="FILE", help="take what a --json FILE holds as measured, if it is there")
    limit = parser.add_mutually_exclusive_group().add_argument
    limit("--limit-s", type=seconds, default=math.inf, metavar="S", help="start no case later (default: no limit)")
    limit("--minutes", type=_minutes, dest="limit_s", metavar="M", help="the same in minutes")
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw time over world size, as the paper's Figure 7")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file with hardware and command")
    return parser


def _default_lengths(device: str) -> list[str]:
    return ["long", *(kind for kind in LENGTHS if kind != "short" or device == "cpu")]


def _minutes(text: str) -> float:
    return 60 * seconds(text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.lengths = options.lengths or _default_lengths(options.device)
    if options.quick:
        options.rows, options.lengths = ["int64", "fp32x128"], ["long", "uniform", "giant"]
    if options.world_size is None:
        sizes = _WORLD_SIZES if options.device == "cuda" else (8, 32, 128)
        options.world_size = (8, 32, 512)[: 3 if options.device == "cuda" else 2] if options.quick else sizes
    return status_of(lambda: _run(options, Console(emoji=False)))


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .kernel_plot import draw  # before the work, so that a missing library shows at once
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, there is none")
    if options.device == "cpu":
        torch.set_num_threads(1)
    earlier = [] if options.resume is None or not options.resume.exists() else read_outcomes(options.resume)
    known = {outcome.case for outcome in earlier}
    cases = list(_cases(options))
    wanted = {(case.operation, case.rows, case.lengths, case.world_size) for case in cases}
    kept = [outcome for outcome in earlier if outcome.case not in wanted]
    report = Report(options.device, console, options.json, options.results, fbgemm=not options.no_fbgemm, kept=kept)
    until = time.monotonic() + options.limit_s
    with Stopping() as stopping, progress(console, "cases", len(cases)) as advance:
        try:
            for case in cases:
                place = (case.operation, case.rows, case.lengths, case.world_size)
                if place in known:
                    report.add([outcome for outcome in earlier if outcome.case == place])
                elif time.monotonic() > until or stopping.requested:
                    stopping.requested = True  # what is known already is kept all the same
                else:
                    _measure(case, options, report)
                advance()
        except KeyboardInterrupt:  # the second one: in the midst of a case
            stopping.requested = True
        report.close(interrupted=stopping.requested)
        if options.plot is not None and report.outcomes:
            draw(report.outcomes, options.plot)


def _measure(case: Case, options: argparse.Namespace, report: Report) -> None:
    """Measure a case; one that fails, out of memory say, is told, and the next one is measured."""
    loop = not options.no_loop and case.lengths not in ("lognormal", "giant")
    try:
        report.add(measure(case, options.device, loop=loop, fbgemm=not options.no_fbgemm))
    except RuntimeError as error:
        report.fail(case, str(error).splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
