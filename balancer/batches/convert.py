"""Columns to and from TorchRec's keyed tensors, torch nested tensors, and padding with a mask (paper, section 2.1).

TorchRec is imported when it is asked for, never before: `import freescale.balancer` must not pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .column import Column, as_bytes

WEIGHTS = ".weights"


def import_torchrec() -> Any:
    """Import TorchRec, an extra of this package, when it is first needed.

    Raises:
        ModuleNotFoundError: It is not installed; says what to install.
    """
    try:
        import torchrec
    except ModuleNotFoundError as error:
        why = f"TorchRec's tensors need {error.name}, which is not installed"
        raise ModuleNotFoundError(f"{why}: pip install torchrec (on a CPU machine also fbgemm-gpu-cpu)") from error
    return torchrec


def keyed_tensor(
    columns: Mapping[str, Column],
    weights: Mapping[str, Column],
    batch_size: int,
    lengths_dtype: torch.dtype = torch.int64,
) -> Any:
    """Make a KeyedJaggedTensor of jagged columns of one dtype, feature-major. Copies the values.

    Raises:
        ValueError: A column is not jagged, or dtypes, trailing shapes or lengths of weights differ.
    """
    make_keyed = import_torchrec().KeyedJaggedTensor
    for name, column in columns.items():
        _check_like(name, column, next(iter(columns.values())))
    for name, column in weights.items():
        if not torch.equal(column.lengths, columns[name].lengths):
            raise ValueError(f"column {name + WEIGHTS!r} has other lengths than {name!r}")
    empty = torch.zeros(0, dtype=torch.int64)
    lengths = torch.cat([column.lengths for column in columns.values()]) if columns else empty
    parts: dict[str, Any] = {
        "values": torch.cat([column.values for column in columns.values()]) if columns else empty,
        "weights": torch.cat([weights[name].values for name in columns]) if weights else None,
        "lengths": lengths.to(lengths_dtype),
        "stride": batch_size,
    }
    if batch_size == 0:  # TorchRec 1.8 cannot take apart a tensor of several keys and no samples; hand it the parts
        parts["jt_dict"] = {
            name: jagged_tensor(column, weights.get(name), lengths_dtype) for name, column in columns.items()
        }
    return make_keyed(keys=list(columns), **parts)


def _check_like(name: str, column: Column, first: Column) -> None:
    if column.depth != 1:
        raise ValueError(f"column {name!r} is {column.spec}; a keyed tensor holds jagged columns only")
    if column.spec != first.spec:
        raise ValueError(f"column {name!r} is {column.spec}, the first one {first.spec}; a keyed tensor has one type")


def keyed_columns(keyed: Any, what: str) -> tuple[dict[str, Column], dict[str, Column]]:
    """Take a KeyedJaggedTensor apart: columns by key, and their weights by key. Views of its memory.

    Args:
        keyed: Only its values, weights, lengths and keys are read, not what it caches. Lengths that it has to compute
            from offsets are kept in it, as TorchRec does.
        what: Names the tensor in errors.

    Raises:
        ValueError: Batch size differs between keys, inverse indices, or lengths that do not fit.
    """
    if keyed.variable_stride_per_key():
        raise ValueError(f"{what} has another batch size for each key (VBE), so its samples cannot be told apart")
    if keyed.inverse_indices_or_none() is not None:
        raise ValueError(f"{what} has inverse indices; samples that share rows cannot move to different ranks")
    keys, values, weights = list(keyed.keys()), keyed.values(), keyed.weights_or_none()
    if len(set(keys)) != len(keys):
        raise ValueError(f"{what} has repeated keys: {keys}")
    lengths = keyed.lengths().to(torch.int64)
    if lengths.numel() != len(keys) * keyed.stride():
        raise ValueError(f"{what} has {lengths.numel()} lengths for {len(keys)} keys of {keyed.stride()} samples")
    by_key = lengths.view(len(keys), keyed.stride())
    sizes = by_key.sum(1).tolist()
    for part in (values, weights):
        if part is not None and len(part) != sum(sizes):
            raise ValueError(f"{what}: lengths add up to {sum(sizes)}, but there are {len(part)} rows")
    columns = _columns_of(keys, values, sizes, by_key)
    return columns, {} if weights is None else _columns_of(keys, weights, sizes, by_key)


def _columns_of(keys: list[str], values: Tensor, sizes: list[int], lengths: Tensor) -> dict[str, Column]:
    pieces = zip(keys, values.split(sizes), lengths, strict=True)
    return {key: Column(piece, (own,)) for key, piece, own in pieces}


def jagged_tensor(column: Column, weights: Column | None = None, lengths_dtype: torch.dtype = torch.int64) -> Any:
    """Make a TorchRec JaggedTensor of a jagged column. Shares its memory.

    Raises:
        ValueError: The column is not jagged, or the weights have other lengths.
    """
    make_jagged = import_torchrec().JaggedTensor
    if column.depth != 1:
        raise ValueError(f"a JaggedTensor holds a jagged column, got a {column.spec} one")
    if weights is not None and not torch.equal(weights.lengths, column.lengths):
        raise ValueError("the weights have other lengths than the values")
    return make_jagged(
        values=column.values,
        weights=None if weights is None else weights.values,
        lengths=column.lengths.to(lengths_dtype),
    )


def jagged_columns(jagged: Any) -> tuple[Column, Column | None]:
    """Take a JaggedTensor apart: its column, and its weights as another. Views of its memory."""
    levels, weights = (jagged.lengths(),), jagged.weights_or_none()
    return Column(jagged.values(), levels), None if weights is None else Column(weights, levels)


def nested_tensor(column: Column, offsets_dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a torch nested tensor of the jagged layout. Shape [B, *, ...]. Shares the memory of the values.

    Raises:
        ValueError: The column is not jagged.
    """
    if column.depth != 1:
        raise ValueError(f"a torch nested tensor holds a jagged column, got a {column.spec} one")
    return torch.nested.nested_tensor_from_jagged(column.values, column.offsets.to(offsets_dtype))


def nested_column(nested: Any, what: str) -> Column:
    """Take a torch nested tensor apart. Views of its memory, unless there are holes between its samples.

    Raises:
        ValueError: The layout is not jagged, or another dimension than the one after the batch is.
    """
    if not nested.is_nested or nested.layout is not torch.jagged:
        raise ValueError(f"{what} must be a nested tensor with layout=torch.jagged, got layout {nested.layout}")
    if nested.dim() < 2 or not isinstance(nested.shape[0], int) or isinstance(nested.shape[1], int):
        raise ValueError(f"{what} must be ragged in the dimension after the batch, got {tuple(nested.shape)}")
    if nested.lengths() is not None:
        nested = nested.contiguous()
    return Column(nested.values(), (nested.offsets().diff(),))


def padded(column: Column, padding_value: float, max_length: int | None) -> tuple[Tensor, Tensor]:
    """Pad a jagged column to one length. Synchronises when no length is given.

    Returns:
        Padded values, shape [B, T, ...], and which of them are real, shape [B, T], bool.

    Raises:
        ValueError: The column is not jagged, max_length is negative or shorter than the longest sample.
    """
    if column.depth != 1:
        raise ValueError(f"only a jagged column can be padded, got a {column.spec} one")
    lengths = column.lengths
    longest = int(lengths.max()) if len(lengths) else 0
    if max_length is None:
        max_length = longest
    if max_length < longest:
        raise ValueError(f"max_length must be at least the longest sample, {longest}, got {max_length}")
    mask = torch.arange(max_length, device=column.device) < lengths[:, None]
    shape = (*mask.shape, *column.values.shape[1:])
    out = torch.empty(shape, dtype=column.values.dtype, device=column.device).fill_(padding_value)
    # rows move as bytes: not every dtype has an indexed read or write
    as_bytes(out.flatten(0, 1))[mask.flatten()] = as_bytes(column.values)
    return out, mask


def padded_column(values: Tensor, mask: Tensor, what: str) -> Column:
    """Make a jagged column of the real entries of padded values. Copies.

    Args:
        values: Shape [B, T, ...].
        mask: True where an entry is real. Shape [B, T], bool. Real entries need not come first; their order is kept.
        what: Names the values in errors.

    Raises:
        ValueError: Shapes do not fit, or the mask is not bool.
    """
    if mask.dtype is not torch.bool:
        raise ValueError(f"{what}: mask must be bool (true where an entry is real), got {mask.dtype}")
    if mask.dim() != 2 or values.shape[:2] != mask.shape:
        shapes = f"{list(values.shape[:2])}, got {list(mask.shape)}"
        raise ValueError(f"{what}: mask must have the first two dimensions of the values, {shapes}")
    rows = as_bytes(values.contiguous().flatten(0, 1))[mask.flatten()]
    row_shape = values.shape[2:]
    real = rows.view(values.dtype).view(-1, *row_shape) if rows.numel() else values.new_empty(0, *row_shape)
    return Column(real, (mask.sum(1),))
