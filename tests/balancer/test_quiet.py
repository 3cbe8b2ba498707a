"""Stand-ins for functions of NumPy that let go of the interpreter lock."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.balancer.protocol.quiet import count_to, take_columns, take_rows, zeros


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_rows_and_columns_are_those_that_indexing_takes(shape: tuple[int, int], count: int) -> None:
    random = np.random.default_rng(0)
    table = random.integers(-(2**62), 2**62, shape)
    if shape[0] or not count:
        rows = random.integers(0, max(shape[0], 1), count)
        np.testing.assert_array_equal(take_rows(table, rows), table[rows], strict=True)
    if shape[1] or not count:
        columns = random.integers(0, max(shape[1], 1), count)
        np.testing.assert_array_equal(take_columns(table, columns), table[:, columns], strict=True)


def test_what_is_taken_is_a_copy() -> None:
    table = np.arange(6).reshape(2, 3)
    take_rows(table, np.array([1]))[:] = 0
    take_columns(table, np.array([2]))[:] = 0
    assert table.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("n", [0, 3, 1 << 14, (1 << 14) + 1])
def test_counting_is_that_of_arange(n: int) -> None:
    np.testing.assert_array_equal(count_to(n), np.arange(n), strict=True)
    np.testing.assert_array_equal(zeros(n, 2), np.zeros((n, 2), np.int64), strict=True)
