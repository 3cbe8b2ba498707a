"""The Triton kernel that updates rows of a table: read, compute, write, in one launch (section 3.2).

Each program does the same to a few rows, so a row's new bits do not depend on the rows beside it. Rows with a gradient
that is not finite stay as they are, and are counted.
"""

# Triton's constexpr arguments are constants and named like ones; Triton gives its functions no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

Rule = Literal["sgd", "rowwise_adagrad", "adam"]
TILE_ELEMENTS = 1024
_RULES: dict[Rule, int] = {"sgd": 0, "rowwise_adagrad": 1, "adam": 2}


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["weights", "gradients", "rows", "first", "second", "scale", "skipped"],
)
def update_kernel(
    weights, gradients, rows, first, second, scale, skipped,
    n: tl.int64, divisor: tl.float32, factor: tl.float32, lr: tl.float32, eps: tl.float32,
    beta1: tl.float32, rest1: tl.float32, beta2: tl.float32, rest2: tl.float32,
    correction1: tl.float32, correction2: tl.float32, decay: tl.float32,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Update TILE_ROWS rows; `rest1` is 1 - beta1."""
    position = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    exists = position < n
    row = tl.load(rows + position, mask=exists, other=0)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < UNITS)[None, :]
    place = row[:, None] * UNITS + column[None, :]
    gradient = tl.load(gradients + position[:, None] * UNITS + column[None, :], mask=inside, other=0)
    nothing = tl.zeros_like(gradient)
    gradient = tl.div_rn(gradient, divisor + nothing)
    gradient = tl.div_rn(gradient, factor + nothing)
    if scale is not None:
        gradient = tl.div_rn(gradient, tl.load(scale) + nothing)
    finite = tl.abs(gradient) <= 3.4028234663852886e38
    gradient = tl.where(finite, gradient, 0)
    strange = tl.sum(tl.where(finite, 0, 1), axis=1)
    kept = strange == 0
    written = inside & kept[:, None]
    weight = tl.load(weights + place, mask=inside, other=0).to(tl.float32)
    if RULE == 0:
        weight = weight - gradient * lr
    elif RULE == 1:
        squares = tl.sum(gradient * gradient, axis=1)
        momentum = tl.load(first + row, mask=exists, other=0) + tl.div_rn(squares, tl.zeros_like(squares) + UNITS)
        tl.store(first + row, momentum, mask=exists & kept)
        root = tl.sqrt_rn(momentum) + eps
        rate = tl.div_rn(lr + tl.zeros_like(root), root)
        weight = weight - gradient * rate[:, None]
    else:
        mean = tl.load(first + place, mask=inside, other=0) * beta1 + gradient * rest1
        square = gradient * gradient
        power = tl.load(second + place, mask=inside, other=0) * beta2 + square * rest2
        tl.store(first + place, mean, mask=written)
        tl.store(second + place, power, mask=written)
        root = tl.sqrt_rn(tl.div_rn(power, correction2 + nothing)) + eps
        change = tl.div_rn(tl.div_rn(mean, correction1 + nothing), root)
        change += weight * decay
        weight = weight - change * lr
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=written)
    count = tl.sum(tl.where(exists & (strange > 0), 1, 0).to(tl.int64))
    if count > 0:
        tl.atomic_add(skipped, count)


def update_rows(
    weights: Tensor,
    gradients: Tensor,
    rows: Tensor,
    states: list[Tensor],
    numbers: list[float],
    scale: Tensor | None,
    skipped: Tensor,
    rule: Rule,
) -> None:
    """Update rows in place, without synchronising.

    Args:
        weights: Shape [rows of the table, D], float32, bfloat16 or float16, contiguous.
        gradients: Sums, before they are divided. Shape [n, D], float32, contiguous.
        rows: Distinct. Shape [n], int64.
        states: None, one of shape [rows of the table], or two like `weights`; float32.
        numbers: Two divisors of the gradients, lr, eps, beta1, 1 - beta1, beta2, 1 - beta2, both bias corrections,
            weight decay: 11 numbers.
        scale: What to divide gradients by, besides. One element, float32; or None.
        skipped: Rows left out are added to it. One element, int64.
        rule: Which optimizer.
    """
    units = weights.shape[1]
    columns = triton.next_power_of_2(units)
    tile_rows = max(TILE_ELEMENTS // columns, 1)
    first, second = [*states, None, None][:2]
    scalars: Any = (len(rows), *map(float, numbers))
    launch(
        update_kernel,
        weights.device.index,
        (-(-len(rows) // tile_rows), 1, 1),
        (weights.dtype,),
        (weights, gradients, rows, first, second, scale, skipped),
        scalars,
        (units, columns, tile_rows, _RULES[rule]),
    )
