"""What goes wrong on one rank of a balanced loader is an error on every rank, with who and why."""

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from freescale.balancer import (
    PeerFailed,
    PlanMismatch,
    ProtocolError,
    SchemaMismatch,
    VariableBatchSize,
    WorldSamples,
    balance,
)
from freescale.balancer.protocol.protocol import Protocol
from freescale.balancer.protocol.shuffle import Shuffle
from freescale.transport import Transport, TransportError, connect

from loaded_batches import (
    Batches,
    FailsAt,
    all_ids,
    assert_threads,
    batch_of,
    by_rank,
    error_everywhere,
    ids_of,
)
from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")


def test_leaving_at_the_same_step_is_no_error_and_the_next_epoch_is_whole() -> None:
    before = threading.active_count()

    def run(transport: Transport) -> list[list[int]]:
        loader = balance(Batches(transport.rank, 6), transport, "features.uih")
        for stop in (1, 3, 2):
            for step, _ in enumerate(loader, 1):
                if step == stop:
                    break
        return [ids_of(batch) for batch in loader]

    steps = run_in_threads(3, run)
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids([6] * 3)
    assert_threads(before)


@pytest.mark.parametrize("at", [0, 2])
def test_a_loader_that_raises_is_an_error_of_that_rank_and_step_everywhere(at: int) -> None:
    def run(transport: Transport) -> tuple[int, int, int, str, type[BaseException] | None]:
        loader = balance(FailsAt(transport.rank, 1, at), transport, "features.uih")
        taken = 0
        try:
            for _ in loader:
                taken += 1
        except PeerFailed as error:
            cause = type(error.__cause__) if error.__cause__ else None
            return taken, error.rank, error.step, error.message, cause
        raise AssertionError("no error")

    results = run_in_threads(3, run)
    for rank, result in enumerate(results):
        assert result[:4] == (at, 1, at, "OSError: disk on fire")
        assert result[4] == (OSError if rank == 1 else None)


def test_a_failed_epoch_can_be_followed_by_another() -> None:
    def run(transport: Transport) -> int:
        source = FailsAt(transport.rank, 0, 1)
        loader = balance(source, transport, "features.uih")
        with pytest.raises(PeerFailed):
            list(loader)
        source.at = 99
        return len(list(loader))

    assert run_in_threads(2, run) == [6, 6]


@pytest.mark.parametrize(
    ("partitioner", "match"),
    [
        (lambda world: world.rank[:-1], r"partitioner: .*23.*24|partitioner: .*24.*23"),
        (lambda world: world.rank.float(), "float"),
        (lambda world: world.rank + 1, "3"),
        (lambda world: world.rank - 1, "-1"),
        (lambda world: world.rank.tolist(), "list"),
        (lambda world: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_partitioner_that_breaks_a_rule_is_an_error_everywhere(partitioner: Any, match: str) -> None:
    error_everywhere(PeerFailed, match, partitioner=partitioner)


def test_plans_that_differ_are_found_before_data_moves() -> None:
    def choose(rank: int) -> Any:
        return (lambda world: world.rank.roll(1)) if rank == 2 else (lambda world: world.rank)

    error_everywhere(PlanMismatch, r"ranks \[2\]", partitioner=by_rank(choose))


def test_columns_that_differ_between_ranks_are_named_everywhere() -> None:
    def choose(rank: int) -> Any:
        return [
            {"length": torch.tensor([1, 2]), "x": torch.zeros(2, dtype=torch.float16 if rank == 1 else torch.float32)}
        ]

    error_everywhere(SchemaMismatch, "column 'x' is dense float32 on rank 0 and dense float16 on rank 1",
                     source=by_rank(choose), lengths="length")  # fmt: skip


def test_a_missing_column_is_named_with_those_there_are() -> None:
    error_everywhere(PeerFailed, "lengths= names column 'uih'", lengths="uih")


def test_options_that_differ_between_ranks_are_an_error_everywhere() -> None:
    def run(transport: Transport) -> None:
        lengths = ["features.uih"] * (1 + transport.rank // 2)
        loader = balance(Batches(transport.rank, 3), transport, lengths)
        with pytest.raises(SchemaMismatch, match=f"ranks 0 and 2 .*lengths=.* rank {transport.rank} has .*features"):
            list(loader)

    run_in_threads(3, run)


def test_drop_small_that_differs_between_ranks_is_an_error_everywhere() -> None:
    def run(transport: Transport) -> None:
        loader = balance(Batches(transport.rank, 3), transport, "features.uih", drop_small=transport.rank == 0)
        with pytest.raises(SchemaMismatch, match="drop_small"):
            list(loader)

    run_in_threads(2, run)


def test_lengths_of_another_integer_type_on_one_rank_are_no_difference() -> None:
    def run(transport: Transport) -> list[str]:
        dtype = torch.int32 if transport.rank else torch.int64
        batch = {"n": torch.tensor([2, 0], dtype=dtype), "ids": torch.tensor([5, 6])}
        loader = balance([batch], transport, lengths="ids", jagged={"ids": "n"})
        return [str(out["n"].dtype) for out in loader]

    assert run_in_threads(2, run) == [["torch.int64"], ["torch.int32"]]


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


def test_a_peer_that_never_comes_is_an_error_that_names_stage_and_step() -> None:
    def run(transport: Transport) -> str:
        loader = balance(Batches(transport.rank, 3), transport, "features.uih")
        if transport.rank == 1:
            return ""
        with pytest.raises(TransportError) as caught:
            list(loader)
        return str(caught.value)

    assert "hello, step 0" in run_in_threads(2, run, timeout_s=3)[0]


def test_ranks_at_different_steps_are_told_apart() -> None:
    def run(transport: Transport) -> None:
        loader = balance(Batches(transport.rank, 3), transport, "features.uih")
        state = loader.state_dict()
        loader.load_state_dict({**state, "step": 1 + transport.rank})
        with pytest.raises(ProtocolError, match="rank 0 is at step 1 and rank 1 at step 2"):
            list(loader)

    run_in_threads(2, run)


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


def test_two_iterations_of_one_loader_at_once_are_an_error_for_the_first() -> None:
    def run(transport: Transport) -> list[int]:
        loader = balance(Batches(transport.rank, 4), transport, "features.uih")
        first = iter(loader)
        next(first)
        second = [ids_of(batch) for batch in loader]
        with pytest.raises(RuntimeError, match="left when its loader was"):
            next(first)
        assert loader.state_dict()["epoch"] == 1
        return [len(ids) for ids in second]

    assert run_in_threads(2, run) == [[8] * 4] * 2


def test_a_rank_that_cannot_rebuild_its_batches_tells_the_others() -> None:
    def run(transport: Transport) -> int:
        loader = balance(Batches(transport.rank, 6), transport, "features.uih")
        if transport.rank == 1:
            restore = loader._restore
            calls: list[int] = []

            def fail_third(protocol: Any, columns: Any) -> Any:
                calls.append(1)
                if len(calls) == 3:
                    raise MemoryError("no room")
                return restore(protocol, columns)

            loader._restore = fail_third  # type: ignore[method-assign]
        taken: list[int] = []
        with pytest.raises(PeerFailed, match="rank 1 failed at step 3: MemoryError: no room"):
            taken.extend(1 for _ in loader)
        return len(taken)

    assert run_in_threads(2, run) == [3, 2]


def test_a_partitioner_whose_state_cannot_be_saved_is_an_error_everywhere() -> None:
    class Stateful:
        def __call__(self, world: WorldSamples) -> Tensor:
            return world.rank

        def state_dict(self) -> dict[str, Any]:
            if threading.current_thread().name == "freescale-balancer":
                raise OSError("no state")
            return {}

    def run(transport: Transport) -> None:
        partitioner: Any = Stateful() if transport.rank == 0 else (lambda world: world.rank)
        loader = balance(Batches(transport.rank, 4), transport, "features.uih", partitioner)
        with pytest.raises(PeerFailed, match="rank 0 failed at step 1: OSError: no state"):
            list(loader)

    run_in_threads(2, run)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), GeneratorExit()])
def test_a_loader_that_raises_more_than_an_exception_is_an_error_everywhere(error: BaseException) -> None:
    class Stops(Batches):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield batch_of(self.rank, 0, 4)
            if self.rank == 1:
                raise error
            yield batch_of(self.rank, 1, 4)

    def run(transport: Transport) -> None:
        loader = balance(Stops(transport.rank, 2), transport, "features.uih")
        with pytest.raises(PeerFailed, match=f"rank 1 failed at step 1: {type(error).__name__}"):
            list(loader)

    run_in_threads(2, run)


def test_an_error_whose_text_cannot_be_had_is_told_by_its_type() -> None:
    class NoText(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    def partition(world: WorldSamples) -> Tensor:
        raise NoText

    error_everywhere(PeerFailed, "partitioner: NoText", partitioner=partition)


@pytest.mark.parametrize("where", ["_world_samples", "_gather_candidates", "post"])
def test_a_fault_of_one_rank_within_a_step_is_an_error_on_every_rank(where: str, monkeypatch: Any) -> None:
    """Told in the note where there is one; elsewhere the rank leaves the channel, which its peers notice."""
    owner: Any = Shuffle if where == "post" else Protocol
    original = getattr(owner, where)

    def fail(self: Any, *arguments: Any) -> Any:
        transport = self._transport if where == "post" else self.transport
        if transport.rank == 0:
            raise MemoryError("no room")
        return original(self, *arguments)

    monkeypatch.setattr(owner, where, fail)

    def run(transport: Transport) -> str:
        loader = balance(Batches(transport.rank, 3), transport, "features.uih")
        with pytest.raises((PeerFailed, TransportError, MemoryError)) as caught:
            list(loader)
        return type(caught.value).__name__

    told, heard = run_in_threads(2, run, timeout_s=5)
    assert (told, heard) in {("PeerFailed", "PeerFailed"), ("MemoryError", "TransportError")}


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
