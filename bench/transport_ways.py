"""Ways to move CUDA tensors between the GPUs of a host, under one call (paper, section 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..transport import CopyOptions, Transport, connect

Begin = Callable[[Tensor, Sequence[int], Sequence[int], Tensor], Callable[[], object]]
"""Begin an all_to_all of rows into an output; what it returns makes the current stream wait for the output."""

_DEADLINE_S = 15.0
_c10d: Any = dist  # torch's stubs lack what is used through this name
T = TypeVar("T")


def make_ways(names: Sequence[str], base: Transport) -> dict[str, Begin]:
    """Connect; collective.

    Args:
        names: "NCCL" (torch.distributed's own calls), "NCCL n" (with n thread blocks at most), "process_group",
            "copy_engine", "segment" and "staged" (over gloo).
        base: Connects the ranks.
    """
    return {name: _nccl(name) if name.startswith("NCCL") else _ours(name, base) for name in names}


def _nccl(name: str) -> Begin:
    options = _c10d.ProcessGroupNCCL.Options()
    _, _, most = name.partition(" ")
    if most:
        options.config.min_ctas = options.config.max_ctas = int(most)
    group = dist.new_group(backend="nccl", pg_options=options)

    def begin(rows: Tensor, sent: Sequence[int], received: Sequence[int], out: Tensor) -> Callable[[], object]:
        work = _c10d.all_to_all_single(out, rows, list(received), list(sent), group=group, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    return begin


def _ours(name: str, base: Transport) -> Begin:
    if name == "process_group":
        lane = connect("process_group", check_sizes=False, timeout_s=_DEADLINE_S)
    elif name == "staged":
        lane = connect("process_group", check_sizes=False, timeout_s=_DEADLINE_S, copies=CopyOptions("staged"))
    else:
        options = CopyOptions("segment" if name == "segment" else "peer")
        lane = connect("copy_engine", through=base, check_sizes=False, timeout_s=_DEADLINE_S, copies=options)

    def begin(rows: Tensor, sent: Sequence[int], received: Sequence[int], out: Tensor) -> Callable[[], object]:
        return lane.all_to_all(rows, sent, received, out).wait

    return begin


def to_others(rank: int, world_size: int, size_bytes: int) -> list[int]:
    """Splits that send `size_bytes`, in all, to the other ranks and keep nothing."""
    piece = size_bytes // (world_size - 1)
    return [0 if peer == rank else piece for peer in range(world_size)]


def is_right(begin: Begin, rank: int, world_size: int, size_bytes: int) -> bool:
    """Whether what arrives is what the others sent; collective. Two exchanges of different contents."""
    splits = to_others(rank, world_size, size_bytes)
    piece = max(splits)

    def exchange_twice() -> bool:
        found = True
        for step in range(2):
            rows = torch.cat([_content(rank, peer, piece, step) for peer in range(world_size) if peer != rank])
            out = torch.zeros_like(rows)
            begin(rows, splits, splits, out)()
            expected = torch.cat([_content(peer, rank, piece, step) for peer in range(world_size) if peer != rank])
            found = found and torch.equal(out, expected)
        return found

    return agree(together(exchange_twice))


def _content(source: int, target: int, size: int, step: int) -> Tensor:
    values = torch.arange(size, device="cuda") * 31 + 7 * source + 3 * target + step
    return values.to(torch.uint8)


def together(part: Callable[[], T]) -> T:
    """Do this rank's part of a measurement; collective, but nothing in the part may be.

    Raises:
        RuntimeError: It failed here or on another rank: then it raises on all, and they go on together.
    """
    failure: RuntimeError | None = None
    results: list[T] = []
    try:
        results.append(part())
    except RuntimeError as error:
        failure = error
    if not agree(failure is None):
        raise RuntimeError("it failed on another rank") if failure is None else failure
    return results[0]


def agree(mine: bool) -> bool:
    """Whether it holds on all ranks; collective."""
    return largest(0.0 if mine else 1.0) == 0.0


def largest(mine: float) -> float:
    """The largest of all ranks' numbers; collective, and waits for this rank's GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    both = torch.tensor([mine], dtype=torch.float64, device="cpu")
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return float(both)
