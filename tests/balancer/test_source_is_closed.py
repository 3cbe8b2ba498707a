"""A generator of batches that the loop leaves early is closed, so that its files are; what else was given is not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from freescale.balancer import Column, JaggedBatch, balance
from freescale.transport import connect


class Batches:
    """Batches without end; notes when a generator of them is closed."""

    def __init__(self) -> None:
        self.num_closed = 0
        self.made: list[Iterator[JaggedBatch]] = []  # what is kept is not closed for lack of users

    def __iter__(self) -> Iterator[JaggedBatch]:
        self.made.append(self._batches())
        return self.made[-1]

    def _batches(self) -> Iterator[JaggedBatch]:
        try:
            while True:
                lengths = torch.tensor([1, 2])
                yield JaggedBatch({"uih": Column(torch.arange(3), (lengths,))})
        finally:
            self.num_closed += 1


def test_a_generator_is_closed_when_the_loop_is_left() -> None:
    source = Batches()
    loader = balance(source, connect("local"), "uih")
    for step, _ in enumerate(loader):
        if step == 2:
            break
    loader.close()
    assert source.num_closed == 1


class Kept:
    """An iterator of the user's own, which a source gives again and again."""

    closed = False

    def __iter__(self) -> Kept:
        return self

    def __next__(self) -> JaggedBatch:
        return JaggedBatch({"uih": Column(torch.arange(3), (torch.tensor([1, 2]),))})

    def close(self) -> None:
        self.closed = True


class Given:
    def __init__(self) -> None:
        self.kept = Kept()

    def __iter__(self) -> Iterator[JaggedBatch]:
        return self.kept


def test_an_iterator_of_the_users_own_is_left_open() -> None:
    source = Given()
    loader = balance(source, connect("local"), "uih")
    next(iter(loader))
    loader.close()
    assert not source.kept.closed
