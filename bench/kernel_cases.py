"""What bench.kernels measures: inputs of one jagged operation, and every way to do it (paper, section 4.2)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import bucketize_rows, combine_ranges, dispatch_ranges, permute_jagged, reference, transpose_keyed

Result = tuple[Tensor, ...]
Way = Callable[["Inputs"], Result]

SAMPLES_PER_RANK = 16
LONG_SAMPLES = 128
ROWS: dict[str, tuple[torch.dtype, int]] = {
    "int32": (torch.int32, 1),
    "int64": (torch.int64, 1),
    "fp16x128": (torch.float16, 128),
    "fp32x128": (torch.float32, 128),
}
OPERATIONS = ("permute", "dispatch", "combine", "transpose")
LENGTHS = ("uniform", "short", "lognormal", "giant")
KEYS = 16
SIZES = {
    "10 kB": 1e4,
    "100 kB": 1e5,
    "1 MB": 1e6,
    "10 MB": 1e7,
    "64 MB": 6.4e7,
}  # what moves in all, of uniform lengths
SIZED_WORLD_SIZE = 8


@dataclass(frozen=True)
class Case:
    """One operation on one kind of rows and lengths.

    Attributes:
        operation: One of OPERATIONS, or "bucketize".
        rows: A name in ROWS.
        lengths: One of LENGTHS, one of SIZES, or "long 8000": few long sequences, cut there. Short ones are uniform,
            and so are those of SIZES.
        world_size: Ranks that take part.
        mean_length: Of one sample, where lengths are not "long".
    """

    operation: str
    rows: str
    lengths: str
    world_size: int
    mean_length: int


@dataclass
class Inputs:
    """Tensors that every way may use; what it would have to compute from them counts.

    Attributes:
        values: Shape [L] or [L, 128].
        lengths: Of the packed pieces or the jagged rows. Shape [n], or [K, B] for a transpose.
        rows: Order of the result's rows. Shape [n].
        starts: First row of each range, of the source or the result. Shape [n].
        sizes: Rows of each range. Shape [n].
        total: Rows of the result.
        world_size: Owners of a bucketize.
    """

    values: Tensor
    lengths: Tensor
    rows: Tensor
    starts: Tensor
    sizes: Tensor
    total: int
    world_size: int

    def __post_init__(self) -> None:
        self.lengths32, self.rows32 = self.lengths.int().reshape(-1), self.rows.int()
        self.block_sizes = torch.full((1,), BLOCK, dtype=torch.int64, device=self.values.device)

    @cached_property
    def host_ranges(self) -> list[tuple[int, int]]:
        """Ranges as numbers, which loops get for nothing."""
        return list(zip(self.starts.tolist(), self.sizes.tolist(), strict=True))


BLOCK = 1 << 20  # rows of a table that one owner holds, where ids are bucketized


def sample_lengths(kind: str, count: int, mean: int, generator: torch.Generator) -> Tensor:
    """Lengths of `count` samples. Shape [count], int64."""
    if kind.startswith("long "):
        normal = torch.randn(count, generator=generator)
        return (3500 * normal.exp()).long().clamp(1, int(kind.removeprefix("long ")))
    if kind == "lognormal":
        weights = torch.randn(count, generator=generator).exp()
        return (weights / weights.mean() * mean).long()
    lengths = torch.randint(0, 2 * mean + 1, (count,), generator=generator)
    if kind == "giant":  # half of all rows are one sample's
        lengths //= 2
        lengths[count // 3] = count * mean // 2
    return lengths


def mean_length(size: str, rows: str) -> int:
    """Of one sample, where all together are of one of SIZES, about; 0 where not even one row of each is."""
    dtype, width = ROWS[rows]
    return round(SIZES[size] / (SAMPLES_PER_RANK * SIZED_WORLD_SIZE * dtype.itemsize * width))


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Draw the tensors of a case."""
    generator = torch.Generator().manual_seed(seed)
    count = LONG_SAMPLES if case.lengths.startswith("long") else SAMPLES_PER_RANK * case.world_size
    lengths = sample_lengths(case.lengths, count, case.mean_length, generator)
    rows = torch.randperm(count, generator=generator)
    total = int(lengths.sum())
    offsets = lengths.cumsum(0) - lengths
    starts, sizes = offsets[rows], lengths[rows]
    if case.operation == "combine":
        starts, sizes = torch.zeros_like(lengths), lengths
        starts[rows] = lengths[rows].cumsum(0) - lengths[rows]
    elif case.operation == "transpose":
        lengths = lengths.view(KEYS, count // KEYS)
        rows = torch.arange(count).view_as(lengths).t().reshape(-1)
        starts, sizes = offsets[rows], lengths.reshape(-1)[rows]
    values = _values(case, total, device, generator)
    lengths, rows, starts, sizes = (tensor.to(device) for tensor in (lengths, rows, starts, sizes))
    return Inputs(values, lengths, rows, starts, sizes, total, case.world_size)


def _values(case: Case, total: int, device: str, generator: torch.Generator) -> Tensor:
    dtype, width = ROWS[case.rows]
    if case.operation == "bucketize":
        return torch.randint(0, BLOCK * case.world_size, (total,), generator=generator).to(device)
    on_device = torch.Generator(device).manual_seed(generator.initial_seed())
    words = torch.randint(-(2**15), 2**15, (total, width), generator=on_device, device=device, dtype=torch.int32)
    values = words.to(dtype)
    return values.view(-1) if width == 1 else values


def result_bytes(inputs: Inputs) -> int:
    """Bytes that an operation reads and, once more, writes."""
    return inputs.total * math.prod(inputs.values.shape[1:]) * inputs.values.element_size()


def ways(case: Case, *, fbgemm: bool = True) -> dict[str, Way]:
    """Every way to do the operation, by name; those of loops begin with "loop", FBGEMM's with its name."""
    found = {**_PLAIN[case.operation], "ours": _OURS[case.operation]}
    if fbgemm and importlib.util.find_spec("fbgemm_gpu") is not None:
        import fbgemm_gpu  # noqa: F401 - registers torch.ops.fbgemm

        narrow = ROWS[case.rows][1] == 1
        found.update(_FBGEMM[case.operation] if narrow else _FBGEMM_WIDE)
    return found


def expected(case: Case, inputs: Inputs) -> Tensor:
    """The values that every way must produce."""
    if case.operation == "combine":
        return reference.combine_ranges(inputs.values, inputs.starts, inputs.sizes, inputs.total)
    if case.operation == "bucketize":
        return inputs.values[(inputs.values // BLOCK).sort(stable=True).indices] % BLOCK
    return reference.dispatch_ranges(inputs.values, inputs.starts, inputs.sizes)


def _loop_concatenating(inputs: Inputs) -> Result:
    """Slice sample by sample, then concatenate: the paper's words for what PyTorch users write."""
    values = inputs.values
    return (torch.cat([values[start : start + size] for start, size in inputs.host_ranges]),)


def _loop_copying(inputs: Inputs) -> Result:
    """Copy range by range into the send buffer."""
    packed, at = torch.empty_like(inputs.values), 0
    for start, size in inputs.host_ranges:
        packed[at : at + size] = inputs.values[start : start + size]
        at += size
    return (packed,)


def _loop_scattering(inputs: Inputs) -> Result:
    """Copy piece by piece to its place."""
    combined, at = torch.empty_like(inputs.values), 0
    for start, size in inputs.host_ranges:
        combined[start : start + size] = inputs.values[at : at + size]
        at += size
    return (combined,)


def _loop_bucketize(inputs: Inputs) -> Result:
    owners = inputs.values // BLOCK
    return (torch.cat([inputs.values[owners == owner] for owner in range(inputs.world_size)]) % BLOCK,)


def _row_index(inputs: Inputs, starts: Tensor, sizes: Tensor) -> Tensor:
    shifts = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes, output_size=inputs.total)
    return shifts + torch.arange(inputs.total, device=shifts.device)


def _vectorised_gather(inputs: Inputs) -> Result:
    return (inputs.values.index_select(0, _row_index(inputs, inputs.starts, inputs.sizes)),)


def _vectorised_permute(inputs: Inputs) -> Result:
    lengths = inputs.lengths.reshape(-1)
    starts = (lengths.cumsum(0) - lengths)[inputs.rows]
    sizes = lengths[inputs.rows]
    return inputs.values.index_select(0, _row_index(inputs, starts, sizes)), sizes


def _vectorised_scatter(inputs: Inputs) -> Result:
    index = _row_index(inputs, inputs.starts, inputs.sizes)
    return (torch.empty_like(inputs.values).index_copy_(0, index, inputs.values),)


def _vectorised_bucketize(inputs: Inputs) -> Result:
    order = torch.sort(inputs.values // BLOCK, stable=True).indices
    return inputs.values.index_select(0, order).remainder_(BLOCK), order


def _ours_bucketize(inputs: Inputs) -> Result:
    order, lengths = bucketize_rows(inputs.values // BLOCK, inputs.world_size, inputs.lengths)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    local = inputs.values.index_select(0, order)  # on a CPU, an index takes up to ten times as long
    return local.remainder_(BLOCK), lengths, places


def _fbgemm_permute_1d(inputs: Inputs) -> Result:
    operator: Any = torch.ops.fbgemm.permute_1D_sparse_data
    _, values, _ = operator(inputs.rows32, inputs.lengths32, inputs.values, None, inputs.total)
    return (values,)


def _fbgemm_permute_2d(inputs: Inputs) -> Result:
    operator: Any = torch.ops.fbgemm.permute_2D_sparse_data
    _, values, _ = operator(inputs.rows32, inputs.lengths32[:, None], inputs.values, None, inputs.total)
    return (values,)


def _fbgemm_flat_2d(inputs: Inputs) -> Result:
    """Wide rows as so many values: the operator takes one value a row."""
    operator: Any = torch.ops.fbgemm.permute_2D_sparse_data
    width = inputs.values.shape[1]
    lengths, flat = inputs.lengths32[:, None] * width, inputs.values.view(-1)
    _, values, _ = operator(inputs.rows32, lengths, flat, None, inputs.total * width)
    return (values.view(-1, width),)


def _fbgemm_jagged_select(inputs: Inputs) -> Result:
    operator: Any = torch.ops.fbgemm.jagged_index_select
    return (operator(inputs.values, inputs.lengths.reshape(-1), inputs.rows, inputs.total)[0],)


def _fbgemm_keyed_select(inputs: Inputs) -> Result:
    operator: Any = torch.ops.fbgemm.keyed_jagged_index_select_dim1
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(inputs.lengths32)
    count = len(inputs.lengths32)
    return (operator(inputs.values, inputs.lengths32, offsets, inputs.rows32, count, None, inputs.total)[0],)


def _fbgemm_reorder(inputs: Inputs) -> Result:
    keys, samples = inputs.lengths.shape
    cumsum: Any = torch.ops.fbgemm.asynchronous_complete_cumsum
    offsets, reordered = cumsum(inputs.lengths32), cumsum(inputs.lengths32.view(keys, samples).t().reshape(-1))
    batches = torch.arange(keys + 1, dtype=torch.int32, device=offsets.device)
    operator: Any = torch.ops.fbgemm.reorder_batched_ad_indices
    return (operator(offsets, inputs.values, reordered, batches, keys, False, inputs.total),)


def _fbgemm_bucketize(inputs: Inputs) -> Result:
    operator: Any = torch.ops.fbgemm.block_bucketize_sparse_features
    lengths, values, _, _, places = operator(
        inputs.lengths, inputs.values, False, True, inputs.block_sizes, inputs.world_size
    )
    return values, lengths, places


_LOOPS: dict[str, Way] = {"loop, cat": _loop_concatenating, "loop, copies": _loop_copying}
_PLAIN: dict[str, dict[str, Way]] = {
    "permute": {**_LOOPS, "vectorised": _vectorised_permute},
    "dispatch": {**_LOOPS, "vectorised": _vectorised_gather},
    "combine": {"loop, copies": _loop_scattering, "vectorised": _vectorised_scatter},
    "transpose": {**_LOOPS, "vectorised": _vectorised_permute},
    "bucketize": {"loop, cat": _loop_bucketize, "vectorised": _vectorised_bucketize},
}
_OURS: dict[str, Way] = {
    "permute": lambda i: permute_jagged(i.values, i.lengths, i.rows, i.total),
    "dispatch": lambda i: (dispatch_ranges(i.values, i.starts, i.sizes, i.total),),
    "combine": lambda i: (combine_ranges(i.values, i.starts, i.sizes, i.total),),
    "transpose": lambda i: transpose_keyed(i.values, i.lengths),
    "bucketize": _ours_bucketize,
}
_PERMUTES: dict[str, Way] = {
    "FBGEMM permute_1D_sparse_data": _fbgemm_permute_1d,
    "FBGEMM permute_2D_sparse_data": _fbgemm_permute_2d,
    "FBGEMM keyed_jagged_index_select_dim1": _fbgemm_keyed_select,
}
_FBGEMM: dict[str, dict[str, Way]] = {
    "permute": _PERMUTES,
    "dispatch": _PERMUTES,
    "combine": _PERMUTES,
    "transpose": {**_PERMUTES, "FBGEMM reorder_batched_ad_indices": _fbgemm_reorder},
    "bucketize": {"FBGEMM block_bucketize_sparse_features": _fbgemm_bucketize},
}
_FBGEMM_WIDE: dict[str, Way] = {
    "FBGEMM permute_2D_sparse_data, flat": _fbgemm_flat_2d,
    "FBGEMM jagged_index_select": _fbgemm_jagged_select,
}
