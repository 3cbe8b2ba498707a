"""Launch Triton kernels again without Triton's per-call binding, which costs more than a small copy itself.

Triton looks at every argument of every call to choose a compiled variant. The callers here know what decides the
variant, so the compiled kernel is kept under that key and later calls hand it addresses and numbers directly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.runtime.jit import TensorWrapper

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    device: int | None,
    grid: tuple[int, int, int],
    key: tuple[Any, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        kernel: A `triton.jit` function: its arguments first, then its `tl.constexpr` ones.
        device: Index of the current CUDA device; None in Triton's interpreter.
        grid: Programs in three dimensions.
        key: Whatever Triton would compile another variant for, apart from `constants`: dtypes, alignment to 16 bytes
            of every pointer that is specialised on it, which arguments are None.
        arguments: Tensors, tuples of `typed` tensors, None, or integers.
        constants: Values of the `tl.constexpr` arguments, in their order.
        num_warps: Warps a program; one number for each kernel.
    """
    key = (kernel, device, key, constants)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, *constants, num_warps=num_warps)  # None from the interpreter
    else:
        compiled[grid](*map(_address, arguments), *constants)


def typed(tensors: list[Tensor], types: list[Any]) -> tuple[Any, ...]:
    """Tensors as pointers to other words than their own."""
    return tuple(map(TensorWrapper, tensors, types))


def _address(argument: Any) -> Any:
    if isinstance(argument, Tensor | TensorWrapper):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return tuple(each.data_ptr() for each in argument)
    return argument
