"""What `make report` runs: one command for each figure of the paper, and which machines can run it (section 5)."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from .compute_fit import COMPUTE_PATTERN, RESULTS

EARLIER = {
    "virtual_ranks": COMPUTE_PATTERN,
    "kernels": "*-kernels-cuda.json",
    "embedding": "*-embedding-cuda.json",
    "transport": "*-transport.json",
    "end_to_end": "*-end-to-end-cuda.json",
}
"""Figures of GPUs among the earlier results, by part."""


@dataclass(frozen=True)
class Machine:
    """What there is to run on, and how much may be asked of it.

    Attributes:
        num_gpus: CUDA devices.
        data: `path.parquet:column` of the user's data; None without.
        quick: Whether a few minutes have to do.
    """

    num_gpus: int
    data: str | None = None
    quick: bool = False


@dataclass(frozen=True)
class Part:
    """One command of the report.

    Attributes:
        name: Module under freescale.bench.
        title: The question it answers.
        figure: What of the paper it stands for.
        arguments: For this machine.
        limit_s: Seconds after which it is ended.
        plots: Whether it takes --plot.
        has_results: Whether it takes --results; if not, what it prints is shown.
        has_json: Whether it takes --json.
        lacks: Why this machine cannot run it; empty if it can.
        simulated: Whether its figures are simulated.
    """

    name: str
    title: str
    figure: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 300.0
    plots: bool = True
    has_results: bool = True
    has_json: bool = True
    lacks: str = ""
    simulated: bool = False


def parts_for(machine: Machine, folder: Path, only: Collection[str] | None = None) -> list[Part]:
    """The parts of a report, those that this machine cannot run among them.

    Args:
        machine: What there is.
        folder: Where the report is made; parts read each other's files from it.
        only: Names of those that will run; None: all that can. Files of the others are not read.
    """
    gpu, quick = machine.num_gpus > 0, machine.quick
    few = "2 GPUs" if machine.num_gpus < 2 else ""
    alone = machine.num_gpus == 1
    steps = "What does our pipeline cost where there is nothing to wait for?" if alone else "What does it bring in all?"
    data = (machine.data,) if machine.data else ()
    zipf = ("--cuts", "8000", "2000", "--ranks", "4", "2", "8", "--batch-sizes", "128", "32", "--pairs", "1")
    small = ("--world-size", "2", "64", "256") if quick else ()
    of_steps = ("embedding", "end_to_end")
    here = [folder / f"{name}.json" for name in of_steps]
    before = [path for name in of_steps if (path := newest(EARLIER[name])) is not None]
    runs = [name for name in ("virtual_ranks", *of_steps) if only is None or name in only]
    both = machine.num_gpus >= 2 and set(of_steps) <= set(runs)
    measured = here if both else before  # what needs two GPUs was measured earlier
    check = ("--check", *map(str, measured)) if measured else ()
    # without a GPU here, what was measured on one earlier serves better than this machine's own computing
    fitted = "virtual_ranks" in runs and (gpu or not newest(COMPUTE_PATTERN))
    compute = ("--compute", str(folder / "virtual_ranks.json")) if fitted else ()
    known = ("--data", machine.data) if machine.data else ()
    parts = [
        Part("inspect", "What would it bring on these data?", "Figures 2 and 3, by lengths and ids alone", data,
             has_results=False, lacks="" if data else "data (--data path.parquet:column)"),
        Part("virtual_ranks", "How long do ranks wait, and how long balanced?", "Figures 2 and 8",
             ("--limit-s", "40" if quick else "150" if gpu else "90"), limit_s=600),
        Part("partition", "How even are plans, how fast are they made?", "section 4.1; Figure 8",
             ("--max-length", "21000", "--world-size", *(("64",) if quick else ("8", "64", "256")))),
        Part("collisions", "How many rows recur from step to step?", "Figure 3",
             ("--ids", "zipf", *zipf) if gpu or not quick else ("--ids", "zipf:median=300", *zipf), limit_s=400),
        Part("kernels", "How fast are the jagged kernels?", "Figure 7",
             ("--quick", *(("--limit-s", "60") if quick or not gpu else ())), limit_s=400),
        Part("embedding", "How much embedding communication is exposed?", "Figure 9",
             ("--limit-s", "60" if quick else "240"), limit_s=600, lacks=few),
        Part("transport", "What does traffic cost the computing beside it?", "Figure 10",
             ("--limit-s", "40" if quick else "120", *(("--quick",) if quick else ())), limit_s=400, lacks=few),
        Part("end_to_end", steps, "Figure 11",
             ("--limit-s", "60" if quick else "240", *(_ALONE if alone else ())), limit_s=600,
             lacks="" if alone else few),
        Part("ne_parity", "Does training stay the same?", "Figure 11, normalized entropy",
             ("--ranks", "2", "--steps", "24") if quick else (), limit_s=400),
        Part("simulate", "And on thousands of ranks?", "Figures 8(c), 9 and 11, simulated",
             (*compute, *known, *small, *check), limit_s=600, simulated=True),
    ]  # fmt: skip
    return [part for part in parts if importlib.util.find_spec(f"{__package__}.{part.name}") is not None]


_ALONE = ("--ranks", "1", "--cells", "even", "2000x128", "8000x128", "--cuts", "2000")


def newest(pattern: str, results: Path = RESULTS) -> Path | None:
    """The newest earlier result whose name is of a pattern; None if there is none."""
    return max(results.glob(pattern), default=None)


def pages_of(part: str) -> str:
    """The pattern of the names of a part's earlier results, pages of GPUs where there are such."""
    return EARLIER.get(part, f"*-{part.replace('_', '-')}.json").removesuffix(".json") + ".md"


@dataclass
class Ran:
    """What came of a part.

    Attributes:
        part: Which.
        command: As one would type it.
        seconds: It took.
        fault: Why there is no result, or not all of it; empty if all is well.
        printed: What it wrote to its standard output.
        markdown: Its result file, where it writes one.
        picture: Its picture, where it drew one.
    """

    part: Part
    command: str = ""
    seconds: float = 0.0
    fault: str = ""
    printed: str = ""
    markdown: str = ""
    picture: Path | None = None
    json: Path | None = field(default=None)


def run_part(part: Part, folder: Path) -> Ran:
    """Run a part's command in a process of its own, with a limit; a part that fails leaves the others alone."""
    if part.lacks:
        return Ran(part, fault=f"not run: it needs {part.lacks}")
    picture, figures, results = (folder / f"{part.name}{end}" for end in (".png", ".json", ".results"))
    for path in (picture, figures, *results.glob("*")):
        path.unlink(missing_ok=True)
    arguments = ["-m", f"freescale.bench.{part.name}", *part.arguments]
    arguments += ["--plot", str(picture)] if part.plots else []
    arguments += ["--json", str(figures)] if part.has_json else []
    arguments += ["--results", str(results)] if part.has_results else []
    started = time.monotonic()
    ran = Ran(part, command=shlex.join(["python", *arguments]))
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=part.limit_s, check=False
        )
        ran.printed, code, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        ran.printed, code, errors = _text(late.stdout), -1, f"ended after {part.limit_s:g} s"
    ran.seconds = time.monotonic() - started
    if code:
        ran.fault = f"exit status {code}: {' '.join(errors.strip().splitlines()[-3:]) or 'no message'}"
    ran.markdown = "\n".join(path.read_text() for path in sorted(results.glob("*.md")))
    pictures = [picture, *sorted(results.glob("*.png"))]
    ran.picture = next((path for path in pictures if path.exists()), None)
    ran.json = figures if figures.exists() else None
    return ran


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
