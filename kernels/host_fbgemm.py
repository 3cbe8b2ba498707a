"""FBGEMM's CPU permute in place of ours, in programs that have loaded FBGEMM (paper, section 4.2).

TorchRec loads it. It is never imported from here: builds of it for CUDA do not load on machines without its libraries.
The result has the same bits either way.

Ranges anywhere are a permute, too: of the pieces that lie between the ranges' beginnings and ends, every other one is
taken. The pieces that are left out may be shorter than nothing, since FBGEMM only adds them up.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import host_rows
from .host_checks import Integers

_LARGEST_BYTES = 16 * 2**20  # beyond, Arrow's allocator keeps memory that malloc would fetch anew, page by page
_WORDS = {8: torch.int64, 4: torch.int32}  # of the integers it takes no narrower ones
_OWN = (torch.int64, torch.int32, torch.float32)  # what it takes as it is; doubles only in some versions
_MOST_NARROW = 2**31 - 1  # rows up to which it adds up lengths of 32 bits, in as many


def is_loaded() -> bool:
    """Whether the program has imported FBGEMM, to the end: another thread may be at it."""
    return bool(_seen) or _look()


_seen: list[str] = []  # the name of FBGEMM's module, once it was there: a program does not lose it again


def _look() -> bool:
    if "fbgemm_gpu" in sys.modules and hasattr(torch.ops.fbgemm, "permute_1D_sparse_data"):
        _seen.append("fbgemm_gpu")
    return bool(_seen)


def serves(values: list[Tensor], count: int) -> bool:
    """Whether FBGEMM permutes these rows, giving `count` of each tensor's, faster than anything else."""
    if not is_loaded():
        return False
    for tensor in values:
        if tensor.dtype in _OWN and tensor.dim() == 1:
            if not 0 < count * tensor.element_size() <= _LARGEST_BYTES:
                return False
        else:
            size = host_rows.row_bytes(tensor)
            if not 0 < count * size <= _LARGEST_BYTES or _word(tensor, size) not in _WORDS:
                return False
            if size >= host_rows.WIDE and host_rows.serves([tensor], 0, count):
                return False
    return True


def stretches(starts: Integers, lengths: Integers, ends: Integers) -> Tensor:
    """Lengths of the pieces that `gather_rows` leaves out and takes in turn.

    Args:
        starts: First row of each range. Shape [n], n > 0.
        lengths: Rows of each range. Shape [n].
        ends: `starts + lengths`. Shape [n].

    Returns:
        From row 0 to the first range, the first range, from its end to the second, … Shape [2n], int64.

    Example:
        >>> stretches(np.array([7, 0]), np.array([2, 3]), np.array([9, 3])).tolist()
        [7, 2, -9, 3]
    """
    n = lengths.size
    woven = np.empty(2 * n, dtype=np.int64)
    woven[1::2] = lengths
    woven[0] = starts[0]
    np.subtract(starts[1:], ends[:-1], out=woven[2::2])
    return torch.from_numpy(woven)


def gather_rows(values: Tensor, pieces: Tensor, count: int) -> Tensor:
    """Ranges of rows, one after the other.

    Args:
        values: Contiguous. Shape [L, ...], any dtype that `serves` accepts.
        pieces: What `stretches` says of the ranges. Shape [2n], int64.
        count: Rows of all ranges.

    Returns:
        Shape [count, ...].
    """
    return permute_rows(values, pieces, _every_other(pieces.shape[0] // 2), count)[0]


@functools.lru_cache(maxsize=8)
def _every_other(n: int) -> Tensor:
    return torch.arange(1, 2 * n, 2, dtype=torch.int32)


def permute_rows(values: Tensor, lengths: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Rows of a jagged tensor in a new order.

    Args:
        values: Contiguous. Shape [lengths.sum(), ...], any dtype that `serves` accepts.
        lengths: Contiguous. Shape [B], int64 or int32.
        rows: Contiguous. Shape [R], int32.
        count: `lengths[rows].sum()`.

    Returns:
        The rows' values, shape [count, ...], and `lengths[rows]` where that is known without further work.
    """
    permute, as_given = _operator(), True
    if lengths.dtype is not torch.int64 and values.shape[0] > _MOST_NARROW:
        lengths, as_given = lengths.long(), False
    if values.dtype in _OWN and values.dim() == 1:
        permuted_lengths, permuted, _ = permute(rows, lengths, values, None, count)
        return permuted, permuted_lengths if as_given else None
    size = host_rows.row_bytes(values)
    word = _word(values, size)
    flat = values.view(-1).view(_WORDS[word])
    per_row = size // word
    scaled = lengths.long() * per_row if per_row > 1 else lengths
    permuted = permute(rows, scaled, flat, None, count * per_row)[1]
    return permuted.view(values.dtype).view(count, *values.shape[1:]), None


@functools.cache
def _operator() -> Any:
    """FBGEMM's operator, without what torch puts around it for Python, which takes a tenth of a short call."""
    overload: Any = torch.ops.fbgemm.permute_1D_sparse_data.default
    return getattr(overload, "_op", overload)


def _word(values: Tensor, size: int) -> int:
    # Torch views bytes as wider words only from a multiple of such a word in the storage.
    return math.gcd(8, size, values.data_ptr(), values.storage_offset() * values.element_size())
