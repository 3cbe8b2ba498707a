"""Sums of rows with repeats in a tree that only a row's own occurrences decide: gradients of lookups (section 3.2).

The sum of one row must not depend on what else is in the batch, or a deferred update would round differently from an
immediate one. So occurrences are added in order in chunks of 32, the sums of chunks again in chunks of 32, and so on:
a row of 30,000 occurrences takes three rounds, and no round adds more than 32 numbers one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

CHUNK = 32


@dataclass(frozen=True, eq=False)
class TreeArrays:
    """One round after the other, as index arrays in host memory; see `SumTree`."""

    size: int
    num_scratch: int
    rounds: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]]


@dataclass(frozen=True, eq=False)
class SumTree:
    """Which rows are added to which, on the device where the sums are taken.

    Attributes:
        size: Rows of the result.
        num_scratch: Rows of intermediate sums.
        rounds: Each round's summands (rows of the values in the first round, of result and scratch after it), where
            each chunk begins in them and, last, where they end, and where each chunk's sum goes (None: chunk i to row
            i). Shapes [n], [chunks + 1], [chunks], int64.
    """

    size: int
    num_scratch: int
    rounds: list[tuple[Tensor, Tensor, Tensor | None]]


def plan_tree(
    order: NDArray[np.int64],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64] | None = None,
    most: int | None = None,
) -> TreeArrays:
    """Lay out the rounds.

    Args:
        order: Rows of the values: all summands of the first sum in their order, then of the second, … Shape [n].
        offsets: Where each sum's summands begin in `order`, and where the last ones end. Shape [size + 1].
        rows: Where in the result each sum goes; None: in this order. Shape [size].
        most: No sum has more summands than that; None: not known.

    Returns:
        The rounds, in host memory.

    Example:
        >>> tree = plan_tree(np.array([2, 0, 1]), np.array([0, 2, 2, 3]))
        >>> tree.size, len(tree.rounds)
        (3, 1)
    """
    size, num_scratch = len(offsets) - 1, 0
    rounds: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]] = []
    while most is None or most > CHUNK:
        counts = offsets[1:] - offsets[:-1]
        hot = (counts > CHUNK).nonzero()[0]
        if not len(hot):
            break
        rows = np.arange(size) if rows is None else rows
        chunks = -(-counts[hot] // CHUNK)
        ends = chunks.cumsum()
        scratch = np.arange(size + num_scratch, size + num_scratch + int(ends[-1]))
        rounds.append((order, *_split_hot(offsets, rows, hot, chunks, ends, scratch)))
        order, rows, offsets = scratch, rows[hot], np.concatenate([[0], ends])
        num_scratch += len(scratch)
    return TreeArrays(size, num_scratch, [*rounds, (order, offsets, rows)])


def _split_hot(
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    hot: NDArray[np.int64],
    chunks: NDArray[np.int64],
    ends: NDArray[np.int64],
    scratch: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets and targets when sums at `hot` are made of so many chunks each, whose sums go to `scratch`.

    There are few such sums, so their further chunks are inserted, and nothing is repeated for all others.
    """
    firsts = ends - chunks
    turn = np.arange(len(scratch)) - firsts.repeat(chunks)
    further = turn.nonzero()[0]
    inserted = hot.repeat(chunks - 1) + np.arange(1, len(further) + 1)
    is_old = np.ones(len(offsets) + len(further), dtype=np.bool_)
    is_old[inserted] = False
    old = is_old.nonzero()[0]
    new_offsets, new_rows = np.empty(len(is_old), dtype=np.int64), np.empty(len(is_old) - 1, dtype=np.int64)
    new_offsets[old], new_rows[old[:-1]] = offsets, rows
    new_offsets[inserted] = (offsets[hot].repeat(chunks) + turn * CHUNK)[further]
    new_rows[inserted] = scratch[further]
    new_rows[old[hot]] = scratch[firsts]
    return new_offsets, new_rows


def sum_tree(values: Tensor, tree: SumTree) -> Tensor:
    """Add up rows of `values` as a tree says, in float32.

    Never synchronises. The same bits for a row whatever else is summed.

    Args:
        values: Shape [L, D], float32.
        tree: On the device of `values`.

    Returns:
        The sums; zero for rows without summands. Shape [tree.size, D], float32.

    Raises:
        ValueError: `values` is not a float32 matrix.

    Example:
        >>> arrays = plan_tree(np.array([2, 0, 1]), np.array([0, 2, 2, 3]))
        >>> rounds = [(torch.from_numpy(i), torch.from_numpy(o), None) for i, o, _ in arrays.rounds]
        >>> tree = SumTree(arrays.size, 0, rounds)
        >>> sum_tree(torch.tensor([[1.0], [2.0], [4.0]]), tree).tolist()
        [[5.0], [0.0], [2.0]]
    """
    if values.dim() != 2 or values.dtype != torch.float32:
        raise ValueError(f"values must be a float32 matrix, got {values.dtype} of shape {list(values.shape)}")
    values = values.contiguous()
    if len(values) == 0 or tree.size == 0:
        return values.new_zeros((tree.size, values.shape[1]))
    if values.is_cuda:
        from .sum_chunks import sum_rounds

        return sum_rounds(values, tree)
    (index, offsets, targets), *later = tree.rounds
    sums = _sum_chunks(values, index, offsets)
    if targets is None:
        return sums
    out = values.new_empty((tree.size + tree.num_scratch, values.shape[1]))
    out.index_copy_(0, targets, sums)
    for index, offsets, targets in later:
        assert targets is not None, "only the first round may fill all rows in order"
        out.index_copy_(0, targets, _sum_chunks(out, index, offsets))
    return out[: tree.size]


def _sum_chunks(values: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """Torch's sum of bags adds rows in order, each bag by itself, on all cores."""
    return functional.embedding_bag(index, values, offsets[:-1], mode="sum")
