"""Makes arrays in ways that a trainer beside this thread feels less than the usual ones (section 3.1).

Beside a trainer that launches tiny operations, each moment without the interpreter lock lets its thread in, and costs
as much as dozens of calls: the other thread is woken, and this one has to wait for the lock. What NumPy does with up to
500 elements it does with the lock held, but for a few functions: those have a stand-in here.

And a core that has slept for most of a step has to fetch anew what it runs. The first call of a function, however
small, takes ten times as long as the next one, or more where it goes through torch's dispatcher: fewer kinds of calls
help more than fewer calls.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64s = NDArray[np.int64]

_MOST_COUNTED = 1 << 14
# As `ctypes.string_at`, without its Python wrapper.
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def address_of(array: NDArray[Any]) -> int:
    """Where a contiguous array begins; 0 without elements. As `__array_interface__` says among much else."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0


def numbers_of(tensor: Tensor) -> Int64s:
    """A copy of an integer tensor of one dimension in host memory, without torch's dispatcher. Not to be written to."""
    if tensor.dtype is torch.int64 and tensor.is_cpu and tensor.is_contiguous():
        return np.frombuffer(bytes_of(tensor), np.int64)
    return tensor.numpy().astype(np.int64)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor in host memory.

    A tensor that wraps others, as the result of a functional collective does, has no memory of its own and says that
    it begins at 0: torch knows where the numbers are, or says that it does not.
    """
    at, size = tensor.data_ptr(), tensor.nbytes
    # Seen as bytes, since NumPy lacks some types of torch.
    return bytes_at(at, size) if at or not size else tensor.view(torch.uint8).numpy().tobytes()


def ones(n: int) -> Int64s:
    """As `numpy.ones`, which makes two more calls in Python."""
    array = np.empty(n, np.int64)
    array.fill(1)
    return array


def count_to(n: int) -> Int64s:
    """As `numpy.arange`, which always lets go of the lock. Not to be written to."""
    return _COUNTED[:n] if n <= _MOST_COUNTED else np.arange(n)


def take_rows(table: Int64s, rows: Int64s) -> Int64s:
    """As `table[rows]`, which always lets go of the lock: each row of a contiguous table is one item here."""
    words = table.shape[1]
    if not words:
        return table[rows]
    return table.view(_row_of(words))[:, 0][rows].view(np.int64).reshape(-1, words)


@cache
def _row_of(words: int) -> np.dtype[np.void]:
    return np.dtype((np.void, 8 * words))


def take_columns(table: Int64s, columns: Int64s) -> Int64s:
    """As `table[:, columns]`, which always lets go of the lock, for a contiguous table."""
    num_rows, width = table.shape
    taken: Int64s = table.reshape(-1)[(count_to(num_rows) * width).reshape(-1, 1) + columns]
    return taken


_COUNTED = np.arange(_MOST_COUNTED)
_COUNTED.flags.writeable = False
