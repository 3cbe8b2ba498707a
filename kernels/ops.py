"""The operators `torch.ops.freescale.*`: schemas, dispatch, fake implementations, gradients (paper, section 4.2).

The tensor's device alone decides which implementation runs. Gradients close over the operators themselves: the
gradient of a gather (permute, dispatch) is `sum_ranges`, the gradient of a scatter (combine, sum) is
`dispatch_ranges`, and a transpose goes back by another transpose.

Every operator has an overload `plain` without a gradient, which calls use that need none: PyTorch's path through a
gradient written in Python costs as much host time as a small copy. Where nothing looks at operators either (no
compiler, no mode, no transform, no subclass), the implementation is called directly, since PyTorch's dispatch to Python
costs tens of microseconds: 44 of 101 us for a permute of 40 ids, measured by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import host_jagged

_SCHEMAS = {
    "permute_jagged": "(Tensor[] values, Tensor lengths, Tensor rows, SymInt? total) -> (Tensor[], Tensor)",
    "dispatch_ranges": "(Tensor[] values, Tensor starts, Tensor lengths, SymInt? total) -> Tensor[]",
    "combine_ranges": "(Tensor[] values, Tensor starts, Tensor lengths, SymInt size) -> Tensor[]",
    "sum_ranges": "(Tensor[] values, Tensor starts, Tensor lengths, SymInt size) -> Tensor[]",
    "transpose_keyed": "(Tensor[] values, Tensor lengths) -> (Tensor[], Tensor)",
}
_library = torch.library.Library("freescale", "DEF")
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_ORDINARY = frozenset((Tensor, torch.nn.Parameter, int, np.int32, np.int64, type(None)))  # nobody looks at these


def _on_gpu(name: str) -> Callable[..., Any]:
    """Import Triton at the first CUDA call, since CPU builds of torch bring none, and launch on the tensors' device."""

    def implementation(values: list[Tensor], *args: Any) -> Any:
        from . import device_jagged

        operation = getattr(device_jagged, name)
        if values[0].device.index == torch.cuda.current_device():
            return operation(values, *args)
        with torch.cuda.device(values[0].device):
            return operation(values, *args)

    return implementation


def _resized(values: list[Tensor], size: int | torch.SymInt) -> list[Tensor]:
    return [tensor.new_empty((size, *tensor.shape[1:])) for tensor in values]


def _known_or_new(total: int | torch.SymInt | None) -> int | torch.SymInt:
    if total is not None:
        return total
    size: torch.SymInt = torch.library.get_ctx().new_dynamic_size()
    return size


def _fake_permute(
    values: list[Tensor], lengths: Tensor, rows: Tensor, total: int | None
) -> tuple[list[Tensor], Tensor]:
    return _resized(values, _known_or_new(total)), lengths.new_empty(rows.shape)


def _fake_dispatch(values: list[Tensor], _starts: Tensor, _lengths: Tensor, total: int | None) -> list[Tensor]:
    return _resized(values, _known_or_new(total))


def _fake_combine(values: list[Tensor], _starts: Tensor, _lengths: Tensor, size: int) -> list[Tensor]:
    return _resized(values, size)


def _fake_transpose(values: list[Tensor], lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    return _resized(values, values[0].shape[0]), lengths.new_empty((lengths.shape[1], lengths.shape[0]))


def _each_wanted(
    ctx: Any, gradients: list[Tensor | None], operator: Callable[[list[Tensor]], Any]
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

    def add_back(grads: list[Tensor]) -> Any:
        starts = (lengths.long().cumsum(0) - lengths)[rows]
        return sum_ranges(grads, starts, permuted_lengths, ctx.size)

    return _each_wanted(ctx, gradients, add_back), None, None, None


def _remember_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
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


def _remember_transpose(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _transpose_backward(ctx: Any, gradients: list[Tensor | None], _: Any) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    return _each_wanted(ctx, gradients, lambda grads: transpose_keyed(grads, lengths)[0]), None


def _needs_gradient(values: list[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for tensor in values:
            if tensor.requires_grad:
                return True
    return False


def _is_watched() -> bool:
    """Whether a compiler, a mode, a transform (vmap, grad) or a tracer wants to see every operator."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _function_modes() > 0
        or _transforms() is not None
        or _tracer() is not None
    )


def _are_ordinary(values: list[Tensor], arguments: tuple[Any, ...]) -> bool:
    """Whether no argument needs PyTorch's dispatcher.

    It would see to subclasses, and to tensors that are the conjugate or the negative of what their memory holds.
    """
    for argument in arguments:
        if type(argument) not in _ORDINARY:
            return False
    for tensor in values:  # noqa: SIM110 - a generator costs more than what it would ask
        if type(tensor) not in _ORDINARY or tensor.is_conj() or tensor.is_neg():
            return False
    return True


def _operator(name: str, fake: Callable[..., Any], remember: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """Define an operator in both overloads; return a function that calls the one that its arguments need."""
    for overload in (name, f"{name}.plain"):
        _library.define(overload + _SCHEMAS[name])
        _library.impl(overload, getattr(host_jagged, name), "CPU")
        _library.impl(overload, _on_gpu(name), "CUDA")
        torch.library.register_fake(f"freescale::{overload}", fake, lib=_library)
    torch.library.register_autograd(f"freescale::{name}", backward, setup_context=remember, lib=_library)
    packet = getattr(torch.ops.freescale, name)
    differentiable, plain = packet.default, packet.plain

    on_host, on_gpu = getattr(host_jagged, name), _on_gpu(name)

    def either(values: list[Tensor], *args: Any) -> Any:
        if _needs_gradient(values):
            return differentiable(values, *args)
        if _is_watched() or not _are_ordinary(values, args):
            return plain(values, *args)
        first = values[0]
        if first.is_cpu:
            return on_host(values, *args)
        return on_gpu(values, *args) if first.is_cuda else plain(values, *args)

    return either


permute_jagged = _operator("permute_jagged", _fake_permute, _remember_permute, _permute_backward)
dispatch_ranges = _operator("dispatch_ranges", _fake_dispatch, _remember_dispatch, _dispatch_backward)
combine_ranges = _operator("combine_ranges", _fake_combine, _remember_dispatch, _combine_backward)
sum_ranges = _operator("sum_ranges", _fake_combine, _remember_dispatch, _combine_backward)
transpose_keyed = _operator("transpose_keyed", _fake_transpose, _remember_transpose, _transpose_backward)
