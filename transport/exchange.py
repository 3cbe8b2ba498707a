"""Checks the arguments of both operations once, for all backends, and turns tensors into bytes (paper, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kept_events import current_stream, free_events, record
from .layouts import Layout, Layouts, Operation, Splits


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
        rows: What is sent. Any shape and dtype, contiguous.
        sent_bytes: Bytes for each rank; 0 for this one. Shape [world_size], int64.
        sent_at: Where each rank's bytes begin in `source`. Shape [world_size], int64.
        received_bytes: Bytes from each rank; 0 from this one. Shape [world_size], int64.
        received_at: Where each rank's bytes begin in `target`. Shape [world_size], int64.
        out: What the caller gets. Contiguous.
        kept_bytes: Bytes of this rank's own piece.
        incomplete: Some rank's piece is not moved, because the two disagree; `out` must not be given to the caller.
        checked: Ranks compare sizes before they move this; where two disagree, others go on.
        ready: For CUDA tensors: comes when `rows` may be read and `out` be written.
        chunks: For sources that become ready bit by bit; None when all of `source` is there.
        join: For CUDA tensors, once begun: makes the current stream wait until `out` is complete.
        waited_s: How long the last wait took, when the same exchange is begun again.
        prepared: What a backend worked out about it, for when the same exchange is begun again; see `Gathers`.
        layout: What the bytes above are from, unless they were changed; other exchanges may have it too.
    """

    operation: Operation
    rank: int
    row_bytes: int
    sent_rows: NDArray[np.int64]
    received_rows: NDArray[np.int64]
    rows: Tensor
    sent_bytes: NDArray[np.int64]
    sent_at: NDArray[np.int64]
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
    prepared: tuple[Any, Any] | None = None
    layout: Layout | None = None

    @cached_property
    def source(self) -> Tensor:
        """The bytes of `rows`; a copy engine needs no view of them. Shape [bytes], uint8."""
        return _bytes_of(self.rows)

    @cached_property
    def target(self) -> Tensor:
        """The bytes of `out`. Shape [bytes], uint8."""
        return _bytes_of(self.out)

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

    def known_layout(self) -> Layout | None:
        """The layout, unless this exchange's bytes have become others."""
        layout = self.layout
        return layout if layout is not None and layout.sent_bytes is self.sent_bytes else None

    def has_begun(self) -> None:
        """All streams that wait for `ready` have been told to: its event may serve another exchange."""
        assert self.ready is not None, "only CUDA tensors come here"
        free_events(self.rows.get_device()).append(self.ready)
        self.ready = None

    def skip(self, peer: int) -> None:
        """Move nothing between this rank and a peer."""
        if not self.incomplete:  # other exchanges may have the same layout
            self.sent_bytes, self.received_bytes = self.sent_bytes.copy(), self.received_bytes.copy()
        self.sent_bytes[peer] = self.received_bytes[peer] = 0
        self.incomplete = True


def plan_all_gather(
    rank: int,
    world_size: int,
    block: Tensor,
    sizes: Splits | None,
    out: Tensor | None,
    devices: Sequence[str] = ("cpu",),
    layouts: Layouts | None = None,
) -> Exchange:
    """Check the arguments of an all_gather and lay out its bytes. `devices` are the types that the backend moves.

    `layouts` remembers what is worked out for sizes that come again.

    Raises:
        ValueError: See `Transport.all_gather`.
        TypeError: `block` or `out` is no tensor.
    """
    _check_rows("block", block, devices)
    layouts = Layouts(rank, world_size) if layouts is None else layouts
    return _fill(layouts.all_gather(block.shape[0], _row_bytes(block), sizes), "block", block, out)


def plan_all_to_all(
    rank: int,
    world_size: int,
    rows: Tensor,
    sent_splits: Splits,
    received_splits: Splits,
    out: Tensor | None,
    devices: Sequence[str] = ("cpu",),
    layouts: Layouts | None = None,
) -> Exchange:
    """Check the arguments of an all_to_all and lay out its bytes. `devices` are the types that the backend moves.

    `layouts` remembers what is worked out for splits that come again.

    Raises:
        ValueError: See `Transport.all_to_all`.
        TypeError: `rows` or `out` is no tensor.
    """
    _check_rows("rows", rows, devices)
    layouts = Layouts(rank, world_size) if layouts is None else layouts
    return _fill(layouts.all_to_all(rows.shape[0], _row_bytes(rows), sent_splits, received_splits), "rows", rows, out)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _check_rows(name: str, rows: Tensor, devices: Sequence[str]) -> None:
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(rows).__name__}")
    if not (rows.is_cpu and "cpu" in devices) and rows.device.type not in devices:
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


def _fill(layout: Layout, name: str, rows: Tensor, out: Tensor | None) -> Exchange:
    """Bring memory to a layout, and this rank's own piece to its place."""
    may_be_lazy = rows.dtype.is_floating_point or rows.dtype.is_complex  # to ask is_conj() lets another thread run
    if rows.requires_grad or (may_be_lazy and (rows.is_conj() or rows.is_neg())) or not rows.is_contiguous():
        rows = rows.detach().resolve_conj().resolve_neg().contiguous()
    shape = (layout.num_received, *rows.shape[1:])
    out = (
        torch.empty(shape, dtype=rows.dtype, device=rows.device) if out is None else _check_out(out, shape, name, rows)
    )
    exchange = Exchange(
        operation=layout.operation,
        rank=layout.rank,
        row_bytes=layout.row_bytes,
        sent_rows=layout.sent_rows,
        received_rows=layout.received_rows,
        rows=rows,
        sent_bytes=layout.sent_bytes,
        sent_at=layout.sent_at,
        received_bytes=layout.received_bytes,
        received_at=layout.received_at,
        out=out,
        kept_bytes=layout.kept_bytes,
        layout=layout,
    )
    if rows.is_cuda:
        device = rows.get_device()
        exchange.ready = record(device, current_stream(device))
    elif size := layout.kept_bytes:
        # By NumPy, which does not let go of the interpreter for as little as this often is.
        start, at = int(exchange.sent_at[layout.rank]), int(exchange.received_at[layout.rank])
        exchange.target.numpy()[at : at + size] = exchange.source.numpy()[start : start + size]
    return exchange


def _row_bytes(rows: Tensor) -> int:
    return rows.element_size() if rows.dim() == 1 else math.prod(rows.shape[1:]) * rows.element_size()


def _bytes_of(rows: Tensor) -> Tensor:
    """View a contiguous tensor as bytes. Each view that is not needed is a switch between threads less."""
    flat = rows if rows.dim() == 1 else rows.view(-1)
    if not flat.shape[0]:  # NumPy's empty arrays have a stride of 0, which such a view refuses
        return torch.empty(0, dtype=torch.uint8, device=rows.device) if rows.is_cuda else _NOTHING
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _check_out(out: Tensor, shape: tuple[int, ...], name: str, rows: Tensor) -> Tensor:
    if not (
        isinstance(out, Tensor)
        and out.layout is torch.strided
        and out.dtype is rows.dtype
        and out.device == rows.device
        and out.shape == shape
        and out.is_contiguous()
    ):
        _refuse_out(out, shape, name, rows)
    first, start = out.data_ptr(), rows.data_ptr()
    if first < start + rows.nbytes and start < first + out.nbytes and out.nbytes and rows.nbytes:
        raise ValueError(f"out must not share memory with {name}")
    return out.detach() if out.requires_grad else out


def _refuse_out(out: Tensor, shape: tuple[int, ...], name: str, rows: Tensor) -> NoReturn:
    """Say what is wrong."""
    _check_rows("out", out, (rows.device.type,))
    if out.device != rows.device:
        raise ValueError(f"out must be on the device of {name}, {rows.device}, got {out.device}")
    if out.dtype != rows.dtype:
        raise ValueError(f"out must have the dtype of {name}, {rows.dtype}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {list(shape)}, got {list(out.shape)}")
    raise ValueError(f"out must be contiguous, got strides {out.stride()} for shape {list(out.shape)}")
