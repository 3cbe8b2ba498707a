"""Compiles every Triton kernel for a Hopper GPU, on a machine without one: arguments come from calls on CPU tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from freescale.kernels import (
    copy_narrow,
    copy_ranges,
    device_jagged,
    ranges,
    sum_chunks,
    sum_ranges,
    sum_tree,
    update_rows,
)
from freescale.kernels.launch import Words
from freescale.kernels.update_rows import Rule

_TYPES = {torch.int64: "i64", torch.int32: "i32", torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16"}
_TARGET = GPUTarget("cuda", 90, 32)
compiled: dict[str, int] = {}


def compile_instead(
    kernel: Any,
    _device: int | None,
    _grid: tuple[int, int, int],
    _key: tuple[Any, ...],
    pointers: tuple[Any, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    *,
    follows: bool = False,
) -> None:
    """Stand in for `launch`: compile the variant that it would run."""
    signature: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    arguments = (*pointers, *numbers, *constants)
    for place, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
        if argument is None or place >= len(pointers) + len(numbers):
            waits = name == "FOLLOWED" or (name == "FOLLOWS" and arguments[place - 1] > 0)  # as on a GPU
            signature[name], values[(place,)] = "constexpr", True if waits else argument
        elif place >= len(pointers):
            signature[name] = "fp32" if isinstance(argument, float) else "i64"
        elif isinstance(argument, Words):
            signature[name] = tuple(f"*i{word.primitive_bitwidth}" for word in argument.types)
            attributes |= {(place, i): [["tt.divisibility", 16]] for i in range(len(argument.types))}
        else:
            signature[name] = f"*{_TYPES[argument.dtype]}"
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    triton.compile(source, target=_TARGET, options={"num_warps": num_warps, "launch_pdl": follows})
    compiled[kernel.__name__] = compiled.get(kernel.__name__, 0) + 1


def main() -> None:
    for module in (copy_narrow, copy_ranges, ranges, sum_chunks, sum_ranges, update_rows):
        vars(module)["launch"] = compile_instead
    for count, length in ((100, 2000), (700, 3), (2000, 3)):  # scanned inside the copy, in one launch, in two
        lengths = torch.full((count,), length)
        total, starts = int(lengths.sum()), torch.arange(count)
        narrow = [torch.zeros(total, dtype=dtype) for dtype in (torch.uint8, torch.int32, torch.int64)]
        device_jagged.permute_jagged(narrow, lengths, starts.int(), total)
        device_jagged.permute_jagged(narrow[:1], lengths.int(), starts, total)
        device_jagged.combine_ranges(narrow, starts, lengths.int(), total)
        device_jagged.dispatch_ranges([torch.zeros(total, 128)], starts, lengths, total)
        shortest, copy_ranges.SHORTEST = copy_ranges.SHORTEST, 0
        for tensors in (narrow[1:], narrow[2:]):
            device_jagged.permute_jagged(tensors, lengths, starts.int(), total)
            device_jagged.combine_ranges(tensors, starts, lengths, total)
        copy_ranges.SHORTEST = shortest
        device_jagged.transpose_keyed([torch.zeros(total, 3), torch.zeros(total, 700)], lengths.view(4, -1))
        limits = copy_ranges.LATENT_BYTES, copy_ranges.LARGE_BYTES
        copy_ranges.LATENT_BYTES, copy_ranges.LARGE_BYTES = {}, 0
        device_jagged.dispatch_ranges(narrow, starts, lengths, total)  # as many more would
        copy_ranges.LATENT_BYTES, copy_ranges.LARGE_BYTES = limits
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        device_jagged.sum_ranges([torch.zeros(total, 5, dtype=dtype)], starts, lengths, total)
    compile_embedding_kernels()
    print(sorted(compiled.items()))


def compile_embedding_kernels() -> None:
    """Sums and updates of prioritized embeddings: every rule, weight dtype and presence of optional arguments."""
    offsets = torch.tensor([0, 2, 3])
    for targets in (None, torch.tensor([1, 0])):
        tree = sum_tree.SumTree(2, 0, [(torch.arange(3), offsets, targets)])
        sum_chunks.sum_rounds(torch.ones(3, 128), tree)
    rows, skipped = torch.tensor([3, 1]), torch.zeros(1, dtype=torch.int64)
    states = {"sgd": [], "rowwise_adagrad": [torch.zeros(4)], "adam": [torch.zeros(4, 128), torch.zeros(4, 128)]}
    for rule, state in states.items():
        for dtype in (torch.float32, torch.bfloat16):
            for scale in (None, torch.ones(1)):
                weights, gradients = torch.zeros(4, 128, dtype=dtype), torch.ones(2, 128)
                update_rows.update_rows(weights, gradients, rows, state, [1.0] * 11, scale, skipped, cast(Rule, rule))


if __name__ == "__main__":
    main()
