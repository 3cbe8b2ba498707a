"""Batches whose samples can be told apart, for loaders over ranks that are threads."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.balancer import (
    JaggedBatch,
    balance,
)
from freescale.balancer.batches.batch import Column
from freescale.transport import Transport

from rank_threads import run_in_threads


def batch_of(rank: int, step: int, size: int) -> dict[str, Any]:
    """Samples that can be told apart, with one jagged column made of the sample's id."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    lengths = torch.randint(0, 60, (size,), generator=generator)
    ids = torch.arange(size) + 10_000 * step + 10_000_000 * rank
    columns = {"id": Column(ids), "uih": Column(ids.repeat_interleave(lengths), (lengths,))}
    return {"features": JaggedBatch(columns, size), "label": ids.to(torch.float32)}


class Batches:
    """A plain loader: some batches of some size, the same each epoch."""

    def __init__(self, rank: int, num_batches: int, size: int = 8) -> None:
        self.rank, self.num_batches, self.size = rank, num_batches, size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (batch_of(self.rank, step, self.size) for step in range(self.num_batches))

    def __len__(self) -> int:
        return self.num_batches


def ids_of(batch: dict[str, Any]) -> list[int]:
    """The ids in a batch, after checking that each sample's parts still belong together."""
    features = batch["features"]
    lengths = features["uih"].levels[0]
    ids: Tensor = features["id"].values
    assert torch.equal(features["uih"].values, ids.repeat_interleave(lengths))
    assert torch.equal(batch["label"], ids.to(torch.float32))
    return [int(i) for i in ids]


def all_ids(num_batches: list[int], size: int = 8) -> Counter[int]:
    return Counter(
        i
        for rank, n in enumerate(num_batches)
        for step in range(n)
        for i in (torch.arange(size) + 10_000 * step + 10_000_000 * rank).tolist()
    )


def collect(num_batches: list[int], size: int = 8, **options: Any) -> Callable[[Transport], list[list[int]]]:
    def run(transport: Transport) -> list[list[int]]:
        loader = balance(
            Batches(transport.rank, num_batches[transport.rank], size), transport, "features.uih", **options
        )
        return [ids_of(batch) for batch in loader]

    return run


def assert_threads(count: int) -> None:
    deadline = time.monotonic() + 60
    while threading.active_count() > count and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert threading.active_count() <= count, threading.enumerate()


def balancer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "freescale-balancer"]


def await_no_balancer_threads() -> None:
    """Those of loaders that an earlier test has left end when these are collected, and a moment later."""
    deadline = time.monotonic() + 60
    while balancer_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not balancer_threads()


class FailsAt(Batches):
    def __init__(self, rank: int, failing: int, at: int) -> None:
        super().__init__(rank, 6)
        self.failing, self.at = failing, at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, batch in enumerate(super().__iter__()):
            if self.rank == self.failing and step == self.at:
                raise OSError("disk on fire")
            yield batch


def error_everywhere(kind: type[BaseException], match: str, world_size: int = 3, **options: Any) -> None:
    """All ranks raise the same error at the first step."""

    def run(transport: Transport) -> str:
        chosen = {key: value(transport.rank) if key in per_rank else value for key, value in options.items()}
        source = chosen.pop("source", Batches(transport.rank, 3))
        loader = balance(source, transport, **{"lengths": "features.uih", **chosen})
        with pytest.raises(kind, match=match) as caught:
            list(loader)
        return str(caught.value)

    per_rank = {"partitioner", "source", "lengths", "gather"} & {
        k for k, v in options.items() if hasattr(v, "per_rank")
    }
    assert len(set(run_in_threads(world_size, run))) == 1


def by_rank(choose: Callable[[int], Any]) -> Callable[[int], Any]:
    choose.per_rank = True  # type: ignore[attr-defined]  # marks an option that differs between ranks
    return choose
