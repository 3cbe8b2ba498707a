"""Makes transports by name; explicit, never guessed (paper, section 3.3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from .copy_options import CopyOptions
    from .lane import HostTransport
    from .verbs import RdmaOptions

_BACKENDS = ("local", "process_group", "mpi", "verbs", "copy_engine")
_OF_TORCH = ("gloo", "nccl", "cpu:gloo,cuda:nccl", "torch.distributed", "torchrun", "ddp")  # what people ask for first


def connect(
    backend: str,
    *,
    timeout_s: float = 600.0,
    check_sizes: bool = True,
    group: ProcessGroup | None = None,
    communicator: MPI.Intracomm | None = None,
    through: Transport | None = None,
    rdma: RdmaOptions | None = None,
    copies: CopyOptions | None = None,
) -> Transport:
    """Join the other ranks. Collective: all ranks call it with the same backend and options.

    Args:
        backend: "local" (this process alone; `local_group` makes more ranks), "process_group" (torchrun: gloo, and NCCL
            for CUDA tensors), "mpi" (mpiexec), "verbs" (RDMA, between the ranks of another transport) or "copy_engine"
            (as another transport of one host, but CUDA tensors travel by copies between the GPUs).
        timeout_s: Deadline of every wait, in seconds. A peer that is later than this is an error.
        check_sizes: Whether ranks compare sizes before they move data; see `Transport`. "local" always does, and so
            does "process_group" for host tensors.
        group: The ranks, for "process_group"; None means all of them.
        communicator: The ranks, for "mpi"; None means COMM_WORLD.
        through: The ranks, for "verbs" and "copy_engine": a transport that connects them already, over which they tell
            each other their addresses, and which carries the host tensors of "copy_engine". It stays the caller's.
        rdma: How "verbs" uses the RDMA device; None means `RdmaOptions()`.
        copies: How CUDA tensors travel without NCCL: between the GPUs of a host as these say, between hosts by way of
            pinned memory and the backend. None means `CopyOptions()`, but for "process_group" it means NCCL.

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
        hint = "; torch.distributed's ranks are 'process_group', whatever its backend" if backend in _OF_TORCH else ""
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}{hint}")
    _check_timeout(timeout_s)
    if group is not None and backend != "process_group":
        raise ValueError(f"group belongs to backend 'process_group', not to {backend!r}")
    if communicator is not None and backend != "mpi":
        raise ValueError(f"communicator belongs to backend 'mpi', not to {backend!r}")
    _check_options(backend, through, rdma, copies)
    if backend == "process_group":
        from .process_group import connect_process_group

        return _with_copies(connect_process_group(group, timeout_s, check_sizes), copies)
    if backend == "mpi":
        from .mpi import connect_mpi

        return _with_copies(connect_mpi(communicator, timeout_s, check_sizes), copies or _default_copies())
    if backend == "verbs":
        from .verbs.join import connect_verbs
        from .verbs.options import RdmaOptions

        if through is None:
            raise ValueError("through must be a transport that connects the ranks, such as connect('mpi'), got None")
        lane = connect_verbs(through, RdmaOptions() if rdma is None else rdma, timeout_s, check_sizes)
        return _with_copies(lane, copies or _default_copies())
    if backend == "copy_engine":
        from .copy_engine import connect_copy_engine
        from .copy_options import CopyOptions

        if through is None:
            raise ValueError("through must be a transport that connects the ranks, such as connect('mpi'), got None")
        return connect_copy_engine(through, CopyOptions() if copies is None else copies, timeout_s, check_sizes)
    return local_group(1, timeout_s=timeout_s)[0]


def _check_options(
    backend: str, through: Transport | None, rdma: RdmaOptions | None, copies: CopyOptions | None
) -> None:
    if backend not in ("verbs", "copy_engine") and through is not None:
        raise ValueError(f"through belongs to backends 'verbs' and 'copy_engine', not to {backend!r}")
    if backend != "verbs" and rdma is not None:
        raise ValueError(f"rdma belongs to backend 'verbs', not to {backend!r}")
    if backend == "local" and copies is not None:
        raise ValueError("copies belongs to backends of several processes, not to 'local'")


def _default_copies() -> CopyOptions | None:
    import torch

    from .copy_options import CopyOptions

    return CopyOptions() if torch.cuda.is_available() else None


def _with_copies(lane: HostTransport, copies: CopyOptions | None) -> HostTransport:
    """Let a channel move CUDA tensors as the options say; without them it moves what it moved before."""
    if copies is not None:
        from .hosts import use_engines

        use_engines(lane, copies)
    return lane


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
