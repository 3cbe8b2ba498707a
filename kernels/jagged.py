"""The public jagged operations, checked at the door (paper, section 4.2).

All are one idea: copy ranges of rows from one buffer to another. Rows are of any dtype and any trailing shape,
addressed in int64. Several tensors of one structure (ids, weights, a second feature) move in one call and, on a GPU, in
one launch. On a GPU, what lies in `lengths`, `starts` and `rows` is not checked, since that would synchronise; ranges
that leave the buffer then write nothing, and what they should have read is undefined; a row that is not there in `rows`
has a length from memory that is not its own. Gradients go backward; tangents of forward mode are refused by
NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from . import host_jagged, ops, shapes

Values = TypeVar("Values", Tensor, Sequence[Tensor])


def permute_jagged(values: Values, lengths: Tensor, rows: Tensor, total: int | None = None) -> tuple[Values, Tensor]:
    """Take rows of a jagged tensor in a new order: the paper's indexed permute.

    Without `total`, a call on CUDA tensors synchronises to learn the size of the result. The gradient of a row taken
    several times is the sum in the order of `rows`.

    Args:
        values: The rows, one after the other. Shape [lengths.sum(), ...], any dtype; or a sequence of such tensors.
        lengths: Length of each row. Shape [B], int64 or int32.
        rows: Which row comes next, from 0 to B - 1; rows may repeat or be left out. Shape [R], int64 or int32.
        total: `lengths[rows].sum()`, where the caller knows it.

    Returns:
        The chosen rows' values (a list if `values` is a sequence), shape [total, ...], and `lengths[rows]`.

    Raises:
        TypeError: `lengths` or `rows` is not of an integer type.
        ValueError: Shapes disagree; on the CPU also if numbers do.

    Example:
        >>> values, lengths = permute_jagged(torch.arange(6), torch.tensor([1, 3, 2]), torch.tensor([2, 0, 2]))
        >>> values.tolist(), lengths.tolist()
        ([4, 5, 0, 4, 5], [2, 1, 2])
    """
    if isinstance(values, Tensor) and ops.is_plain(values, total, lengths, rows):
        (only,), permuted_lengths = host_jagged.permute_jagged([values], lengths, rows, total)
        return only, permuted_lengths
    tensors = _as_list(values)
    shapes.permute_jagged(tensors, lengths, rows, total)
    moved, permuted_lengths = ops.permute_jagged(tensors, lengths, rows, total)
    return _like(values, moved), permuted_lengths


def dispatch_ranges(values: Values, starts: Tensor, lengths: Tensor, total: int | None = None) -> Values:
    """Gather ranges of rows into one contiguous buffer: the paper's ranged dispatch.

    Without `total`, a call on CUDA tensors synchronises to learn the size of the result. Ranges may overlap and repeat;
    the gradient of a row in several ranges is the sum in the order of their starts.

    Args:
        values: Shape [L, ...], any dtype; or a sequence of tensors with the same L.
        starts: First row of each range. Shape [n], int64 or int32.
        lengths: Rows of each range. Shape [n], int64 or int32.
        total: `lengths.sum()`, where the caller knows it.

    Returns:
        The ranges' rows, one range after the other. Shape [total, ...]; a list if `values` is a sequence.

    Raises:
        TypeError: `starts` or `lengths` is not of an integer type.
        ValueError: Shapes disagree; on the CPU also if a range leaves `values`.

    Example:
        >>> dispatch_ranges(torch.arange(10), torch.tensor([7, 0]), torch.tensor([2, 3])).tolist()
        [7, 8, 0, 1, 2]
    """
    if (
        isinstance(values, Tensor)
        and ops.is_plain(values, total, starts, lengths)
        and starts.numel() == lengths.numel()
    ):
        return host_jagged.dispatch_ranges([values], starts, lengths, total)[0]
    tensors = _as_list(values)
    shapes.dispatch_ranges(tensors, starts, lengths, total)
    return _like(values, ops.dispatch_ranges(tensors, starts, lengths, total))


def combine_ranges(values: Values, starts: Tensor, lengths: Tensor, size: int) -> Values:
    """Scatter contiguous pieces to their places, the reverse of `dispatch_ranges`: the paper's ranged combine.

    Never synchronises. Places that no piece covers are zero. Pieces must not overlap: checked on the CPU; on a GPU one
    of them wins.

    Args:
        values: The pieces, one after the other. Shape [lengths.sum(), ...], any dtype; or a sequence of such tensors.
        starts: Where each piece goes. Shape [n], int64 or int32.
        lengths: Rows of each piece. Shape [n], int64 or int32.
        size: Rows of the result.

    Returns:
        Shape [size, ...]; a list if `values` is a sequence.

    Raises:
        TypeError: `starts` or `lengths` is not of an integer type.
        ValueError: Shapes disagree or `size` is negative; on the CPU also if pieces overlap or leave the result.

    Example:
        >>> combine_ranges(torch.tensor([7, 8, 9]), torch.tensor([3, 0]), torch.tensor([1, 2]), size=5).tolist()
        [8, 9, 0, 7, 0]
    """
    if isinstance(values, Tensor) and ops.is_plain(values, size, starts, lengths) and starts.numel() == lengths.numel():
        return host_jagged.combine_ranges([values], starts, lengths, size)[0]
    tensors = _as_list(values)
    shapes.combine_ranges(tensors, starts, lengths, size)
    return _like(values, ops.combine_ranges(tensors, starts, lengths, size))


def transpose_keyed(values: Values, lengths: Tensor) -> tuple[Values, Tensor]:
    """Turn a keyed jagged tensor from feature-major to batch-major form: the paper's keyed transpose.

    Given the batch-major form it goes back. Never synchronises.

    Args:
        values: Shape [lengths.sum(), ...], any dtype, all of the first key first; or a sequence of such tensors.
        lengths: Length of each (key, sample). Shape [K, B], int64 or int32.

    Returns:
        The values, all of the first sample first (a list if `values` is a sequence), and lengths of shape [B, K].

    Raises:
        TypeError: `lengths` is not of an integer type.
        ValueError: Shapes disagree; on the CPU also if `lengths` does not add up to L.

    Example:
        >>> values, lengths = transpose_keyed(torch.arange(6), torch.tensor([[1, 2], [3, 0]]))
        >>> values.tolist(), lengths.tolist()
        ([0, 3, 4, 5, 1, 2], [[1, 3], [2, 0]])
    """
    if isinstance(values, Tensor) and ops.is_plain(values, None, lengths, lengths, 2):
        (only,), transposed = host_jagged.transpose_keyed([values], lengths)
        return only, transposed
    tensors = _as_list(values)
    shapes.transpose_keyed(tensors, lengths)
    moved, transposed = ops.transpose_keyed(tensors, lengths)
    return _like(values, moved), transposed


def _as_list(values: Values) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


def _like(values: Values, moved: list[Tensor]) -> Values:
    return moved[0] if isinstance(values, Tensor) else moved
