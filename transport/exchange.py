"""Checks the arguments of both operations once, for all backends, and turns tensors into bytes (paper, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Operation = Literal["all_gather", "all_to_all"]
Splits = Sequence[int] | NDArray[np.integer] | Tensor
"""Rows for or from each rank: ints, a numpy integer array, or an integer tensor of one dimension. Length world_size."""


class Chunks(Protocol):
    """Lets a backend that sends chunk by chunk begin before the source is complete, and tells what has arrived.

    Only "verbs" does; others move an exchange when all of its source is there. For whoever makes an `Exchange`, to copy
    between device and host while the network works.
    """

    def is_ready(self, start: int, stop: int) -> bool:
        """Whether the bytes from start to stop of the source may be read. Called again, every 0.5 ms, while not."""

    def landed(self, start: int, stop: int) -> None:
        """The bytes from start to stop of the target are there. In any order, this rank's own piece left out."""


@dataclass(eq=False)
class Exchange:
    """One operation of one rank, in bytes. This rank's own byte counts are zero: in host memory its piece is in place.

    Attributes:
        operation: What the caller asked for.
        rank: This rank.
        row_bytes: Bytes of one row.
        sent_rows: Rows for each rank. Shape [world_size], int64.
        received_rows: Rows expected from each rank. Shape [world_size], int64.
        source: What is sent. Shape [bytes], uint8, contiguous.
        sent_bytes: Bytes for each rank; 0 for this one. Shape [world_size], int64.
        sent_at: Where each rank's bytes begin in `source`. Shape [world_size], int64.
        target: Where it arrives: the memory of `out`. Shape [bytes], uint8, contiguous.
        received_bytes: Bytes from each rank; 0 from this one. Shape [world_size], int64.
        received_at: Where each rank's bytes begin in `target`. Shape [world_size], int64.
        out: What the caller gets.
        kept_bytes: Bytes of this rank's own piece.
        incomplete: Some rank's piece is not moved, because the two disagree; `out` must not be given to the caller.
        checked: Ranks compare sizes before they move this; where two disagree, others go on.
        ready: For CUDA tensors: comes when `source` may be read and `target` be written.
        chunks: For sources that become ready bit by bit; None when all of `source` is there.
        join: For CUDA tensors, once begun: makes the current stream wait until `target` is complete.
        waited_s: How long the last wait took, when the same exchange is begun again.
        prepared: What a backend worked out about it, for when the same exchange is begun again; see `Gathers`.
    """

    operation: Operation
    rank: int
    row_bytes: int
    sent_rows: NDArray[np.int64]
    received_rows: NDArray[np.int64]
    source: Tensor
    sent_bytes: NDArray[np.int64]
    sent_at: NDArray[np.int64]
    target: Tensor
    received_bytes: NDArray[np.int64]
    received_at: NDArray[np.int64]
    out: Tensor
    kept_bytes: int
    incomplete: bool = False
    checked: bool = False
    ready: torch.cuda.Event | None = None
    join: Callable[[], object] | None = None
    chunks: Chunks | None = None
    waited_s: float = 0.0
    prepared: tuple[list[object], list[object]] | None = None

    def outgoing(self, peer: int) -> Tensor:
        """The bytes for a peer. Shape [sent_bytes[peer]], uint8."""
        return self.source.narrow(0, int(self.sent_at[peer]), int(self.sent_bytes[peer]))

    def incoming(self, peer: int) -> Tensor:
        """Where the bytes of a peer arrive. Shape [received_bytes[peer]], uint8."""
        return self.target.narrow(0, int(self.received_at[peer]), int(self.received_bytes[peer]))

    def kept(self) -> tuple[Tensor, Tensor]:
        """What this rank keeps, and where it belongs; on a GPU it is the engine that copies. Both [kept_bytes]."""
        source, target = int(self.sent_at[self.rank]), int(self.received_at[self.rank])
        return self.source.narrow(0, source, self.kept_bytes), self.target.narrow(0, target, self.kept_bytes)

    def pieces(self) -> tuple[list[Tensor], list[Tensor]]:
        """What goes to each rank and where each rank's bytes arrive, this rank's own piece included.

        Two operations in all, where a view for each piece would give another thread the interpreter each time.
        """
        if self.incomplete:
            ranks = range(len(self.sent_bytes))
            sources, targets = [self.outgoing(peer) for peer in ranks], [self.incoming(peer) for peer in ranks]
            sources[self.rank], targets[self.rank] = self.kept()
            return sources, targets
        sent, received = self.sent_bytes.copy(), self.received_bytes.copy()
        sent[self.rank] = received[self.rank] = self.kept_bytes
        gathers = self.operation == "all_gather"
        sources = [self.source] * len(sent) if gathers else list(self.source.split(sent.tolist()))
        return sources, list(self.target.split(received.tolist()))

    def skip(self, peer: int) -> None:
        """Move nothing between this rank and a peer."""
        self.sent_bytes[peer] = self.received_bytes[peer] = 0
        self.incomplete = True


def plan_all_gather(
    rank: int,
    world_size: int,
    block: Tensor,
    sizes: Splits | None,
    out: Tensor | None,
    devices: Sequence[str] = ("cpu",),
) -> Exchange:
    """Check the arguments of an all_gather and lay out its bytes. `devices` are the types that the backend moves.

    Raises:
        ValueError: See `Transport.all_gather`.
        TypeError: `block` or `out` is no tensor.
    """
    _check_rows("block", block, devices)
    rows = block.shape[0]
    sent = np.full(world_size, rows)
    received = sent if sizes is None else _read_splits("sizes", sizes, world_size)
    if received[rank] != rows:
        raise ValueError(f"sizes[{rank}] must be the rows of this rank's block, {rows}, got {received[rank]}")
    return _lay_out("all_gather", rank, "block", block, sent, received, out)


def plan_all_to_all(
    rank: int,
    world_size: int,
    rows: Tensor,
    sent_splits: Splits,
    received_splits: Splits,
    out: Tensor | None,
    devices: Sequence[str] = ("cpu",),
) -> Exchange:
    """Check the arguments of an all_to_all and lay out its bytes. `devices` are the types that the backend moves.

    Raises:
        ValueError: See `Transport.all_to_all`.
        TypeError: `rows` or `out` is no tensor.
    """
    _check_rows("rows", rows, devices)
    sent = _read_splits("sent_splits", sent_splits, world_size)
    received = _read_splits("received_splits", received_splits, world_size)
    if np.add.reduce(sent) != rows.shape[0]:
        raise ValueError(f"sent_splits must add up to the {rows.shape[0]} rows given, got {int(sent.sum())}")
    if sent[rank] != received[rank]:
        raise ValueError(
            f"sent_splits[{rank}] and received_splits[{rank}] are both what this rank keeps and must be equal, "
            f"got {sent[rank]} and {received[rank]}"
        )
    return _lay_out("all_to_all", rank, "rows", rows, sent, received, out)


class Gathers:
    """Lays out gathers, and remembers those between the same two tensors: the ranks of a loop say as much in each step.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._known: dict[int, _Gather] = {}

    def plan(self, block: Tensor, sizes: Splits | None, out: Tensor | None, devices: Sequence[str]) -> Exchange:
        """As `plan_all_gather`."""
        if sizes is not None or out is None:
            return plan_all_gather(self._rank, self._world_size, block, sizes, out, devices)
        known = self._known.get(id(out))
        if known is not None and known.is_between(block, out):
            return known.again()
        exchange = plan_all_gather(self._rank, self._world_size, block, sizes, out, devices)
        gather = _Gather(block, out, exchange)
        if gather.can_repeat:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[id(out)] = gather
        return exchange


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_MOST_KNOWN = 4  # a channel keeps their memory


class _Gather:
    """A gather as it was laid out between two tensors, which are kept so that they stay the ones meant."""

    def __init__(self, block: Tensor, out: Tensor, exchange: Exchange) -> None:
        self._block, self._out, self._exchange = block, out, exchange
        self._places = _places(block, out)
        at = (exchange.source.data_ptr(), exchange.target.data_ptr())
        self.can_repeat = exchange.out is out and exchange.kept_bytes > 0 and self._places[:2] == at
        self.can_repeat &= not block.is_cuda
        if self.can_repeat:
            start = int(exchange.received_at[exchange.rank])
            kept = exchange.target.numpy()[start : start + exchange.kept_bytes]
            # By words where possible: NumPy holds the interpreter lock for up to 500 elements.
            width = np.int64 if kept.size % 8 == 0 else np.uint8
            self._mine, self._kept = exchange.source.numpy().view(width), kept.view(width)

    def is_between(self, block: Tensor, out: Tensor) -> bool:
        """Whether these are the tensors, in the same memory as then, and ranks agreed about them."""
        same = block is self._block and out is self._out and _places(block, out) == self._places
        return same and not self._exchange.incomplete

    def again(self) -> Exchange:
        """The exchange, with this rank's own piece in its place."""
        self._kept[:] = self._mine
        return self._exchange


def _places(block: Tensor, out: Tensor) -> tuple[object, ...]:
    return block.data_ptr(), out.data_ptr(), block.shape, out.shape, block.dtype, block.is_contiguous()


def _check_rows(name: str, rows: Tensor, devices: Sequence[str]) -> None:
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(rows).__name__}")
    if rows.device.type not in devices:
        if len(devices) > 1:
            raise ValueError(f"{name} must be in the memory of {' or '.join(devices)}, got a tensor on {rows.device}")
        raise ValueError(
            f"{name} must be in host memory, got a tensor on {rows.device}: copy it with .cpu() first; "
            "this backend moves host memory only"
        )
    if rows.layout != torch.strided or rows.is_quantized:
        raise ValueError(f"{name} must be a plain dense tensor, got layout {rows.layout}, dtype {rows.dtype}")
    if rows.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar: rows lie along dim 0")


def _read_splits(name: str, splits: Splits, world_size: int) -> NDArray[np.int64]:
    if isinstance(splits, Tensor):
        if splits.device.type != "cpu":
            raise ValueError(f"{name} must be in host memory, got a tensor on {splits.device}")
        splits = splits.detach().numpy()
    array = np.asarray(splits)
    if array.shape != (world_size,):
        raise ValueError(f"{name} must have one entry for each of the {world_size} ranks, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    array = array.astype(np.int64)
    if np.minimum.reduce(array) < 0:
        raise ValueError(f"{name} must not be negative, got {array.min()} for rank {array.argmin()}")
    return array


def _lay_out(
    operation: Operation,
    rank: int,
    name: str,
    rows: Tensor,
    sent: NDArray[np.int64],
    received: NDArray[np.int64],
    out: Tensor | None,
) -> Exchange:
    may_be_lazy = rows.dtype.is_floating_point or rows.dtype.is_complex  # to ask is_conj() lets another thread run
    if rows.requires_grad or (may_be_lazy and (rows.is_conj() or rows.is_neg())) or not rows.is_contiguous():
        rows = rows.detach().resolve_conj().resolve_neg().contiguous()
    received_at = np.add.accumulate(received)
    shape = (int(received_at[-1]), *rows.shape[1:])
    received_at -= received
    out = (
        torch.empty(shape, dtype=rows.dtype, device=rows.device) if out is None else _check_out(out, shape, name, rows)
    )
    row_bytes = rows.element_size() if rows.dim() == 1 else math.prod(rows.shape[1:]) * rows.element_size()
    gathers = operation == "all_gather"
    exchange = Exchange(
        operation=operation,
        rank=rank,
        row_bytes=row_bytes,
        sent_rows=sent,
        received_rows=received,
        source=_bytes_of(rows),
        sent_bytes=sent * row_bytes,
        sent_at=np.zeros_like(sent) if gathers else (np.add.accumulate(sent) - sent) * row_bytes,
        target=_bytes_of(out),
        received_bytes=received * row_bytes,
        received_at=received_at * row_bytes,
        out=out,
        kept_bytes=int(sent[rank]) * row_bytes,
    )
    if rows.is_cuda:
        exchange.ready = torch.cuda.current_stream(rows.device).record_event()
    elif exchange.kept_bytes:
        # By NumPy, which does not let go of the interpreter for as little as this often is.
        start, at, size = int(exchange.sent_at[rank]), int(exchange.received_at[rank]), exchange.kept_bytes
        exchange.target.numpy()[at : at + size] = exchange.source.numpy()[start : start + size]
    exchange.sent_bytes[rank] = exchange.received_bytes[rank] = 0
    return exchange


def _bytes_of(rows: Tensor) -> Tensor:
    """View a contiguous tensor as bytes. Each view that is not needed is a switch between threads less."""
    flat = rows if rows.dim() == 1 else rows.view(-1)
    if not flat.shape[0]:  # NumPy's empty arrays have a stride of 0, which such a view refuses
        return torch.empty(0, dtype=torch.uint8, device=rows.device) if rows.is_cuda else _NOTHING
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _check_out(out: Tensor, shape: tuple[int, ...], name: str, rows: Tensor) -> Tensor:
    _check_rows("out", out, (rows.device.type,))
    if out.device != rows.device:
        raise ValueError(f"out must be on the device of {name}, {rows.device}, got {out.device}")
    if out.dtype != rows.dtype:
        raise ValueError(f"out must have the dtype of {name}, {rows.dtype}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {list(shape)}, got {list(out.shape)}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()} for shape {list(out.shape)}")
    first, last = out.data_ptr(), out.data_ptr() + out.nbytes
    if max(first, rows.data_ptr()) < min(last, rows.data_ptr() + rows.nbytes):
        raise ValueError(f"out must not share memory with {name}")
    return out.detach() if out.requires_grad else out
