"""The Triton kernel behind `sum_tree`: chunks of up to 32 rows, each added in order (section 3.2).

A program takes a few chunks at once, one row of its tile each, and walks them side by side.
"""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .sum_tree import SumTree

TILE_ELEMENTS = 1024
MAX_COLUMNS = 256
UNROLLED = 4  # rows of a chunk whose loads are under way at once


@triton.jit(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=["values", "result", "index", "offsets", "targets"],
)
def chunk_kernel(
    values, result, index, offsets, targets, chunks: tl.int64,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add up TILE_ROWS chunks; without `targets`, chunk i is row i of the result."""
    chunk = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    exists = chunk < chunks
    begin = tl.load(offsets + chunk, mask=exists, other=0)
    count = tl.load(offsets + chunk + 1, mask=exists, other=0) - begin
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < UNITS
    total = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
    steps = tl.max(count)
    step = 0
    while step < steps:
        for i in tl.static_range(UNROLLED):
            there = step + i < count
            row = tl.load(index + begin + step + i, mask=there, other=0)
            mask = there[:, None] & inside[None, :]
            total += tl.load(values + row[:, None] * UNITS + column[None, :], mask=mask, other=0)
        step += UNROLLED
    target = chunk if targets is None else tl.load(targets + chunk, mask=exists, other=0)
    tl.store(result + target[:, None] * UNITS + column[None, :], total, mask=exists[:, None] & inside[None, :])


def sum_rounds(values: Tensor, tree: SumTree) -> Tensor:
    """GPU path of `freescale.kernels.sum_tree.sum_tree`, of values that are there; does not synchronise."""
    out = values.new_empty((tree.size + tree.num_scratch, values.shape[1]))
    source = values
    for index, offsets, targets in tree.rounds:
        _launch(source, out, index, offsets, targets)
        source = out
    return out[: tree.size]


def _launch(source: Tensor, out: Tensor, index: Tensor, offsets: Tensor, targets: Tensor | None) -> None:
    units, chunks = out.shape[1], len(offsets) - 1
    columns = min(triton.next_power_of_2(units), MAX_COLUMNS)
    tile_rows = max(TILE_ELEMENTS // columns, 1)
    launch(
        chunk_kernel,
        out.device.index,
        (-(-chunks // tile_rows), -(-units // columns), 1),
        (out.dtype,),
        (source, out, index, offsets, targets),
        (chunks,),
        (units, columns, tile_rows, UNROLLED),
    )
