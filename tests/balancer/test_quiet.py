"""Stand-ins for functions of NumPy and torch that a trainer beside the thread would feel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freescale.balancer.protocol.quiet import address_of, bytes_at, count_to, numbers_of, ones, take_columns, take_rows


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
    np.testing.assert_array_equal(ones(n), np.ones(n, np.int64), strict=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([3, -(2**63), 2**63 - 1]),
        torch.tensor([5, 7], dtype=torch.int32),
        torch.arange(12)[1:9:3],
        torch.arange(8)[3:],
        torch.empty(0, dtype=torch.int64),
    ],
)
def test_the_numbers_of_a_tensor_are_a_copy_of_them(tensor: torch.Tensor) -> None:
    numbers = numbers_of(tensor)
    np.testing.assert_array_equal(numbers, tensor.to(torch.int64).numpy().copy(), strict=True)
    before = tensor.tolist()
    tensor += 1
    assert numbers.tolist() == before


def test_a_tensor_that_is_not_in_host_memory_is_not_read() -> None:
    with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
        numbers_of(torch.empty(3, dtype=torch.int64, device="meta"))


def test_an_address_is_that_of_the_first_element() -> None:
    array = np.arange(9)[4:]
    assert bytes_at(address_of(array), 16) == array[:2].tobytes()
    assert address_of(np.empty(0, np.int64)) == 0
