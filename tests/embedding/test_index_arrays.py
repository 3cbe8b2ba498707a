"""Index arrays made in one call are those that NumPy makes step by step; compiled or not, they are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freescale.embedding import one_call
from freescale.embedding.forms import find_occurrences
from freescale.embedding.index_arrays import call_arrays, gradient_arrays, occurrences, partition, parts, tree_rounds
from freescale.kernels.sum_tree import plan_tree


@pytest.fixture(params=["compiled", "operation by operation"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Decorates a function, with TorchScript or without."""
    if request.param != "compiled":
        monkeypatch.setattr(one_call, "_compiled", lambda function: function)
    return lambda function: one_call.one_call(getattr(function, "__wrapped__", function))


@pytest.mark.parametrize("offset", [0, 2**33], ids=["narrow", "wide"])
def test_sorting_finds_what_numpy_finds(offset: int) -> None:
    rng = np.random.default_rng(5)
    for size in (0, 1, 3, 500):
        keys = rng.integers(0, 40, size) + offset
        found = find_occurrences(keys)
        distinct, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        assert np.array_equal(found.keys, distinct)
        assert np.array_equal(found.inverse, inverse)
        assert np.array_equal(found.counts, counts)
        assert np.array_equal(found.order, np.argsort(keys, kind="stable"))


@pytest.mark.parametrize("placed", [False, True])
def test_rounds_are_those_of_the_tree(placed: bool, made: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(6)
    rounds_of = made(tree_rounds)
    for most in (1, 3, 40, 33, 3000):
        counts = rng.integers(0, most + 1, 30)
        order, rows = rng.permutation(int(counts.sum())), rng.permutation(30) if placed else None
        expected = plan_tree(order, counts, rows)
        found: tuple[list[Tensor], int] = rounds_of(
            torch.from_numpy(order), torch.from_numpy(counts), None if rows is None else torch.from_numpy(rows)
        )
        arrays = [each for summands in expected.rounds for each in summands if each is not None]
        assert found[1] == expected.num_scratch
        assert [each.tolist() for each in found[0]] == [each.tolist() for each in arrays]


def test_rows_part_into_early_and_late_ones_in_order() -> None:
    rng = np.random.default_rng(7)
    for sent, received in (([5, 0, 7], [3, 9, 0]), ([0, 0, 0], [0, 2, 0]), ([4, 1, 1], [0, 0, 0])):
        late, late_rows = rng.random(sum(sent)) < 0.5, rng.random(sum(received)) < 0.5
        rows = rng.permutation(sum(received))
        tensors = [torch.from_numpy(np.asarray(each)) for each in (late, late_rows, rows, sent, received)]
        place, early, later, asked, served = parts(*tensors)
        assert np.array_equal(np.argsort(place.numpy()), [*np.flatnonzero(~late), *np.flatnonzero(late)])
        assert early.tolist() == rows[~late_rows].tolist()
        assert later.tolist() == rows[late_rows].tolist()
        assert asked.tolist() == [int(each.sum()) for each in np.split(late, np.cumsum(sent)[:-1])]
        assert served.tolist() == [int(each.sum()) for each in np.split(late_rows, np.cumsum(received)[:-1])]


def test_urgent_and_deferred_gradients_are_apart() -> None:
    rng = np.random.default_rng(8)
    sent, received = np.array([5, 0, 7]), np.array([6, 4, 5])
    urgent, urgent_of_row = rng.random(12) < 0.4, rng.random(9) < 0.4
    rows = np.concatenate([np.sort(rng.choice(9, count, replace=False)) for count in received])
    place, bits = rng.permutation(12), urgent_of_row[rows]
    tensors = [torch.from_numpy(each) for each in (urgent, bits, rows, sent, received, place)]
    now, num_now, later, num_later = gradient_arrays(*tensors)
    assert (num_now, num_later) == (0, 0)
    for found, chosen, chosen_rows in ((now, urgent, bits), (later, ~urgent, ~bits)):
        picked = rows[chosen_rows]
        assert found[0].tolist() == [int(each.sum()) for each in np.split(chosen, np.cumsum(sent)[:-1])]
        assert found[1].tolist() == [int(each.sum()) for each in np.split(chosen_rows, np.cumsum(received)[:-1])]
        assert found[2].tolist() == place[chosen].tolist()
        assert found[3].tolist() == np.unique(picked).tolist()
        assert found[4].tolist() == np.argsort(picked, kind="stable").tolist()
        assert np.diff(found[5]).tolist() == np.unique(picked, return_counts=True)[1].tolist()


@pytest.mark.parametrize("function", [occurrences, parts, call_arrays, gradient_arrays])
def test_all_of_it_is_compiled(function: Any) -> None:
    assert isinstance(one_call._compiled(function.__wrapped__), torch.jit.ScriptFunction)


def test_nothing_is_parted() -> None:
    place, without = partition(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    assert (len(place), without) == (0, 0)
