"""The balanced loader over ranks that are threads: every sample once, uneven ends, closing, prefetch, reports."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from freescale.balancer import (
    CostModel,
    JaggedBatch,
    PeerClosed,
    SchemaMismatch,
    VariableBatchSize,
    WorldSamples,
    balance,
    capped,
    greedy_batch_size,
    grouped,
    keep_together,
)
from freescale.balancer.batches.batch import Column
from freescale.balancer.partitioners.workload import uih_length
from freescale.balancer.plan import Cost
from freescale.transport import Transport, connect

from loaded_batches import Batches, all_ids, assert_threads, batch_of, collect, ids_of
from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")


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


@pytest.mark.parametrize("reads", [True, False])
def test_lengths_of_candidates_are_told_to_partitioners_that_do_not_say_that_they_do_not_read_them(reads: bool) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def partition(world: WorldSamples) -> Tensor:
        seen.append((world.num_candidates.tolist(), world.candidate_lengths.tolist()))
        return greedy_batch_size(world)

    if not reads:
        partition.__dict__["reads_candidate_lengths"] = False

    def run(transport: Transport) -> int:
        counts, lengths = torch.tensor([2, 1]), torch.tensor([3, 0, 4]) + transport.rank
        nested = Column(torch.zeros(int(lengths.sum())), (counts, lengths))
        batch = JaggedBatch({"uih": Column(torch.arange(2), (torch.tensor([1, 1]),)), "candidate": nested}, 2)
        (out,) = list(balance([batch], transport, "uih", partition))
        return len(out["candidate"].values)

    assert sum(run_in_threads(2, run)) == 7 + 10
    assert seen == 2 * [([2, 1, 2, 1], [3, 0, 4, 4, 1, 5] if reads else [])]


def test_partitioners_read_lengths_of_candidates_if_what_they_hold_does() -> None:
    def by_candidates(world: WorldSamples) -> Tensor:
        return world.num_candidates.double()

    held: list[Cost] = [CostModel(), by_candidates]
    for reads, cost in enumerate(held):
        for partitioner in (greedy_batch_size(cost=cost), VariableBatchSize(cost=cost)):
            for nested in (partitioner, grouped(capped(partitioner, max_tokens=9), 2), keep_together(partitioner, "a")):
                assert nested.reads_candidate_lengths == bool(reads)
    assert not greedy_batch_size.reads_candidate_lengths


@pytest.mark.parametrize("reads", [True, False])
def test_seconds_are_told_to_partitioners_that_do_not_say_that_they_do_not_read_them(reads: bool) -> None:
    seen: list[bool] = []

    def partition(world: WorldSamples) -> Tensor:
        seen.append(world.measured is not None and bool((world.seconds == 7).all()))
        return greedy_batch_size(world)

    if not reads:
        partition.__dict__["reads_measured"] = False

    def run(transport: Transport) -> None:
        loader = balance(Batches(transport.rank, 5, 2), transport, "features.uih", partition, prefetch=1)
        assert loader.reads_seconds == reads
        for _ in loader:
            loader.record_seconds(7)

    run_in_threads(2, run)
    assert any(seen) == reads


def test_partitioners_read_seconds_if_what_they_hold_does() -> None:
    def by_items(world: WorldSamples) -> Tensor:
        return world.uih_lengths.double()

    for cost, reads in ((uih_length, False), (CostModel(), True), (by_items, True)):
        for partitioner in (greedy_batch_size(cost=cost), VariableBatchSize(cost=cost)):
            for nested in (partitioner, grouped(capped(partitioner, max_tokens=9), 2), keep_together(partitioner, "a")):
                assert nested.reads_measured == reads
    assert not greedy_batch_size.reads_measured
    assert VariableBatchSize(autotune=True).reads_measured


class Derived(VariableBatchSize):
    """A user's, with a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __call__(self, world: WorldSamples) -> Tensor:
        self.seen += world.seconds.tolist()
        return super().__call__(world)


class Delegating:
    """A user's, that hands on what it lacks."""

    def __init__(self) -> None:
        self.inner = VariableBatchSize()
        self.seen: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, world: WorldSamples) -> Tensor:
        self.seen += world.seconds.tolist()
        return self.inner(world)


class Renamed(VariableBatchSize):
    """Without a plan of its own."""


class Saying(Derived):
    reads_measured = False


@pytest.mark.parametrize("partitioner", [Derived(), Delegating()], ids=["derived", "delegating"])
def test_a_users_class_is_told_seconds_whatever_the_one_behind_it_reads(partitioner: Any) -> None:
    for outermost in (partitioner, capped(partitioner, max_tokens=10_000)):
        partitioner.seen.clear()
        loader = balance(Batches(0, 5), connect("local"), "features.uih", outermost, prefetch=1)
        assert loader.reads_seconds
        for _ in loader:
            loader.record_seconds(7)
        assert 7.0 in partitioner.seen
    assert not balance(Batches(0, 5), connect("local"), "features.uih", Renamed()).reads_seconds
    assert not balance(Batches(0, 5), connect("local"), "features.uih", Saying()).reads_seconds


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


def test_attributes_of_the_wrapped_loader_pass_through() -> None:
    source: DataLoader[int] = DataLoader(range(10), batch_size=5)  # type: ignore[arg-type]  # works as a dataset
    loader = balance(source, connect("local"), lengths=lambda batch: batch)
    assert len(loader) == 2
    assert loader.batch_size == 5
    assert loader.sampler is source.sampler
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_lengths_field_of_a_jagged_feature_names_its_column() -> None:
    batch = {"n": torch.tensor([1, 3]), "ids": torch.arange(4)}
    loader = balance([batch], connect("local"), lengths="n", jagged={"ids": "n"})
    ((_, report),) = loader.with_reports()
    assert report.tokens_before == (4,)


def test_a_partitioner_may_write_into_its_argument() -> None:
    def spoil(world: WorldSamples) -> Tensor:
        world.rank.fill_(0)
        world.payload_bytes.zero_()
        owner = world.uih_lengths.zero_()
        owner[::2] = 1
        return owner

    steps = run_in_threads(2, collect([3, 3], partitioner=spoil))
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids([3, 3])


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
        thread.join(60)
    assert sum(taken) == 10
    assert len(taken) == 2


def test_a_batch_that_one_thread_waits_for_makes_room_whatever_another_says_of_sleeping() -> None:
    loaded, wanted = threading.Semaphore(0), threading.Semaphore(0)

    class Slow(Batches):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for batch in super().__iter__():
                assert loaded.acquire(timeout=30)
                yield batch

    loader = balance(Slow(0, 6), connect("local"), "features.uih", prefetch=2)
    batches, taken = loader.with_reports(), SimpleQueue[int]()

    def take() -> None:
        for _ in range(6):
            wanted.acquire()
            taken.put(next(batches)[1].step)

    threading.Thread(target=take, daemon=True).start()
    for step in range(6):
        loader.lets_thread_sleep = True
        wanted.release()
        time.sleep(0.05)  # for the other thread to wait; where it is late, nothing is tested
        loader.lets_thread_sleep = False
        loaded.release()
        assert taken.get(timeout=20) == step


def test_another_default_device_does_not_reach_the_balancer() -> None:
    with torch.device("meta"):
        steps = run_in_threads(2, collect([2, 2]))
    assert Counter(i for rank in steps for step in rank for i in step) == all_ids([2, 2])


def test_one_name_is_enough_for_gather() -> None:
    seen: list[Tensor] = []

    def watch(world: WorldSamples) -> Tensor:
        seen.append(world.gathered["features.id"])
        return world.rank

    list(balance(Batches(0, 1), connect("local"), "features.uih", watch, gather="features.id"))
    assert seen[0].tolist() == list(range(8))
