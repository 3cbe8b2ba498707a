"""The Triton kernel behind the gradient of every gather: pieces added into places, which may overlap, section 4.2.

Work is split by rows of the result. With the pieces sorted by start, those that may cover a row are an interval: from
the first whose reach (the furthest end so far) is beyond the row to the last that starts at or before it. Each row adds
them in that order: no atomics, the same bits every time.
"""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .copy_ranges import WAYS
from .find_ranges import search_pair, search_rows
from .launch import launch

TILE_ELEMENTS = 1024
MAX_COLUMNS = 256


@triton.jit(
    do_not_specialize=["n", "size"],
    do_not_specialize_on_alignment=["values", "result", "starts", "reaches", "lengths", "offsets"],
)
def sum_kernel(
    values, result, starts, reaches, lengths, offsets, n: tl.int64, size: tl.int64,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, WIDE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Add up TILE_ROWS rows of the result. `starts` and `reaches` hold one entry in front, as offsets do."""
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    position = first + tl.arange(0, TILE_ROWS)
    last = tl.minimum(first + TILE_ROWS, size) - 1
    searched = tl.minimum(position, last)
    low, high = search_pair(reaches, n, first, last, WAYS)
    candidate = search_rows(reaches, searched, low, high)
    low, high = search_pair(starts, n, first, last, WAYS)
    behind = search_rows(starts, searched, low, high)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (position < size)[:, None] & (column < UNITS)[None, :]
    total = tl.zeros([TILE_ROWS, COLUMNS], WIDE)
    steps = tl.max(behind - candidate)
    while steps > 0:
        possible = candidate < behind
        start = tl.load(starts + 1 + candidate, mask=possible, other=0)
        length = tl.load(lengths + candidate, mask=possible, other=0)
        row = tl.load(offsets + candidate, mask=possible, other=0) + position - start
        covers = possible & (position - start < length)
        mask = inside & covers[:, None]
        total += tl.load(values + row[:, None] * UNITS + column[None, :], mask=mask, other=0).to(WIDE)
        candidate += 1
        steps -= 1
    tl.store(result + position[:, None] * UNITS + column[None, :], total, mask=inside)


def sum_ranges(values: Tensor, result: Tensor, starts: Tensor, lengths: Tensor, offsets: Tensor) -> None:
    """Write the sums of the pieces into every row of `result`, without synchronising.

    Args:
        values: The pieces, contiguous, floating. Shape [L, ...].
        result: Contiguous, of the same dtype. Shape [size, ...].
        starts: Where each piece goes. Shape [n], int64.
        lengths: Rows of each piece. Shape [n], int64.
        offsets: First row of each piece in `values`. Shape [n + 1], int64.
    """
    units = math.prod(result.shape[1:])
    if not (len(result) and units and len(starts)):
        result.zero_()
        return
    beyond = torch.iinfo(torch.int64).max
    keys, order = torch.where(lengths > 0, starts, beyond).sort(stable=True)  # empty pieces cover nothing: last
    lengths, offsets = lengths[order], offsets[order]
    reaches = torch.where(lengths > 0, keys + lengths, beyond).cummax(0).values
    columns = min(triton.next_power_of_2(units), MAX_COLUMNS)
    tile_rows = TILE_ELEMENTS // columns
    launch(
        sum_kernel,
        values.device.index,
        (-(-len(result) // tile_rows), -(-units // columns), 1),
        (values.dtype,),
        (values, result, _with_front(keys), _with_front(reaches), lengths, offsets),
        (len(order), len(result)),
        (units, columns, tile_rows, tl.float64 if values.dtype == torch.float64 else tl.float32, WAYS),
    )


def _with_front(numbers: Tensor) -> Tensor:
    return torch.cat([numbers.new_zeros(1), numbers])
