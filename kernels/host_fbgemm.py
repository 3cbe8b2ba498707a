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


def is_loaded() -> bool:
    """Whether the program has imported FBGEMM."""
    return "fbgemm_gpu" in sys.modules


def serves(values: Tensor, count: int) -> bool:
    """Whether FBGEMM permutes these rows, giving `count` of them, faster than `gather_ranges`."""
    row_bytes = values.element_size() * math.prod(values.shape[1:])
    return is_loaded() and 0 < row_bytes * count <= _LARGEST_BYTES and _word(values, row_bytes) in _WORDS


def permute_rows(values: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Tensor:
    """Rows of a jagged tensor in a new order.

    Args:
        values: Contiguous. Shape [lengths.sum(), ...], any dtype.
        lengths: Shape [B], int64.
        rows: Shape [R], int32.
        count: `lengths[rows].sum()`.

    Returns:
        Shape [count, ...].
    """
    row_bytes = values.element_size() * math.prod(values.shape[1:])
    word = _word(values, row_bytes)
    flat = values.view(-1).view(torch.uint8).view(_WORDS[word])
    per_row = row_bytes // word
    operator: Any = torch.ops.fbgemm.permute_1D_sparse_data
    _, permuted, _ = operator(rows, lengths * per_row if per_row > 1 else lengths, flat, None, count * per_row)
    result: Tensor = permuted.view(torch.uint8).view(values.dtype).view(count, *values.shape[1:])
    return result


def _word(values: Tensor, row_bytes: int) -> int:
    return math.gcd(8, row_bytes, values.data_ptr())
