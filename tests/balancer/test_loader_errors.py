"""What goes wrong on one rank of a balanced loader is an error on every rank, with who and why."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.balancer import (
    JaggedBatch,
    PeerFailed,
    PlanMismatch,
    ProtocolError,
    SchemaMismatch,
    WorldSamples,
    balance,
)
from freescale.balancer.batches.column import Column
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

    told, heard = run_in_threads(2, run)
    assert (told, heard) in {("PeerFailed", "PeerFailed"), ("MemoryError", "TransportError")}


@pytest.mark.parametrize("whole", [True, False])
def test_a_later_batch_that_is_not_in_host_memory_is_refused_by_name(whole: bool) -> None:
    lengths = torch.tensor([2, 1])
    first = JaggedBatch({"user": Column(torch.tensor([4, 5])), "page": Column(torch.arange(3), (lengths,))})
    moved = {name: Column(column.values.to("meta"), column.levels) for name, column in first.columns.items()}
    later = JaggedBatch.of_checked(moved if whole else {**first.columns, "page": moved["page"]}, 2)
    steps = iter(balance([first, later], connect("local"), "page"))
    next(steps)
    with pytest.raises(PeerFailed, match=f"column '{'user' if whole else 'page'}' is on meta"):
        next(steps)
