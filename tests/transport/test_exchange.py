"""Arguments are checked before anything moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freescale.transport import local_group
from freescale.transport.exchange import Exchange, plan_all_gather, plan_all_to_all

from known_rows import DTYPES, make_rows, same_bytes

ROWS = torch.arange(6).reshape(3, 2)

WRONG_ALL_TO_ALL: list[tuple[dict[str, Any], str]] = [
    ({"rows": [1, 2, 3]}, "rows must be a torch.Tensor, got list"),
    ({"rows": torch.tensor(3)}, "rows must have at least one dimension"),
    ({"rows": ROWS.to("meta")}, "rows must be in host memory, got a tensor on meta"),
    ({"rows": torch.zeros(3, 2).to_sparse()}, "rows must be a plain dense tensor"),
    ({"sent_splits": [3]}, r"sent_splits must have one entry for each of the 2 ranks, got shape \(1,\)"),
    ({"sent_splits": [[1, 2]]}, "sent_splits must have one entry for each of the 2 ranks"),
    ({"sent_splits": [1.0, 2.0]}, "sent_splits must be integers, got float64"),
    ({"sent_splits": [True, True]}, "sent_splits must be integers, got bool"),
    ({"sent_splits": [4, -1]}, "sent_splits must not be negative, got -1 for rank 1"),
    ({"sent_splits": [1, 3]}, "sent_splits must add up to the 3 rows given, got 4"),
    ({"sent_splits": torch.zeros(2, device="meta")}, "sent_splits must be in host memory"),
    ({"received_splits": [2, 1]}, r"sent_splits\[0\] and received_splits\[0\] .* must be equal, got 1 and 2"),
    ({"received_splits": [1, -1]}, "received_splits must not be negative"),
    ({"out": np.zeros((2, 2))}, "out must be a torch.Tensor"),
    ({"out": torch.zeros(2, 2)}, "out must have the dtype of rows, torch.int64, got torch.float32"),
    ({"out": torch.zeros(3, 2, dtype=torch.int64)}, r"out must have shape \[2, 2\], got \[3, 2\]"),
    ({"out": torch.zeros(2, 2, dtype=torch.int64).T}, "out must be contiguous"),
    ({"out": ROWS[1:]}, "out must not share memory with rows"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ALL_TO_ALL, ids=[m for _, m in WRONG_ALL_TO_ALL])
def test_a_wrong_all_to_all_says_argument_rule_and_value(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"rows": ROWS, "sent_splits": [1, 2], "received_splits": [1, 1], "out": None}
    with pytest.raises((ValueError, TypeError), match=message):
        local_group(2)[0].all_to_all(**(arguments | change))


WRONG_ALL_GATHER: list[tuple[dict[str, Any], str]] = [
    ({"block": None}, "block must be a torch.Tensor, got NoneType"),
    ({"sizes": [2, 1]}, r"sizes\[0\] must be the rows of this rank's block, 3, got 2"),
    ({"sizes": [3, 1, 1]}, "sizes must have one entry for each of the 2 ranks"),
    ({"out": torch.zeros(6, 3, dtype=torch.int64)}, r"out must have shape \[6, 2\], got \[6, 3\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ALL_GATHER, ids=[m for _, m in WRONG_ALL_GATHER])
def test_a_wrong_all_gather_says_argument_rule_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        local_group(2)[0].all_gather(**({"block": ROWS} | change))


@given(
    rows=st.integers(0, 5),
    trailing=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_one_rank_gets_its_own_rows_back(rows: int, trailing: list[int], dtype: torch.dtype) -> None:
    transport = local_group(1)[0]
    given_rows: Tensor = make_rows(rows, rows, tuple(trailing), dtype)
    for out in (transport.all_gather(given_rows).wait(), transport.all_to_all(given_rows, [rows], [rows]).wait()):
        assert same_bytes(out, given_rows)
        assert out.numel() == 0 or out.data_ptr() != given_rows.data_ptr()


def test_a_conjugate_view_is_sent_as_its_values() -> None:
    block = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert local_group(1)[0].all_gather(block).wait().tolist() == [1 - 2j, 3 + 1j]


def exchange_of(operation: str) -> Exchange:
    if operation == "all_gather":
        return plan_all_gather(1, 3, ROWS, [2, 3, 0], None)
    return plan_all_to_all(1, 3, ROWS, [2, 1, 0], [0, 1, 4], None)


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("skipped", [None, 0], ids=["whole", "incomplete"])
def test_pieces_are_those_that_are_taken_one_by_one(operation: str, skipped: int | None) -> None:
    exchange = exchange_of(operation)
    if skipped is not None:
        exchange.skip(skipped)
    sources, targets = exchange.pieces()
    for peer in (0, 2):
        assert_same_memory(sources[peer], exchange.outgoing(peer))
        assert_same_memory(targets[peer], exchange.incoming(peer))
    assert_same_memory(sources[1], exchange.kept()[0])
    assert_same_memory(targets[1], exchange.kept()[1])


def assert_same_memory(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert len(one) == 0 or one.data_ptr() == other.data_ptr()
