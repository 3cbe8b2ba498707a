"""Mistakes in what `balance` is given: named at the door, or on every rank once a batch shows them."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from freescale.balancer import PeerFailed, SchemaMismatch, VariableBatchSize, WorldSamples, balance
from freescale.transport import Transport, connect

from loaded_batches import Batches, error_everywhere
from rank_threads import run_in_threads


def test_a_missing_column_is_named_with_those_there_are() -> None:
    error_everywhere(PeerFailed, "lengths= names column 'uih'", lengths="uih")


class SourceInWorker(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from balance(Batches(0, 1), connect("local"), "features.uih")


def test_balancing_inside_a_dataloader_worker_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not inside a DataLoader worker"):
        list(DataLoader(SourceInWorker(), batch_size=None, num_workers=1))
    gc.collect()  # or else a later test's thread may be the one that joins the worker


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"prefetch": 0}, ValueError, "prefetch"),
        ({"prefetch": 1.5}, ValueError, "prefetch"),
        ({"lengths": ()}, ValueError, "lengths"),
        ({"partitioner": 3}, TypeError, "partitioner"),
        ({"dataloader": iter([1])}, TypeError, "iterator"),
        ({"dataloader": 5}, TypeError, "iterable"),
        ({"transport": "mpi"}, TypeError, "connect"),
    ],
)
def test_arguments_are_checked_at_the_door(options: dict[str, Any], kind: type[Exception], match: str) -> None:
    arguments = {"dataloader": Batches(0, 1), "transport": connect("local"), "lengths": "features.uih", **options}
    with pytest.raises(kind, match=match):
        balance(**arguments)


def test_a_loader_that_reads_another_share_is_refused() -> None:
    numbers: Any = range(10)

    def run(transport: Transport) -> None:
        sampler: DistributedSampler[int] = DistributedSampler(numbers, num_replicas=3, rank=transport.rank)
        source: DataLoader[int] = DataLoader(numbers, batch_size=2, sampler=sampler)
        with pytest.raises(ValueError, match=f"rank {transport.rank} of 3, but this is rank {transport.rank} of 2"):
            balance(source, transport, lengths=lambda batch: batch)

    run_in_threads(2, run)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lengths": lambda batch: torch.tensor([3, -1])}, "at least 0, got -1"),
        ({"lengths": lambda batch: torch.tensor([3.0, 1.0])}, "lengths= must give a tensor of integers"),
        ({"lengths": lambda batch: [3, 1]}, "got list"),
        ({"lengths": "n"}, "at least 0, got -5"),
    ],
)
def test_wrong_lengths_on_one_rank_are_an_error_everywhere(options: dict[str, Any], match: str) -> None:
    def run(transport: Transport) -> None:
        good = {"n": torch.tensor([3, 1])}
        bad = {"n": torch.tensor([3, -5])}
        same = transport.rank == 1 or isinstance(options["lengths"], str)
        chosen = options if same else {"lengths": lambda batch: batch["n"]}
        loader = balance([bad if transport.rank == 1 else good], transport, **chosen)
        with pytest.raises((PeerFailed, SchemaMismatch), match=match):
            list(loader)

    run_in_threads(2, run)


def test_batches_on_a_device_are_refused_everywhere_by_column() -> None:
    def run(transport: Transport) -> None:
        loader = balance([{"n": torch.zeros(2, dtype=torch.int64, device="meta")}], transport, "n")
        with pytest.raises(PeerFailed, match="column 'n' is on meta"):
            list(loader)

    run_in_threads(2, run)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"partitioner": VariableBatchSize}, TypeError, "pass VariableBatchSize"),
        ({"lengths": None}, TypeError, "lengths must be a column"),
        ({"lengths": 0}, TypeError, "named by its place, as text: '0'"),
        ({"dataloader": iter([1])}, TypeError, "a class whose __iter__ yields the batches"),
        ({"jagged": "l"}, TypeError, "jagged must be a dict"),
        ({"pin_memory": True}, ValueError, "pin_memory=True needs a GPU"),
    ],
)
def test_mistakes_in_arguments_are_named(options: dict[str, Any], kind: type[Exception], match: str) -> None:
    if "pin_memory" in options and torch.cuda.is_available():
        return
    arguments = {"dataloader": Batches(0, 1), "transport": connect("local"), "lengths": "features.uih", **options}
    with pytest.raises(kind, match=match):
        balance(**arguments)


ENTRIES = [torch.arange(3), torch.arange(4)]
L = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("batch", "jagged", "match"),
    [
        ({"page": ENTRIES, "l": L}, {}, "field 'page' looks like one entry a sample"),
        ([{"l": ENTRIES[0]}, {"l": ENTRIES[1]}], {}, "the batch looks like one entry a sample"),
        ({"page": [[1, 2], [3]], "l": L}, {}, "from_pylist"),
        ({"p": torch.arange(5), "l": torch.tensor([0, 3, 5]), "y": L}, {"p": "l"}, r"look like offsets: give offsets"),
    ],
)
def test_batches_that_are_not_columns_say_what_to_make_of_them(batch: Any, jagged: dict[str, str], match: str) -> None:
    with pytest.raises(PeerFailed, match=match):
        list(balance([batch], connect("local"), "l", jagged=jagged))


def test_a_key_error_in_what_the_user_gave_names_the_argument() -> None:
    batches, transport = [{"l": L, "user": L}], connect("local")

    def by_user(world: WorldSamples) -> Tensor:
        return world.gathered["user"] % world.world_size

    with pytest.raises(PeerFailed, match="the function given as lengths= raised KeyError: 'page'"):
        list(balance(batches, transport, lambda batch: batch["page"]))
    with pytest.raises(PeerFailed, match="'user' was not gathered: pass gather="):
        list(balance(batches, transport, "l", by_user))
    assert len(list(balance(batches, transport, "l", by_user, gather=("user",)))) == 1
