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

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import host_jagged, shapes

_SCHEMAS = {
    "permute_jagged": "(Tensor[] values, Tensor lengths, Tensor rows, SymInt? total) -> (Tensor[], Tensor)",
    "dispatch_ranges": "(Tensor[] values, Tensor starts, Tensor lengths, SymInt? total) -> Tensor[]",
    "combine_ranges": "(Tensor[] values, Tensor starts, Tensor lengths, SymInt size) -> Tensor[]",
    "sum_ranges": "(Tensor[] values, Tensor starts, Tensor lengths, SymInt size) -> Tensor[]",
    "transpose_keyed": "(Tensor[] values, Tensor lengths) -> (Tensor[], Tensor)",
}
_library = torch.library.Library("freescale", "DEF")
# What every call asks, under names of this module: that touches less memory than a look through torch's.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_ORDINARY = frozenset((Tensor, torch.nn.Parameter, int, np.int32, np.int64, type(None)))  # nobody looks at these


@functools.cache
def _gpu_operation(name: str) -> Callable[..., Any]:
    """Import Triton at the first CUDA call, since CPU builds of torch bring none."""
    from . import device_jagged

    operation: Callable[..., Any] = getattr(device_jagged, name)
    return operation


def _on_gpu(name: str) -> Callable[..., Any]:
    """Launch on the tensors' device."""

    def implementation(values: list[Tensor], *args: Any) -> Any:
        operation, device = _gpu_operation(name), values[0].device
        if device.index == torch.cuda.current_device():
            return operation(values, *args)
        with torch.cuda.device(device):
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


def _is_watched() -> bool:
    """Whether a compiler, a mode, a transform, a tracer or forward-mode gradients look at operators."""
    if _is_compiling() or _modes() or _function_modes() or _transforms() is not None or _tracer() is not None:
        return True
    return forward_ad._current_level >= 0


def is_plain(values: Tensor, total: object, first: Tensor, second: Tensor, dimensions: int = 1) -> bool:
    """Whether a call passes every check of types and shapes, and nothing about it needs PyTorch's dispatcher.

    That holds for most calls on host memory, and is found out in one function without a list, since each one more
    takes as long as a hundred ids. Of any other call the answer is no; what is wrong with it, others say.

    Args:
        values: What moves: one tensor.
        total: Rows of the result, or None.
        first: Lengths, starts or rows.
        second: Lengths or rows; may be `first`.
        dimensions: What those two must have.
    """
    return (
        values.is_cpu
        and not _is_watched()
        and type(values) is type(first) is type(second) is Tensor
        and (total is None or (type(total) is int and total >= 0))
        and first.is_cpu
        and second.is_cpu
        and first.dtype in shapes.INTEGERS
        and second.dtype in shapes.INTEGERS
        and first.dim() == second.dim() == dimensions
        and values.dim() > 0
        and not (values.requires_grad and _is_grad_enabled())
        and not values.is_conj()
        and not values.is_neg()
    )


def _is_direct(values: list[Tensor], arguments: tuple[Any, ...]) -> bool:
    """Whether nothing about a call needs PyTorch's dispatcher.

    It would see to gradients, compilers, modes, transforms (vmap, grad) and tracers; to subclasses; and to tensors that
    are the conjugate or the negative of what their memory holds.
    """
    if _is_watched():
        return False
    for argument in arguments:
        if type(argument) not in _ORDINARY:
            return False
    with_gradients = _is_grad_enabled()
    for tensor in values:
        if type(tensor) not in _ORDINARY or tensor.is_conj() or tensor.is_neg():
            return False
        if with_gradients and tensor.requires_grad:
            return False
    return True


def _refuse_tangents(name: str, values: list[Tensor]) -> None:
    """Operators in Python have no forward-mode gradient, and PyTorch would drop it without a word."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in values):
        raise NotImplementedError(
            f"{name} has no forward-mode gradient: it is linear in its values, so call it with the tangents as well"
        )


def _checked(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """For calls of the registered operator, which have not come by `freescale.kernels`."""
    check = getattr(shapes, name)

    def checked(values: list[Tensor], *args: Any) -> Any:
        check(values, *args)
        _refuse_tangents(name, values)
        return implementation(values, *args)

    return checked


def _operator(name: str, fake: Callable[..., Any], remember: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """Define an operator in both overloads; return a function that calls the one that its arguments need."""
    on_host, on_gpu = getattr(host_jagged, name), _on_gpu(name)
    for overload in (name, f"{name}.plain"):
        _library.define(overload + _SCHEMAS[name])
        _library.impl(overload, _checked(name, on_host), "CPU")
        _library.impl(overload, _checked(name, on_gpu), "CUDA")
        torch.library.register_fake(f"freescale::{overload}", fake, lib=_library)
    torch.library.register_autograd(f"freescale::{name}", backward, setup_context=remember, lib=_library)
    packet = getattr(torch.ops.freescale, name)
    differentiable, plain = packet.default, packet.plain

    def either(values: list[Tensor], *args: Any) -> Any:
        if _is_direct(values, args):
            if values[0].is_cpu:
                return on_host(values, *args)
            if values[0].is_cuda:
                return on_gpu(values, *args)
        if not _is_compiling():
            _refuse_tangents(name, values)
        if _is_grad_enabled() and True in [tensor.requires_grad for tensor in values]:
            return differentiable(values, *args)
        return plain(values, *args)

    return either


permute_jagged = _operator("permute_jagged", _fake_permute, _remember_permute, _permute_backward)
dispatch_ranges = _operator("dispatch_ranges", _fake_dispatch, _remember_dispatch, _dispatch_backward)
combine_ranges = _operator("combine_ranges", _fake_combine, _remember_dispatch, _combine_backward)
sum_ranges = _operator("sum_ranges", _fake_combine, _remember_dispatch, _combine_backward)
transpose_keyed = _operator("transpose_keyed", _fake_transpose, _remember_transpose, _transpose_backward)
