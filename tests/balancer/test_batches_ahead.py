"""Trainers that take batches ahead, and those that try an iterator before they use it: no sample is lost or twice."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from freescale.balancer import BalancedLoader, WorldSamples, balance
from freescale.transport import Transport, connect

from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")

Batch = dict[str, Tensor]
STEPS = (5, 3)  # of each rank


class Rows(Dataset[Batch]):
    """Eight samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        return {"length": torch.tensor(index)}


def make(transport: Transport) -> BalancedLoader[Batch]:
    """A loader of batches of two samples, whose numbers say rank and place."""
    ids = [torch.arange(2) + 2 * step + 1000 * transport.rank for step in range(STEPS[transport.rank])]
    batches = [{"id": each, "length": torch.tensor([40, 3])} for each in ids]
    return balance(batches, transport, "length")


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_what_was_taken_ahead_and_not_trained_on_comes_again(ahead: int, stop: int) -> None:
    def run(transport: Transport) -> list[int]:
        pairs = make(transport).with_loss_scale()
        waiting, trained = iter(pairs), list[int]()
        taken = list(islice(waiting, ahead))
        for _ in range(stop):
            taken += islice(waiting, 1)
            trained += taken.pop(0)[0]["id"].tolist()
            pairs.trained()
        state = pairs.state_dict()
        again = make(transport)
        again.load_state_dict(state)
        if stop == max(STEPS):  # the state of an epoch that ended begins the next one
            assert state["epoch"] == (1 if ahead else 0)
            return trained
        return trained + [number for batch in again for number in batch["id"].tolist()]

    seen = sorted(number for rank in run_in_threads(2, run) for number in rank)
    assert seen == [*range(10), *range(1000, 1006)]


def test_an_iterator_that_is_only_tried_leaves_a_loaded_state_as_it_is() -> None:
    def run(transport: Transport) -> list[int]:
        loader = make(transport)
        first = next(iter(loader))["id"].tolist()
        again = make(transport)
        again.load_state_dict(loader.state_dict())
        iter(again)  # Lightning does so before it trains
        iter(again.with_loss_scale())
        again.with_reports()
        assert again.state_dict()["step"] == 1
        return first + [number for batch in again for number in batch["id"].tolist()]

    assert sorted(n for rank in run_in_threads(2, run) for n in rank) == [*range(10), *range(1000, 1006)]


def test_a_loaded_state_is_used_once() -> None:
    loader = balance([{"length": torch.tensor([n])} for n in range(4)], connect("local"), "length")
    next(iter(loader))
    again = balance(loader.dataloader, connect("local"), "length")
    again.load_state_dict(loader.state_dict())
    assert [int(batch["length"]) for batch in again] == [1, 2, 3]
    assert [int(batch["length"]) for batch in again] == [0, 1, 2, 3]
    again.load_state_dict(loader.state_dict())
    next(iter(again))
    assert [int(batch["length"]) for batch in again] == [0, 1, 2, 3]


class Counting:
    """A partitioner that learns: how many plans it has made."""

    def __init__(self) -> None:
        self.num_made, self.seen = 0, list[int]()
        self.has_made = threading.Event()

    def __call__(self, world: WorldSamples) -> Tensor:
        self.seen.append(self.num_made)
        self.num_made += 1
        self.has_made.set()
        return world.rank

    def state_dict(self) -> dict[str, int]:
        return {"made": self.num_made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_made = state["made"]


def test_what_a_partitioner_learns_of_an_iterator_that_is_only_tried_is_forgotten() -> None:
    batches, partitioner = [{"length": torch.tensor([n])} for n in range(4)], Counting()
    loader = balance(batches, connect("local"), "length", Counting(), prefetch=1)
    next(iter(loader))
    again = balance(batches, connect("local"), "length", partitioner, prefetch=1)
    again.load_state_dict(loader.state_dict())
    tried = iter(again)
    assert partitioner.has_made.wait(60)
    assert [int(batch["length"]) for batch in again] == [1, 2, 3]
    assert partitioner.seen[-3:] == [1, 2, 3]
    del tried


def test_a_state_that_is_loaded_takes_the_place_of_what_was_ahead() -> None:
    loader = balance([{"length": torch.tensor([n])} for n in range(6)], connect("local"), "length")
    begin, pairs = loader.state_dict(), loader.with_loss_scale()
    ahead = list(islice(iter(pairs), 4))
    pairs.trained()
    assert (len(ahead), pairs.state_dict()["step"]) == (4, 1)
    loader.load_state_dict(begin)
    assert pairs.state_dict()["step"] == 0


def test_batches_may_be_taken_ahead_over_the_end_of_an_epoch() -> None:
    loader = balance([{"length": torch.tensor([n])} for n in range(4)], connect("local"), "length")
    pairs = loader.with_loss_scale()
    waiting = (pair for _ in range(2) for pair in pairs)
    ahead, places = deque(islice(waiting, 2)), list[tuple[int, int]]()
    while ahead:
        ahead.extend(islice(waiting, 1))
        ahead.popleft()
        pairs.trained()
        state = pairs.state_dict()
        places.append((state["epoch"], state["step"]))
    assert places == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


def test_an_epoch_that_is_only_looked_at_does_not_count_as_ahead() -> None:
    loader = balance([{"length": torch.tensor([n])} for n in range(4)], connect("local"), "length")
    pairs = loader.with_loss_scale()
    assert len(list(pairs)) == 4
    next(iter(pairs))
    pairs.trained()
    assert (pairs.state_dict()["epoch"], pairs.state_dict()["step"]) == (1, 1)


def test_an_epoch_of_pairs_begins_with_its_first_batch() -> None:
    started = []

    class Watched(list[Batch]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            started.append(True)
            return super().__iter__()

    pairs = balance(Watched([{"length": torch.tensor([1])}]), connect("local"), "length").with_loss_scale()
    tried = iter(pairs)
    assert not started
    next(tried)
    assert started


def test_calling_trained_too_often_or_never_is_told() -> None:
    batches = [{"length": torch.tensor([1])}] * 300
    pairs = balance(batches, connect("local"), "length").with_loss_scale()
    with pytest.raises(ValueError, match="more often than batches were handed out"):
        pairs.trained()
    for _ in pairs:
        pass
    with pytest.raises(ValueError, match=r"call trained\(\) after each step"):
        pairs.state_dict()
    for _ in pairs:  # another epoch
        pairs.trained()
    assert pairs.state_dict()["epoch"] == 2


def test_a_shuffling_dataloader_is_refused_ahead_too() -> None:
    shuffled: DataLoader[Batch] = DataLoader(Rows(), batch_size=2, shuffle=True)
    pairs = balance(shuffled, connect("local"), "length").with_loss_scale()
    for _ in islice(pairs, 2):
        pairs.trained()
    with pytest.raises(ValueError, match="StatefulDataLoader"):
        pairs.state_dict()
