"""Runs all tests that need GPUs, one after another: `python tests/cuda_run.py FOLDER`, or `make test-cuda`.

Any Python that can import torch, pytest and the package's dependencies will do; the package need not be installed.
Everything has a deadline, and results are written as they come: to the terminal, and to results.md, results.json and
a log for each start of a command in FOLDER. A case that hangs shows the stacks of all threads of all its processes.
Where there is one GPU, ranks share it; what cannot be seen then is told as "not run".
Exit status: 0 if all passed, 1 if something failed or the time was not enough, 2 for a mistake, or without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "support"))

from case_runner import GOOD, Part, Result, Runner  # noqa: E402  found by the line above

_ENGINES = ("peer", "segment", "staged", "nccl")
# What `device_checks.py` has for each engine; NCCL asks for one order of all channels, and launches kernels.
_CHECKS = (
    "streams_order_what_hosts_do_not_wait_for",
    "many_uneven_messages_arrive",
    "more_than_2_gib_arrive",
    "a_rank_that_never_comes_is_raised_at_the_next_call",
)
_CHECKS_OF_OURS = (
    "new_channels_wait_for_no_stream",
    "channels_do_not_wait_for_each_other",
    "a_profile_shows_copies_alone",
)
_CHECKS_OF_PEER = ("ranks_that_come_together_copy_a_piece_each",)
# Of two GPUs: copies within one need multiprocessors, and processes that share one take turns on it.
_CHECKS_APART = ("a_transfer_needs_no_multiprocessor",)
_MORE_CHANNELS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # checks have more open than trainers do


def pytest_part(name: str, *arguments: str, case_s: float = 60.0, gpus: int = 1) -> Part:
    """Tests of some files; -P keeps the checkout's folders from standing for packages of the same names."""
    command = [sys.executable, "-P", "-m", "pytest", "-p", "case_report", "-p", "no:cacheprovider", "-qs", *arguments]
    return Part(name, command, case_s=case_s, gpus=gpus)


def ranks_part(
    name: str, num_ranks: int, script: str, *arguments: str, case_s: float, gpus: int = 1, tells: bool = True
) -> Part:
    """A script under torchrun. Where there are fewer GPUs than ranks, they share them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*launcher, str(HERE / "support" / script), *arguments]
    return Part(name, command, case_s=case_s, gpus=gpus, variables=_MORE_CHANNELS, tells=tells)


def parts() -> list[Part]:
    """Everything, the most valuable first."""
    found = [pytest_part("pipeline", str(HERE / "balancer" / "test_pipeline_cuda.py"))]
    for engine in _ENGINES:
        checks, gpus = (_CHECKS, 2) if engine == "nccl" else ((*_CHECKS_OF_OURS, *_CHECKS), 1)
        checks = (*_CHECKS_OF_PEER, *checks) if engine == "peer" else checks
        arguments = ("process_group", engine)
        found.append(ranks_part(f"contract, {engine}", 2, "device_contract.py", *arguments, case_s=30, gpus=gpus))
        found.append(ranks_part(f"checks, {engine}", 2, "device_checks.py", *arguments, *checks, case_s=40, gpus=gpus))
        if engine != "nccl":
            apart = (*arguments, *_CHECKS_APART)
            found.append(ranks_part(f"checks apart, {engine}", 2, "device_checks.py", *apart, case_s=40, gpus=2))
    kernels = (str(HERE / "kernels"), "-m", "gpu")
    batches = (str(HERE / "balancer" / "test_batch.py"), "-k", "on_a_device")
    killed = (str(HERE / "multirank" / "test_device_contract_multirank.py"), "-k", "killed")
    found += [
        pytest_part("kernels", *kernels),
        pytest_part("batches", *batches),
        pytest_part("killed peers", *killed, case_s=75),
        pytest_part("ends", str(HERE / "multirank" / "test_device_ends_multirank.py"), "-k", "not cpu", case_s=110),
        ranks_part("contract, peer, 4 ranks", 4, "device_contract.py", "process_group", "peer", case_s=40),
    ]
    for engine in _ENGINES:
        stress, gpus = ("stream_stress.py", "100", "1", engine), 2 if engine == "nccl" else 1
        found.append(ranks_part(f"stress, {engine}", 2, *stress, case_s=150, gpus=gpus, tells=False))
    return found


class Book:
    """Prints results and writes them to files as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(f"{result.outcome:8} {result.seconds:6.1f} s  {result.part}: {result.case}", flush=True)
        if result.outcome not in (*GOOD, "not run"):
            print("\n".join(f"    {line}" for line in result.text.splitlines()[-60:]), flush=True)
        self.write()

    def write(self) -> None:
        _replace(self._folder / "results.json", json.dumps([asdict(each) for each in self.results], indent=1) + "\n")
        rows = [f"| {r.part} | {r.case.rpartition('/')[2]} | {r.outcome} | {r.seconds:.1f} |" for r in self.results]
        head = [f"# Tests on GPUs: {self.summary()}", "", "| part | case | outcome | s |", "| --- | --- | --- | ---: |"]
        _replace(self._folder / "results.md", "\n".join([*head, *rows]) + "\n")

    def summary(self) -> str:
        counts = Counter(result.outcome for result in self.results)
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing ran"


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is whole whenever the machine goes away."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run all tests that need GPUs, one after another, each case with a deadline.",
        epilog="Without a GPU, other tests show that it works: tests/cuda_run.py out/dry --tests tests/transport",
    )
    parser.add_argument("folder", type=Path, help="for results.md, results.json and logs")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="seconds for everything (default 1200)")
    parser.add_argument("--case-s", type=float, help="deadline of every case, instead of each part's own")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts whose name contains one of these")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="run these files by pytest instead; needs no GPU")
    parser.add_argument("--list", action="store_true", help="name the parts and do nothing")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    wanted = [pytest_part(f"tests {n}", f, gpus=0) for n, f in enumerate(options.tests or [], 1)] or parts()
    wanted = [part for part in wanted if not options.only or any(text in part.name for text in options.only)]
    if options.list or not wanted:
        print("\n".join(part.name for part in wanted) or f"no part is called like {options.only}")
        return 0 if wanted else 2
    num_gpus = 0 if options.tests else _num_gpus()
    if not num_gpus and not options.tests:
        print("error: torch sees no CUDA GPU, and these tests need one", file=sys.stderr)
        return 2
    logs = options.folder / "logs"
    if logs.exists():
        print(f"error: {logs} exists already: give another folder, or remove it", file=sys.stderr)
        return 2
    logs.mkdir(parents=True)
    _find_the_package()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C does: processes that run are ended
    book = Book(options.folder)
    runner = Runner(logs, time.monotonic() + options.limit_s, book.add)
    for part in wanted:
        if part.gpus > max(num_gpus, 0):
            book.add(Result(part.name, "(all)", "not run", 0.0, f"needs {part.gpus} GPUs, found {num_gpus}"))
            continue
        runner.run(part if options.case_s is None else _with_deadline(part, options.case_s))
    print(f"{book.summary()}; {options.folder / 'results.md'}", flush=True)
    too_few = [r for r in book.results if r.outcome == "not run" and r.text.startswith("needs")]
    return 0 if all(r.outcome in GOOD for r in book.results if r not in too_few) else 1


def _with_deadline(part: Part, case_s: float) -> Part:
    return Part(part.name, part.command, case_s, part.start_s, part.gpus, part.variables, part.tells)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _find_the_package() -> None:
    """Let what is started find the checkout, where it is not installed, and the support of tests."""
    paths = [str(HERE / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if find_spec("freescale") is None:
        paths.insert(0, str(HERE.parent / "typings"))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


if __name__ == "__main__":
    sys.exit(main())
