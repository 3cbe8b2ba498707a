"""Going on with another number of ranks: over the whole run every sample once, and later epochs as any other."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from freescale.balancer import CostModel, VariableBatchSize, balance, greedy_batch_size, read_parquet, reshard
from freescale.transport import Transport

from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")

NUM_SAMPLES = 61
SIZES = (1, 2, 3, 4, 8)
State = dict[str, Any]
Make = Callable[[Transport], Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row groups that are smaller and larger than a batch, so that ranks run out at different steps."""
    folder = tmp_path_factory.mktemp("data")
    start = 0
    for name, rows, group in (("a", 26, 5), ("b", 14, 14), ("c", 21, 2)):
        ids = range(start, start + rows)
        table = pa.table({"id": ids, "uih": [list(range(1 + (7 * k) % 9)) for k in ids]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=group)
        start += rows
    assert start == NUM_SAMPLES
    return folder


def maker(path: Path, shuffle: bool = True, **options: Any) -> Make:
    def make(transport: Transport) -> Any:
        source = read_parquet(path, 3, rank=transport.rank, world_size=transport.world_size, shuffle=shuffle, seed=3)
        return balance(source, transport, "uih", **options)

    return make


def ids_of(loader: Any) -> list[int]:
    return [k for batch in loader for k in batch["id"].values.tolist()]


def run_from(make: Make, states: list[State] | None, world_size: int, stop: int | None = None) -> Any:
    """Run threads, from states; at the end all have (samples, states) after each step, the last being the epoch's."""

    def run(transport: Transport) -> list[tuple[list[int], State]]:
        loader, ids = make(transport), list[int]()
        if states is not None:
            loader.load_state_dict(states[transport.rank])
        moments = [(ids, loader.state_dict())]
        for batch in loader:
            ids = ids + batch["id"].values.tolist()
            moments.append((ids, loader.state_dict()))
            if stop is not None and len(moments) > stop:
                break
        else:
            moments.append((ids, loader.state_dict()))
        loader.close()
        return moments

    return list(zip(*run_in_threads(world_size, run), strict=True))


def seen(moment: Any) -> Counter[int]:
    return Counter(k for ids, _ in moment for k in ids)


def states_of(moment: Any) -> list[State]:
    return [state for _, state in moment]


@pytest.mark.parametrize(("old", "new"), [pair for pair in product(SIZES, SIZES) if pair[0] != pair[1]])
def test_stopped_at_any_step_another_number_of_ranks_gives_the_rest_once(path: Path, old: int, new: int) -> None:
    everything = Counter(range(NUM_SAMPLES))
    make = maker(path, shuffle=(old + new) % 2 == 0)
    moments = run_from(make, None, old)
    assert seen(moments[-1]) == everything
    for step, moment in enumerate(moments[:-1]):
        went_on = run_from(make, reshard(states_of(moment), new), new)
        assert seen(moment) + seen(went_on[-1]) == everything, step
        assert all(state["step"] >= step for state in states_of(went_on[0]))


@pytest.mark.parametrize("new", [2, 3, 5])
def test_the_next_epochs_are_those_of_a_run_that_never_stopped(path: Path, new: int) -> None:
    """On as many ranks, too, where ranks may have had no data left when the state was saved."""
    make = maker(path)

    def three_epochs(transport: Transport) -> list[list[int]]:
        loader = make(transport)
        return [ids_of(loader) for _ in range(3)]

    whole = run_in_threads(new, three_epochs)
    moments = run_from(make, None, 3)
    for moment in moments[1:-1]:
        states = reshard(states_of(moment), new)

        def rest(transport: Transport, states: list[State] = states) -> list[list[int]]:
            loader = make(transport)
            loader.load_state_dict(states[transport.rank])
            return [ids_of(loader) for _ in range(3)]

        got = run_in_threads(new, rest)
        assert [epochs[1:] for epochs in got] == [epochs[1:] for epochs in whole]
    at_the_end = reshard(states_of(moments[-1]), new)
    assert [(state["epoch"], state["source"]["dealt"]) for state in at_the_end] == [(1, [])] * new
    assert [ids for ids, _ in run_from(make, at_the_end, new)[-1]] == [epochs[1] for epochs in whole]


@pytest.mark.parametrize("seed", range(6))
def test_the_number_of_ranks_may_change_again_and_again_within_an_epoch(path: Path, seed: int) -> None:
    random, make = Random(seed), maker(path)
    total, states, size = Counter[int](), None, 3
    for turn in range(6):
        moments = run_from(make, states, size, stop=None if turn == 5 else random.randint(0, 2))
        total += seen(moments[-1])
        size = random.choice(SIZES)
        file = io.BytesIO()
        torch.save(states_of(moments[-1]), file)  # as a checkpoint does
        file.seek(0)
        states = reshard(torch.load(file, weights_only=True), size)
        if states[0]["epoch"] == 1:
            break
    assert total == Counter(range(NUM_SAMPLES))


def test_states_in_any_order_are_not_changed_and_as_many_ranks_get_their_own_back(path: Path) -> None:
    states = states_of(run_from(maker(path), None, 4, stop=2)[-1])
    before = copy.deepcopy(states)
    assert reshard(states[::-1], 4) == before
    assert reshard(states[::-1], 2) == reshard(states, 2)
    new = reshard(states, 2)
    new[0]["source"]["dealt"][0][0][0] = 99
    assert states == before
    assert new[1]["source"]["dealt"][0][0][0] != 99


def test_dropped_samples_go_on_being_counted_and_none_comes_twice(path: Path) -> None:
    make = maker(path, drop_small=True)

    def run(transport: Transport, states: list[State]) -> tuple[Counter[int], list[int]]:
        loader, ids, dropped = make(transport), Counter[int](), []
        loader.load_state_dict(states[transport.rank])
        for batch, report in loader.with_reports():
            ids.update(batch["id"].values.tolist())
            dropped.append(report.dropped_samples)
        return ids, dropped

    for old, new in ((3, 8), (8, 2)):
        before = run_from(make, None, old, stop=2)[-1]
        states = reshard([{**state, "dropped_samples": 5} for state in states_of(before)], new)
        after = run_in_threads(new, partial(run, states=states))
        assert max((seen(before) + sum((ids for ids, _ in after), Counter())).values()) == 1
        assert all(dropped == after[0][1] and dropped[0] >= 5 for _, dropped in after)


@pytest.mark.parametrize("kind", ["variable", "cost"])
def test_what_was_learned_of_samples_goes_on_and_speeds_of_ranks_begin_anew(path: Path, kind: str) -> None:
    def make(transport: Transport) -> Any:
        learner = VariableBatchSize(autotune=True) if kind == "variable" else greedy_batch_size(cost=CostModel())
        return maker(path, partitioner=learner)(transport)

    def run(transport: Transport) -> State:
        loader, state = make(transport), dict[str, Any]()
        for batch in loader:
            loader.record_seconds(float(batch["uih"].lengths.sum()) * (1 + transport.rank))
            state = loader.state_dict()
        return state

    states = run_in_threads(4, run)
    new = reshard(states, 3)
    old_learned, learned = states[0]["partitioner"], new[0]["partitioner"]
    assert len(old_learned["rank_speed"]) == 4
    assert old_learned["rank_speed"].unique().numel() > 1
    for name, value in learned.items():
        if name.startswith("rank_"):
            assert (value.numel(), value.dtype) == (0, old_learned[name].dtype)
        else:
            assert torch.as_tensor(value).equal(torch.as_tensor(old_learned[name]))
    assert (kind == "cost") == ("cost_terms" in learned)
    run_from(make, new, 3)


def test_between_epochs_any_loader_that_begins_them_alike_goes_on_with_any_number(path: Path) -> None:
    def make(transport: Transport) -> Any:
        mine = range(NUM_SAMPLES)[transport.rank :: transport.world_size]
        samples = [{"id": torch.tensor([k]), "length": torch.tensor([k % 7])} for k in mine]
        return balance(DataLoader(samples, batch_size=None), transport, "length")  # type: ignore[arg-type]  # a list

    def run(transport: Transport, states: list[State] | None = None) -> tuple[list[int], State]:
        loader = make(transport)
        if states is not None:
            loader.load_state_dict(states[transport.rank])
        return [k for batch in loader for k in batch["id"].tolist()], loader.state_dict()

    states = [state for _, state in run_in_threads(3, run)]
    again = run_in_threads(2, lambda transport: run(transport, reshard(states, 2)))
    assert Counter(k for ids, _ in again for k in ids) == Counter(range(NUM_SAMPLES))
    assert [state["epoch"] for _, state in again] == [2, 2]


def test_loaders_with_another_place_in_the_epoch_are_refused(path: Path) -> None:
    def state_of(transport: Transport, source: Any) -> State:
        loader = balance(source, transport, "length")
        next(iter(loader))
        state: State = loader.state_dict()
        loader.close()
        return state

    batches: Any = [{"length": torch.tensor([3, 4])}] * 4
    sources: list[Any] = [batches, StatefulDataLoader(batches, batch_size=None)]
    for source in sources:
        states = run_in_threads(2, partial(state_of, source=source))
        with pytest.raises(ValueError, match=r"only places of read_parquet .* rank 0 has another .* with 2 ranks"):
            reshard(states, 3)
        assert reshard(states, 2) == states


def test_states_that_do_not_belong_together_are_refused(path: Path) -> None:
    moments = run_from(maker(path), None, 3)
    states = states_of(moments[2])

    def refused(states: Any, message: str, world_size: Any = 2) -> None:
        with pytest.raises(ValueError, match=message):
            reshard(states, world_size)

    def with_source(**changes: Any) -> list[State]:
        return [*states[:2], {**states[2], "source": {**states[2]["source"], **changes}}]

    refused(states, "world_size must be an integer of at least 1, got 0", 0)
    refused(states, "world_size must be an integer of at least 1, got True", True)
    refused([], "states must be a sequence with the state of every rank")
    refused(states[0], "states must be a sequence with the state of every rank")
    refused(states[:2], r"states must be one of each rank, got 2: of ranks \[0, 1\], which were ranks of 3")
    refused([*states[:2], states[0]], r"got 3: of ranks \[0, 0, 1\], which were ranks of 3")
    refused([*states[:2], {**states[2], "world_size": 4}], "which were ranks of 3 and 4")
    refused([*states[:2], states_of(moments[3])[2]], r"same step, got by rank \{0: 2, 1: 2, 2: 3\}")
    refused([*states[:2], {**states[2], "epoch": 1}], r"same epoch, got by rank \{0: 0, 1: 0, 2: 1\}")
    refused([*states[:2], {**states[2], "dropped_samples": 1}], "same dropped_samples")
    refused([{**states[0], "step": -1}, *states[1:]], "step must be an integer of at least 0, got -1")
    refused(with_source(seed=4), "read_parquet of rank 2: seed must be 3, got 4")
    refused(with_source(rank=1), "read_parquet of rank 2: rank must be 2, got 1")
    refused(with_source(files=[]), "read_parquet of rank 2: files must be .*a.parquet")
    refused(with_source(epoch=1), "read_parquet of rank 2: epoch must be 0, got 1")
    refused(with_source(dealt=[[[0, 0]]]), r"read_parquet of rank 2: dealt must be \[\], got")
    refused(with_source(version=1), "read_parquet of rank 2: version must be 2, got 1")
    refused(with_source(group="x"), "group of the state must be an integer")
    refused([{**states[0], "source": None}, *states[1:]], "rank 0 has another loader, or none that has begun")
    with pytest.raises(TypeError, match="state must be a dict"):
        reshard([None], 2)  # type: ignore[list-item]
    run_from(maker(path), reshard(states, 2), 2)


def test_a_state_of_another_number_of_ranks_says_what_makes_it_one_of_this(path: Path) -> None:
    states = states_of(run_from(maker(path), None, 3, stop=1)[-1])

    def run(transport: Transport) -> None:
        loader = maker(path)(transport)
        with pytest.raises(ValueError, match=r"by rank 0 of 3, but this is rank 0 of 1; .*see freescale.balancer.resh"):
            loader.load_state_dict(states[0])
        loader.load_state_dict(reshard(states, 1)[0])
        assert loader.state_dict()["step"] == 1

    run_in_threads(1, run)
