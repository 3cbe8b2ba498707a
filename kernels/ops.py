"""The operators `torch.ops.freescale.*`: schemas, device dispatch, fake implementations, gradients (paper, section 4.2).

The tensor's device alone decides which implementation runs. Gradients close over the operators themselves: the
gradient of a gather (permute, dispatch) is `sum_ranges`, the gradient of a scatter (combine, sum) is
`dispatch_ranges`, and a transpose goes back by another transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import host_jagged

_library = torch.library.Library("freescale", "DEF")
_library.define("permute_jagged(Tensor[] values, Tensor lengths, Tensor rows, SymInt? total) -> (Tensor[], Tensor)")
_library.define("dispatch_ranges(Tensor[] values, Tensor starts, Tensor lengths, SymInt? total) -> Tensor[]")
_library.define("combine_ranges(Tensor[] values, Tensor starts, Tensor lengths, SymInt size) -> Tensor[]")
_library.define("sum_ranges(Tensor[] values, Tensor starts, Tensor lengths, SymInt size) -> Tensor[]")
_library.define("transpose_keyed(Tensor[] values, Tensor lengths) -> (Tensor[], Tensor)")

_OPERATORS = ("permute_jagged", "dispatch_ranges", "combine_ranges", "sum_ranges", "transpose_keyed")


def _on_device(name: str) -> Callable[..., Any]:
    """Import Triton at the first CUDA call: CPU builds of torch bring none."""

    def implementation(*args: Any) -> Any:
        from . import device_jagged

        return getattr(device_jagged, name)(*args)

    return implementation


for _name in _OPERATORS:
    _library.impl(_name, getattr(host_jagged, _name), "CPU")
    _library.impl(_name, _on_device(_name), "CUDA")


def _resized(values: list[Tensor], size: int | torch.SymInt) -> list[Tensor]:
    return [tensor.new_empty((size, *tensor.shape[1:])) for tensor in values]


def _known_or_new(total: int | torch.SymInt | None) -> int | torch.SymInt:
    if total is not None:
        return total
    size: torch.SymInt = torch.library.get_ctx().new_dynamic_size()
    return size


@torch.library.register_fake("freescale::permute_jagged")
def _(values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None) -> tuple[list[Tensor], Tensor]:
    return _resized(values, _known_or_new(total)), lengths.new_empty(rows.shape)


@torch.library.register_fake("freescale::dispatch_ranges")
def _(values: list[Tensor], starts: Tensor, lengths: Tensor, total: int | None) -> list[Tensor]:
    return _resized(values, _known_or_new(total))


@torch.library.register_fake("freescale::combine_ranges")
def _(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    return _resized(values, size)


@torch.library.register_fake("freescale::sum_ranges")
def _(values: list[Tensor], starts: Tensor, lengths: Tensor, size: int) -> list[Tensor]:
    return _resized(values, size)


@torch.library.register_fake("freescale::transpose_keyed")
def _(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    return _resized(values, values[0].shape[0]), lengths.new_empty(tuple(reversed(lengths.shape)))


def _each_wanted(
    ctx: Any, gradients: list[Tensor | None], operator: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor | None]:
    """Run the operator once over the gradients that exist and are asked for."""
    wanted = [i for i, gradient in enumerate(gradients) if ctx.needs_input_grad[0][i] and gradient is not None]
    results: list[Tensor | None] = [None] * len(gradients)
    if wanted:
        for i, result in zip(wanted, operator([gradients[i] for i in wanted]), strict=True):  # type: ignore[misc]
            results[i] = result
    return results


def _remember_permute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, lengths, rows, _ = inputs
    ctx.save_for_backward(lengths, rows, output[1])
    ctx.size = values[0].shape[0]
    ctx.mark_non_differentiable(output[1])


def _permute_backward(ctx: Any, gradients: list[Tensor | None], _: Any) -> tuple[Any, ...]:
    lengths, rows, permuted_lengths = ctx.saved_tensors

    def add_back(grads: list[Tensor]) -> list[Tensor]:
        starts = (lengths.long().cumsum(0) - lengths)[rows]
        return sum_ranges(grads, starts, permuted_lengths, ctx.size)

    return _each_wanted(ctx, gradients, add_back), None, None, None


def _remember_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.size = inputs[0][0].shape[0]


def _dispatch_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    starts, lengths = ctx.saved_tensors
    back = _each_wanted(ctx, gradients, lambda grads: sum_ranges(grads, starts, lengths, ctx.size))
    return back, None, None, None


def _combine_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    starts, lengths = ctx.saved_tensors
    back = _each_wanted(ctx, gradients, lambda grads: dispatch_ranges(grads, starts, lengths, ctx.size))
    return back, None, None, None


def _remember_transpose(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _transpose_backward(ctx: Any, gradients: list[Tensor | None], _: Any) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    return _each_wanted(ctx, gradients, lambda grads: transpose_keyed(grads, lengths)[0]), None


torch.library.register_autograd("freescale::permute_jagged", _permute_backward, setup_context=_remember_permute)
torch.library.register_autograd("freescale::dispatch_ranges", _dispatch_backward, setup_context=_remember_dispatch)
torch.library.register_autograd("freescale::combine_ranges", _combine_backward, setup_context=_remember_dispatch)
torch.library.register_autograd("freescale::sum_ranges", _combine_backward, setup_context=_remember_dispatch)
torch.library.register_autograd("freescale::transpose_keyed", _transpose_backward, setup_context=_remember_transpose)

permute_jagged: Callable[..., tuple[list[Tensor], Tensor]] = torch.ops.freescale.permute_jagged.default
dispatch_ranges: Callable[..., list[Tensor]] = torch.ops.freescale.dispatch_ranges.default
combine_ranges: Callable[..., list[Tensor]] = torch.ops.freescale.combine_ranges.default
sum_ranges: Callable[..., list[Tensor]] = torch.ops.freescale.sum_ranges.default
transpose_keyed: Callable[..., tuple[list[Tensor], Tensor]] = torch.ops.freescale.transpose_keyed.default
