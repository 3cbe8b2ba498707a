"""Launch Triton kernels again without Triton's per-call binding, which costs more than a small copy itself.

Triton looks at every argument of every call to choose a compiled variant. The callers here know what decides the
variant, so the compiled kernel is kept under that key and later calls hand it addresses and numbers directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import TensorWrapper

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    key: tuple[Any, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        kernel: A `triton.jit` function: its arguments first, then its `tl.constexpr` ones.
        grid: Programs in three dimensions.
        key: Whatever Triton would compile another variant for, apart from `constants`: dtypes, alignment to 16 bytes
            of every pointer that is specialised on it, which arguments are None.
        arguments: Tensors, pairs (tensor, Triton dtype), tuples of such pairs, None, or integers.
        constants: Values of the `tl.constexpr` arguments, in their order.
        num_warps: Warps a program.
    """
    key = (kernel, torch.cuda.current_device() if torch.cuda.is_available() else None, num_warps, key, constants)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*map(_as_tensor, arguments), *constants, num_warps=num_warps)  # None: interpreter
    else:
        compiled[grid](*map(_as_address, arguments), *constants)


def _as_tensor(argument: Any) -> Any:
    if isinstance(argument, tuple):
        if isinstance(argument[0], Tensor):
            return TensorWrapper(*argument)
        return tuple(map(_as_tensor, argument))
    return argument


def _as_address(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        if isinstance(argument[0], Tensor):
            return argument[0].data_ptr()
        return tuple(map(_as_address, argument))
    return argument
