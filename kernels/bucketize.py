"""Group rows by the rank that owns them, keeping their order: what row-wise tables send (paper, section 4.3).

One counting pass beats scanning per bucket: owners fit in one or two bytes, and a stable radix sort of such keys is a
counting sort. The lengths per owner and sample then come from searching the sorted keys, without atomics, so few long
sequences cost no more than many short ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Buckets(NamedTuple):
    """Rows grouped by owner.

    Attributes:
        order: The rows of owner 0 as they came, then those of owner 1, …: `values[order]` is grouped. Shape [L], int64.
        lengths: Rows of each owner in each sample. Shape [num_owners, B], int64.
    """

    order: Tensor
    lengths: Tensor


def bucketize_rows(owners: Tensor, num_owners: int, lengths: Tensor | None = None) -> Buckets:
    """Group rows by owner, stably. Never synchronises.

    Args:
        owners: Owner of each row, from 0 to `num_owners - 1`. Shape [L], any integer type.
        num_owners: How many owners there are.
        lengths: Rows of each sample; None for one sample of all rows. Shape [B], int64 or int32.

    Returns:
        The grouping.

    Raises:
        TypeError: `owners` is not of an integer type.
        ValueError: `owners` is not one-dimensional or `num_owners` not positive; on the CPU also if an owner is out of
            range or `lengths` does not add up to L.

    Example:
        >>> order, lengths = bucketize_rows(torch.tensor([1, 0, 1, 1]), 2, lengths=torch.tensor([3, 1]))
        >>> order.tolist(), lengths.tolist()
        ([1, 0, 2, 3], [[1, 0], [2, 1]])
    """
    if owners.is_floating_point() or owners.is_complex() or owners.dtype == torch.bool:
        raise TypeError(f"owners must be of an integer type, got {owners.dtype}")
    if owners.dim() != 1:
        raise ValueError(f"owners must have one dimension, got shape {list(owners.shape)}")
    if num_owners < 1:
        raise ValueError(f"num_owners must be positive, got {num_owners}")
    if lengths is None:
        bounds = torch.full((1,), len(owners), dtype=torch.int64, device=owners.device)
    else:
        bounds = lengths.cumsum(0, dtype=torch.int64)
    if not owners.is_cuda:
        _check(owners, num_owners, bounds)
    grouped, order = _stable_sort(owners.to(_narrowest(num_owners)))
    return Buckets(order, _lengths_of(grouped, order, num_owners, bounds))


def _check(owners: Tensor, num_owners: int, bounds: Tensor) -> None:
    if len(owners) and not (int(owners.min()) >= 0 and int(owners.max()) < num_owners):
        least, most = int(owners.min()), int(owners.max())
        raise ValueError(f"owners must be from 0 to {num_owners - 1}, got {least} to {most}")
    total = int(bounds[-1]) if len(bounds) else 0
    if total != len(owners):
        raise ValueError(f"lengths must add up to the number of owners ({len(owners)}), got {total}")


def _narrowest(num_owners: int) -> torch.dtype:
    if num_owners <= 2**8:
        return torch.uint8
    return torch.int16 if num_owners <= 2**15 else torch.int64


def _stable_sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    if keys.is_cuda:
        grouped, order = torch.sort(keys, stable=True)
        return grouped, order
    order = torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))  # a radix sort for such keys; torch compares
    return keys.index_select(0, order), order  # a third of what an index takes there


def _lengths_of(grouped: Tensor, order: Tensor, num_owners: int, bounds: Tensor) -> Tensor:
    """Count rows per (owner, sample): owner * L + row ascends along the grouped rows, so each count is two searches."""
    size = len(order)
    first = torch.arange(num_owners, device=order.device) * size
    ascending = grouped.to(torch.int64, copy=True).mul_(size).add_(order)
    ends = torch.searchsorted(ascending, (first[:, None] + bounds).reshape(-1))
    return ends.diff(prepend=ends.new_zeros(1)).view(num_owners, len(bounds))
