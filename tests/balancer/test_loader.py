"""The balanced loader over ranks that are threads: every sample once, uneven ends, failures, closing, prefetch."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from freescale.balancer import (
    JaggedBatch,
    PeerClosed,
    PeerFailed,
    PlanMismatch,
    ProtocolError,
    SchemaMismatch,
    VariableBatchSize,
    WorldSamples,
    balance,
    greedy_batch_size,
)
from freescale.balancer.batches.batch import Column
from freescale.balancer.protocol.protocol import Protocol
from freescale.balancer.protocol.shuffle import Shuffle
from freescale.transport import Transport, TransportError, connect

from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")


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


@pytest.mark.parametrize("num_batches", [[5], [5, 3, 4, 0], [0, 0, 2], [0, 0], [1, 7]])
def test_ranks_that_run_out_early_still_receive_and_every_sample_arrives_once(num_batches: list[int]) -> None:
    steps = run_in_threads(len(num_batches), collect(num_batches))
    assert {len(s) for s in steps} == {max(num_batches)}
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids(num_batches)
    for step in zip(*steps, strict=True):
        sizes = [len(ids) for ids in step]
        assert max(sizes) - min(sizes) <= 1


def test_a_step_holds_the_same_samples_as_without_balancing_in_global_order() -> None:
    steps = run_in_threads(3, collect([2, 2, 2]))
    for step in range(2):
        expected = Counter(
            (torch.arange(8)[None] + 10_000 * step + 10_000_000 * torch.arange(3)[:, None]).ravel().tolist()
        )
        assert Counter(i for rank in steps for i in rank[step]) == expected
        for rank in steps:
            assert rank[step] == sorted(rank[step])


@pytest.mark.parametrize("size", [1, 2])
def test_global_batches_smaller_than_the_world_leave_some_ranks_empty(size: int) -> None:
    steps = run_in_threads(4, collect([2, 0, 0, 0], size))
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids([2, 0, 0, 0], size)
    assert sum(len(step) == 0 for rank in steps for step in rank) == 2 * (4 - size)


def test_small_global_batches_can_be_dropped_and_are_counted() -> None:
    def run(transport: Transport) -> tuple[int, int]:
        loader = balance(Batches(transport.rank, [3, 2][transport.rank], 1), transport, "features.uih", drop_small=True)
        reports = [report for _, report in loader.with_reports()]
        return len(reports), reports[-1].dropped_samples

    assert run_in_threads(2, run) == [(2, 0), (2, 0)]  # the third step has one sample for two ranks


def test_epochs_follow_each_other_and_threads_end() -> None:
    before = threading.active_count()

    def run(transport: Transport) -> list[list[list[int]]]:
        loader = balance(Batches(transport.rank, 3), transport, "features.uih")
        return [[ids_of(batch) for batch in loader] for _ in range(3)]

    first, second = run_in_threads(2, run)
    assert first[0] == first[1] == first[2]
    assert second[0] == second[1] == second[2]
    assert_threads(before)


def assert_threads(count: int) -> None:
    deadline = time.monotonic() + 10
    while threading.active_count() > count and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert threading.active_count() <= count, threading.enumerate()


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


def test_a_rank_that_goes_on_after_another_left_is_told_who_left() -> None:
    def run(transport: Transport) -> int:
        loader = balance(Batches(transport.rank, 50), transport, "features.uih")
        if transport.rank == 1:
            for taken, _ in enumerate(loader, 1):
                if taken == 3:
                    break
            loader.close()
            return -1
        with pytest.raises(PeerClosed) as caught:
            list(loader)
        assert caught.value.rank == 1
        return caught.value.step

    left = run_in_threads(3, run)
    assert left[1] == -1
    assert left[0] == left[2] >= 3


def test_forgetting_a_loader_leaves_no_thread() -> None:
    before = threading.active_count()

    def run(transport: Transport) -> None:
        iterator = iter(balance(Batches(transport.rank, 50), transport, "features.uih"))
        next(iterator)
        del iterator

    run_in_threads(2, run)
    assert_threads(before)


class FailsAt(Batches):
    def __init__(self, rank: int, failing: int, at: int) -> None:
        super().__init__(rank, 6)
        self.failing, self.at = failing, at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, batch in enumerate(super().__iter__()):
            if self.rank == self.failing and step == self.at:
                raise OSError("disk on fire")
            yield batch


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


def test_all_empty_lists_on_one_rank_are_balanced() -> None:
    def run(transport: Transport) -> list[int]:
        lengths = torch.tensor([3, 1]) if transport.rank else torch.tensor([0, 0])
        batch = JaggedBatch({"uih": Column(torch.arange(int(lengths.sum())), (lengths,))}, 2)
        (out,) = list(balance([batch], transport, lengths="uih"))
        return [int(n) for n in out["uih"].levels[0]]

    assert sorted(n for rank in run_in_threads(2, run) for n in rank) == [0, 0, 1, 3]


def test_a_rank_with_a_larger_batch_than_agreed_is_given_room() -> None:
    def run(transport: Transport) -> int:
        sizes = [4, 4, 30, 4] if transport.rank == 1 else [4, 4, 4, 4]
        batches = [batch_of(transport.rank, step, size) for step, size in enumerate(sizes)]
        return sum(len(ids_of(batch)) for batch in balance(batches, transport, "features.uih"))

    assert sum(run_in_threads(3, run)) == 12 * 4 + 26


def test_a_smaller_last_batch_on_one_rank_is_balanced() -> None:
    def run(transport: Transport) -> int:
        batches = [batch_of(transport.rank, 0, 11 if transport.rank == 0 else 128)]
        return sum(len(ids_of(batch)) for batch in balance(batches, transport, "features.uih"))

    assert sum(run_in_threads(3, run)) == 11 + 256


def test_reports_tell_what_moved_and_items_of_the_whole_batch() -> None:
    def run(transport: Transport) -> Any:
        loader = balance(Batches(transport.rank, 2), transport, "features.uih")
        return [report for _, report in loader.with_reports()]

    reports = run_in_threads(3, run)
    for step in range(2):
        of_step = [rank[step] for rank in reports]
        assert sum(r.bytes_sent for r in of_step) == sum(r.bytes_received for r in of_step) == of_step[0].bytes_moved
        assert sum(r.batch_size for r in of_step) == of_step[0].global_batch_size == 24
        assert of_step[0].global_items == of_step[1].global_items
        assert of_step[0].global_items["features.uih"] == sum(of_step[0].tokens_before) == sum(of_step[0].tokens_after)
        assert of_step[0].straggler_after < of_step[0].straggler_before
        assert of_step[0].loss_scale("features.uih") == 3 / of_step[0].global_items["features.uih"]
        with pytest.raises(ValueError, match="label"):
            of_step[0].loss_scale("labels")
        assert set(of_step[0].seconds) == {"load", "gather_lengths", "gather_candidates", "plan", "shuffle"}


def test_unequal_sample_counts_without_reading_a_scale_warn_once() -> None:
    def run(transport: Transport) -> None:
        loader = balance(Batches(transport.rank, 3, 3), transport, "features.uih", lambda w: w.rank * 0)
        if transport.rank == 0:
            with pytest.warns(UserWarning, match="loss_scale") as caught:
                list(loader)
            assert len(caught) == 1
        else:
            for _, report in loader.with_reports():
                report.loss_scale()

    run_in_threads(2, run)


def test_the_trainer_is_ahead_by_at_most_prefetch_batches() -> None:
    pulled: list[int] = []

    class Counting(Batches):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for batch in super().__iter__():
                pulled.append(1)
                yield batch

    loader = balance(Counting(0, 20), connect("local"), "features.uih", prefetch=3)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.3)
    assert len(pulled) <= 1 + 3 + 1
    loader.close()


def test_measured_seconds_reach_the_partitioner_with_their_samples() -> None:
    seen: dict[int, list[WorldSamples]] = {}

    def run(transport: Transport) -> None:
        worlds = seen.setdefault(transport.rank, [])

        def watch(world: WorldSamples) -> Tensor:
            worlds.append(world)
            return greedy_batch_size(world)

        loader = balance(Batches(transport.rank, 8), transport, "features.uih", watch, prefetch=1)
        tokens = {}
        for batch, report in loader.with_reports():
            tokens[report.step] = int(batch["features"]["uih"].levels[0].sum())
            loader.record_seconds(0.5 + transport.rank)
        for world in worlds:
            step = int(world.seconds_step[transport.rank])
            if world.measured is not None and step >= 0:
                mine = world.measured.rank == transport.rank
                assert int(world.measured.uih_lengths[mine].sum()) == tokens[step]
                assert float(world.seconds[transport.rank]) == 0.5 + transport.rank

    run_in_threads(2, run)
    assert any(world.measured is not None for world in seen[0])
    for a, b in zip(seen[0], seen[1], strict=True):
        assert torch.equal(a.seconds_step, b.seconds_step)


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


def test_attributes_of_the_wrapped_loader_pass_through() -> None:
    source: DataLoader[int] = DataLoader(range(10), batch_size=5)  # type: ignore[arg-type]  # works as a dataset
    loader = balance(source, connect("local"), lengths=lambda batch: batch)
    assert len(loader) == 2
    assert loader.batch_size == 5
    assert loader.sampler is source.sampler
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


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


def test_the_lengths_field_of_a_jagged_feature_names_its_column() -> None:
    batch = {"n": torch.tensor([1, 3]), "ids": torch.arange(4)}
    loader = balance([batch], connect("local"), lengths="n", jagged={"ids": "n"})
    ((_, report),) = loader.with_reports()
    assert report.tokens_before == (4,)


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


def test_a_partitioner_may_write_into_its_argument() -> None:
    def spoil(world: WorldSamples) -> Tensor:
        world.rank.fill_(0)
        world.payload_bytes.zero_()
        owner = world.uih_lengths.zero_()
        owner[::2] = 1
        return owner

    steps = run_in_threads(2, collect([3, 3], partitioner=spoil))
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids([3, 3])


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


def test_seconds_of_an_epoch_do_not_reach_the_next() -> None:
    seen: list[int] = []

    def watch(world: WorldSamples) -> Tensor:
        seen.append(int(world.seconds_step[0]))
        return world.rank

    loader = balance(Batches(0, 3), connect("local"), "features.uih", watch)
    for _ in range(2):
        for _ in loader:
            loader.record_seconds(1.0)
    assert seen[3] == -1


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


def test_a_rank_whose_first_batch_is_empty_takes_the_types_of_the_others() -> None:
    def run(transport: Transport) -> list[tuple[str, int]]:
        empty, full = torch.tensor([]), torch.tensor([1, 2])
        batches = [{"x": empty if transport.rank == 0 else full}, {"x": full}, {"x": full}]
        loader = balance(batches, transport, lengths=lambda batch: torch.ones(len(batch["x"]), dtype=torch.int64))
        return [(str(batch["x"].dtype), len(batch["x"])) for batch in loader]

    for steps in run_in_threads(2, run):
        assert {dtype for dtype, _ in steps} == {"torch.int64"}
        assert [n for _, n in steps] == [1, 2, 2]


def test_first_batches_that_are_empty_everywhere_decide_nothing() -> None:
    def run(transport: Transport) -> list[str]:
        batches = [{"x": torch.tensor([])}, {"x": torch.tensor([4])}]
        loader = balance(batches, transport, lengths=lambda batch: torch.ones(len(batch["x"]), dtype=torch.int64))
        with pytest.raises(SchemaMismatch, match="changed at step 1"):
            list(loader)
        return []

    run_in_threads(2, run)


def test_a_loader_is_iterated_only_when_an_epoch_begins() -> None:
    class Counting:
        epochs = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            self.epochs += 1
            return iter([batch_of(0, 0, 2)])

    source = Counting()
    loader = balance(source, connect("local"), "features.uih")
    assert source.epochs == 0
    list(loader)
    list(loader)
    assert source.epochs == 2


def test_an_iterator_of_the_users_is_not_closed() -> None:
    class Reader:
        closed = False

        def __init__(self) -> None:
            self.left = 0

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

        def __iter__(self) -> Any:
            self.left = 2
            return self

        def __next__(self) -> dict[str, Any]:
            assert not self.closed
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return batch_of(0, self.left, 2)

        def close(self) -> None:
            self.closed = True

    loader = balance(Reader(), connect("local"), "features.uih")
    assert [len(list(loader)) for _ in range(3)] == [2, 2, 2]


def test_two_threads_that_share_an_iterator_both_end() -> None:
    iterator = balance(Batches(0, 10), connect("local"), "features.uih").with_reports()
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.append(sum(1 for _ in iterator)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(taken) == 10
    assert len(taken) == 2


def test_another_default_device_does_not_reach_the_balancer() -> None:
    with torch.device("meta"):
        steps = run_in_threads(2, collect([2, 2]))
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids([2, 2])


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"partitioner": VariableBatchSize}, TypeError, "pass VariableBatchSize"),
        ({"lengths": None}, TypeError, "lengths must be a column"),
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


def test_one_name_is_enough_for_gather() -> None:
    seen: list[Tensor] = []

    def watch(world: WorldSamples) -> Tensor:
        seen.append(world.gathered["features.id"])
        return world.rank

    list(balance(Batches(0, 1), connect("local"), "features.uih", watch, gather="features.id"))
    assert seen[0].tolist() == list(range(8))
