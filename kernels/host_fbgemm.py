"""FBGEMM's CPU permute in place of ours, in programs that have loaded FBGEMM (paper, section 4.2).

TorchRec loads it. It is never imported from here: builds of it for CUDA do not load on machines without its libraries.
The result has the same bits either way.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

_LARGEST_BYTES = 16 * 2**20  # beyond, Arrow's allocator keeps memory that malloc would fetch anew, page by page
_WORDS = {8: torch.int64, 4: torch.int32}  # of the integers it takes no narrower ones
_OWN = (torch.int64, torch.int32, torch.float32, torch.float64)  # what it takes as it is


def is_loaded() -> bool:
    """Whether the program has imported FBGEMM."""
    return "fbgemm_gpu" in sys.modules


def serves(values: Tensor, count: int) -> bool:
    """Whether FBGEMM permutes these rows, giving `count` of them, faster than `gather_rows`."""
    if values.dtype in _OWN and values.dim() == 1:
        return is_loaded() and 0 < values.element_size() * count <= _LARGEST_BYTES
    size = row_bytes(values)
    return is_loaded() and 0 < size * count <= _LARGEST_BYTES and _word(values, size) in _WORDS


def permute_rows(values: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Tensor:
    """Rows of a jagged tensor in a new order.

    Args:
        values: Contiguous. Shape [lengths.sum(), ...], any dtype.
        lengths: Contiguous. Shape [B], int64 or int32.
        rows: Contiguous. Shape [R], int32.
        count: `lengths[rows].sum()`.

    Returns:
        Shape [count, ...].
    """
    operator: Any = torch.ops.fbgemm.permute_1D_sparse_data.default
    if values.dtype in _OWN and values.dim() == 1:
        result: Tensor = operator(rows, lengths, values, None, count)[1]
        return result
    size = row_bytes(values)
    word = _word(values, size)
    flat = values.view(-1).view(torch.uint8).view(_WORDS[word])
    per_row = size // word
    scaled = lengths.long() * per_row if per_row > 1 else lengths
    permuted: Tensor = operator(rows, scaled, flat, None, count * per_row)[1]
    return permuted.view(torch.uint8).view(values.dtype).view(count, *values.shape[1:])


def row_bytes(values: Tensor) -> int:
    """Bytes of one row."""
    return values.element_size() * math.prod(values.shape[1:])


def _word(values: Tensor, size: int) -> int:
    return math.gcd(8, size, values.data_ptr())
