"""Splits that come again are laid out once, and what one exchange does with its layout is nothing to the next."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from calls import calls_of

from freescale.transport import local_group
from freescale.transport.agreement import OPERATION, SEQUENCE, Comparison
from freescale.transport.errors import SizeMismatch, TransportError
from freescale.transport.exchange import Exchange, plan_all_gather, plan_all_to_all
from freescale.transport.layouts import Layouts, Splits

SENT, RECEIVED = [2, 1, 3], [0, 1, 4]


def plan(layouts: Layouts, sent: Splits = SENT, received: Splits = RECEIVED, rows: int = 6) -> Exchange:
    return plan_all_to_all(1, 3, torch.arange(rows), sent, received, None, layouts=layouts)


def test_splits_that_come_again_have_the_layout_they_had() -> None:
    layouts = Layouts(1, 3)
    first, again = plan(layouts), plan(layouts, tuple(SENT))
    assert again.layout is first.layout
    assert again.target.data_ptr() != first.target.data_ptr()
    gathered = [plan_all_gather(1, 3, torch.ones(2, 3), [1, 2, 4], None, layouts=layouts) for _ in range(2)]
    assert gathered[0].layout is gathered[1].layout
    assert gathered[0].received_at.tolist() == [0, 12, 36]
    assert gathered[0].layout is not plan_all_gather(1, 3, torch.ones(2, 2), [1, 2, 4], None, layouts=layouts).layout


def test_a_list_that_was_changed_since_is_laid_out_anew() -> None:
    layouts, sent = Layouts(1, 3), [2, 1, 3]
    assert plan(layouts, sent).sent_bytes.tolist() == [16, 0, 24]
    sent[0], sent[2] = 3, 2
    assert plan(layouts, sent).sent_bytes.tolist() == [24, 0, 16]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_and_tensors_are_read_each_time(kind: type) -> None:
    layouts, sent = Layouts(1, 3), kind(SENT)
    assert plan(layouts, sent).sent_bytes.tolist() == [16, 0, 24]
    sent[0], sent[2] = 3, 2
    assert plan(layouts, sent).sent_bytes.tolist() == [24, 0, 16]


@pytest.mark.parametrize("sent", [[2.0, 1.0, 3.0], [[2], [1], [3]], [2, True, 3.0], [2, 1]])
def test_what_is_refused_is_refused_also_after_splits_that_look_like_it(sent: list[int]) -> None:
    layouts = Layouts(1, 3)
    plan(layouts)
    with pytest.raises(ValueError, match="sent_splits must"):
        plan(layouts, sent)


def test_a_peer_left_out_of_one_exchange_is_in_the_next() -> None:
    layouts = Layouts(1, 3)
    first, second = plan(layouts), plan(layouts)
    first.skip(2)
    first.skip(0)
    assert first.sent_bytes.tolist() == first.received_bytes.tolist() == [0, 0, 0]
    for exchange in (second, plan(layouts)):
        assert exchange.sent_bytes.tolist() == [16, 0, 24]
        assert exchange.received_bytes.tolist() == [0, 0, 32]


def test_ever_new_splits_are_not_all_remembered() -> None:
    layouts = Layouts(1, 3)
    for rows in range(100):
        plan(layouts, [rows, 1, 0], rows=rows + 1)
    assert len(layouts._known) <= 8


def answer(
    comparison: Comparison, exchange: Exchange, sequence: int = 5
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Begin a comparison; returns where the others' records arrive, by now with what they say when all is well."""
    comparison.prepare(exchange, sequence)
    comparison.foresee()
    records = comparison.carried.target.numpy().view(np.int64).reshape(3, 5)
    assert comparison.silent() == [0, 2]
    said = comparison.carried.source.numpy().view(np.int64).reshape(3, 5)[:, [0, 1, 3, 2, 4]]
    records[[0, 2]] = said[[0, 2]]
    assert comparison.silent() == []
    return records


def test_a_comparison_serves_again_and_remembers_nothing() -> None:
    comparison, layouts = Comparison(1, 3), Layouts(1, 3)
    for sequence in range(3):
        exchange = plan(layouts)
        answer(comparison, exchange, sequence)
        assert comparison.outcome(exchange) is None
        assert not exchange.incomplete
        records = answer(comparison, exchange, sequence + 100)
        records[2, 2] += 1
        error = comparison.outcome(exchange)
        assert isinstance(error, SizeMismatch)
        assert str(error) == "rank 1 expected 4 rows from rank 2, got 5"
        assert exchange.sent_bytes.tolist() == [16, 0, 0]


@pytest.mark.parametrize(
    ("field", "kind"), [(SEQUENCE, TransportError), (OPERATION, TransportError), (4, SizeMismatch)]
)
def test_a_comparison_finds_what_differs(field: int, kind: type[Exception]) -> None:
    comparison, exchange = Comparison(1, 3), plan(Layouts(1, 3))
    answer(comparison, exchange)[0, field] += 1
    assert type(comparison.outcome(exchange)) is kind


def test_rows_of_another_width_are_no_matter_where_none_are_exchanged() -> None:
    comparison, exchange = Comparison(1, 3), plan(Layouts(1, 3), [0, 1, 5])
    answer(comparison, exchange)[0, 4] += 8
    assert comparison.outcome(exchange) is None


def test_an_exchange_that_comes_again_takes_fewer_calls() -> None:
    """What an exchange costs whatever its size is the number of calls: they decide below some MiB."""
    (alone,) = local_group(1)
    rows, out = torch.arange(4), torch.zeros(4, dtype=torch.int64)

    def exchange(rows: torch.Tensor) -> None:
        alone.all_to_all(rows, [4], [4], out).wait()

    counts = [calls_of(partial(exchange, rows + step)) for step in range(3)]
    assert out.tolist() == [2, 3, 4, 5]
    assert counts[1] == counts[2] < counts[0]
