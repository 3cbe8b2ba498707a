"""Launch Triton kernels again without Triton's per-call binding, which costs more than a small copy itself.

Triton looks at every argument of every call to choose a compiled variant. The callers here know what decides the
variant, so the compiled kernel is kept under that key and later calls hand it addresses and numbers directly.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import TensorWrapper

_compiled: dict[tuple[Any, ...], Any] = {}


class Words(NamedTuple):
    """Tensors that a kernel takes as one tuple of pointers, each to words of a Triton dtype, whatever its own dtype."""

    tensors: list[Tensor]
    types: list[Any]


@cache
def can_follow(device: int | None) -> bool:
    """Whether a launch on a device may start before the one before it has ended: NVIDIA's Hopper and later."""
    return device is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any,
    device: int | None,
    grid: tuple[int, int, int],
    key: tuple[Any, ...],
    pointers: tuple[Tensor | Words | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    *,
    follows: bool = False,
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
        num_warps: Warps a program.
        follows: Whether programs may start before the launch before has ended, as `can_follow` allows; they wait for it
            themselves.
    """
    key = (kernel, device, key, constants, num_warps, follows, *[pointer is None for pointer in pointers])
    compiled = _compiled.get(key)
    if compiled is None:
        wrapped = [tuple(map(TensorWrapper, *each)) if isinstance(each, Words) else each for each in pointers]
        options = {"num_warps": num_warps, "launch_pdl": follows}
        _compiled[key] = kernel[grid](*wrapped, *numbers, *constants, **options)  # None from the interpreter
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
