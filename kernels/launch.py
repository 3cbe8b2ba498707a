"""Launch Triton kernels again without Triton's per-call binding, which costs more than a small copy itself.

Triton looks at every argument of every call to choose a compiled variant. The callers here know what decides the
variant, so the compiled kernel is kept under that key and later calls hand it addresses and numbers directly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.jit import TensorWrapper

_compiled: dict[tuple[Any, ...], Any] = {}


class Words(NamedTuple):
    """Tensors that a kernel takes as one tuple of pointers, each to words of a Triton dtype, whatever its own dtype."""

    tensors: list[Tensor]
    types: list[Any]


def launch(
    kernel: Any,
    device: int | None,
    grid: tuple[int, int, int],
    key: tuple[Any, ...],
    pointers: tuple[Tensor | Words | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        kernel: A `triton.jit` function: pointers first, then numbers, then `tl.constexpr` arguments. It must not
            specialise on its numbers.
        device: Index of the current CUDA device; None in Triton's interpreter.
        grid: Programs in three dimensions.
        key: Whatever Triton would compile another variant for, apart from `constants`: dtypes, alignment to 16 bytes
            of every pointer that is specialised on it.
        pointers: Arguments of the kernel.
        numbers: Arguments of the kernel.
        constants: Arguments of the kernel.
        num_warps: Warps a program; one number for each kernel.
    """
    key = (kernel, device, key, constants, *[pointer is None for pointer in pointers])
    compiled = _compiled.get(key)
    if compiled is None:
        wrapped = [tuple(map(TensorWrapper, *each)) if isinstance(each, Words) else each for each in pointers]
        _compiled[key] = kernel[grid](*wrapped, *numbers, *constants, num_warps=num_warps)  # None from the interpreter
        return
    addresses = [
        None
        if each is None
        else tuple([one.data_ptr() for one in each[0]])
        if isinstance(each, Words)
        else each.data_ptr()
        for each in pointers
    ]
    compiled[grid](*addresses, *numbers, *constants)
