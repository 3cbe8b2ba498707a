"""Pools rows of bags; a bag's result does not depend on other bags (section 3.2).

Torch's own bags read a weight matrix, whose gradient is summed in an order that depends on the batch. Here rows have
been looked up, so bags are differences of a fixed tree over a bag's own rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SumBags(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor) -> Tensor:
        """Sums of consecutive rows. Shape [bags, D]."""
        lengths = offsets.diff()
        ctx.save_for_backward(lengths)
        ctx.num_rows, ctx.first = len(rows), offsets[:1]
        return torch.segment_reduce(rows, "sum", offsets=offsets, axis=0, initial=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Every row gets its bag's gradient. Shape [rows, D]."""
        (lengths,) = ctx.saved_tensors
        bags = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=ctx.num_rows)
        return gradient.index_select(0, bags), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compilers take no autograd function apart here
def pool(rows: Tensor, offsets: Tensor, weights: Tensor | None, kept: Tensor | None, mode: str) -> Tensor:
    """Pool looked-up rows.

    Args:
        rows: Shape [n, D], float32.
        offsets: First row of each bag and, last, their end: all rows are in bags. Shape [bags + 1], integer.
        weights: Factor of each row; None: 1. Shape [n].
        kept: Which rows count; None: all. Shape [n], bool.
        mode: "sum" or "mean".

    Returns:
        Shape [bags, D], float32; zero for empty bags.

    Example:
        >>> pool(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 1, 1, 3]), None, None, "mean").tolist()
        [[1.0], [0.0], [3.0]]
    """
    offsets = offsets.long()
    if weights is not None:
        rows = rows * weights.to(rows.dtype)[:, None]
    if kept is not None:
        rows = torch.where(kept[:, None], rows, torch.zeros_like(rows))
    sums: Tensor = _SumBags.apply(rows, offsets)  # type: ignore[no-untyped-call]  # torch's own lacks types
    if mode == "sum":
        return sums
    counts = offsets.diff()
    if kept is not None:
        ends = torch.cat([offsets.new_zeros(1), kept.long().cumsum(0)])
        counts = ends[offsets[1:]] - ends[offsets[:-1]]
    return sums / counts.clamp(min=1)[:, None]
