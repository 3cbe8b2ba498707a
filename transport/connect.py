"""Makes transports by name; explicit, never guessed (paper, section 3.3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from .verbs import RdmaOptions

_BACKENDS = ("local", "process_group", "mpi", "verbs")


def connect(
    backend: str,
    *,
    timeout_s: float = 600.0,
    check_sizes: bool = True,
    group: ProcessGroup | None = None,
    communicator: MPI.Intracomm | None = None,
    through: Transport | None = None,
    rdma: RdmaOptions | None = None,
) -> Transport:
    """Join the other ranks. Collective: all ranks call it with the same backend and options.

    Args:
        backend: "local" (this process alone; `local_group` makes more ranks), "process_group" (torchrun: gloo, and NCCL
            for CUDA tensors), "mpi" (mpiexec) or "verbs" (RDMA, between the ranks of another transport).
        timeout_s: Deadline of every wait, in seconds. A peer that is later than this is an error.
        check_sizes: Whether ranks compare sizes before they move data; see `Transport`. "local" always does, and so
            does "process_group" for host tensors.
        group: The ranks, for "process_group"; None means all of them.
        communicator: The ranks, for "mpi"; None means COMM_WORLD.
        through: The ranks, for "verbs": a transport that connects them already, over which they tell each other their
            addresses. It stays the caller's.
        rdma: How "verbs" uses the RDMA device; None means `RdmaOptions()`.

    Returns:
        A transport that shares no traffic with the group or communicator it was made from.

    Raises:
        ValueError: Unknown backend, an option of another backend, or a deadline that is no positive number.
        Unavailable: The backend is not installed, or cannot run here; says what to do.
        TransportTimeout: Some rank did not come.

    Example:
        >>> import torch
        >>> from freescale.transport import connect
        >>> transport = connect("local")
        >>> transport.all_gather(torch.tensor([1, 2])).wait()
        tensor([1, 2])
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    _check_timeout(timeout_s)
    if group is not None and backend != "process_group":
        raise ValueError(f"group belongs to backend 'process_group', not to {backend!r}")
    if communicator is not None and backend != "mpi":
        raise ValueError(f"communicator belongs to backend 'mpi', not to {backend!r}")
    if backend != "verbs" and (through is not None or rdma is not None):
        raise ValueError(f"through and rdma belong to backend 'verbs', not to {backend!r}")
    if backend == "process_group":
        from .process_group import connect_process_group

        return connect_process_group(group, timeout_s, check_sizes)
    if backend == "mpi":
        from .mpi import connect_mpi

        return connect_mpi(communicator, timeout_s, check_sizes)
    if backend == "verbs":
        from .verbs.join import connect_verbs
        from .verbs.options import RdmaOptions

        if through is None:
            raise ValueError("through must be a transport that connects the ranks, such as connect('mpi'), got None")
        return connect_verbs(through, RdmaOptions() if rdma is None else rdma, timeout_s, check_sizes)
    return local_group(1, timeout_s=timeout_s)[0]


def local_group(world_size: int, *, timeout_s: float = 600.0) -> list[Transport]:
    """Make ranks that are threads of this process, one transport for each. Sizes are always compared.

    Args:
        world_size: Number of ranks.
        timeout_s: Deadline of every wait, in seconds.

    Returns:
        The transports of ranks 0, 1, …; hand each to a thread of its own.

    Raises:
        ValueError: No ranks, or a deadline that is no positive number.

    Example:
        >>> import torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from freescale.transport import local_group
        >>> with ThreadPoolExecutor(2) as threads:
        ...     list(threads.map(lambda t: t.all_gather(torch.tensor([t.rank])).wait(), local_group(2)))
        [tensor([0, 1]), tensor([0, 1])]
    """
    from .local import make_group

    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    _check_timeout(timeout_s)
    return list(make_group(world_size, timeout_s))


def _check_timeout(timeout_s: float) -> None:
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s!r}")
