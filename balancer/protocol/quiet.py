"""Makes arrays without letting go of the interpreter lock, which NumPy does for some that take no time (section 3.1).

Beside a trainer that launches tiny operations, each moment without the lock lets its thread in, and costs as much as
dozens of calls: the other thread is woken, and this one has to wait for the lock. What NumPy does with up to 500
elements it does with the lock held, but for a few functions: those have a stand-in here.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_MOST_COUNTED = 1 << 14


def zeros(*shape: int) -> Int64s:
    """As `numpy.zeros`, for arrays that are small: it lets go of the lock from 1 KiB on."""
    array = np.empty(shape, np.int64)
    array.fill(0)
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
