"""Stopping at any step and going on: every sample exactly once, whatever was in flight."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, Prefetcher, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from freescale.balancer import BalancerNode, PeerFailed, ProtocolError, VariableBatchSize, balance, read_parquet
from freescale.transport import Transport

from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")

NUM_BATCHES = (4, 6, 2)


class Samples(Dataset[Any]):
    """Samples of one rank, as numbers that say which."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 3 * NUM_BATCHES[self.rank] - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(1000 * self.rank + index), "length": torch.tensor((index * 7919) % 50)}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def everything() -> Counter[int]:
    return Counter(1000 * rank + i for rank in range(3) for i in range(len(Samples(rank))))


def stateful(transport: Transport, workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(5)
    source = StatefulDataLoader(
        Samples(transport.rank),
        batch_size=3,
        shuffle=True,
        generator=generator,
        num_workers=workers,
        collate_fn=collate,
    )
    return balance(source, transport, lengths="length")


def stateful_with_workers(transport: Transport) -> Any:
    return stateful(transport, workers=1)


def replayed(transport: Transport) -> Any:
    return balance(DataLoader(Samples(transport.rank), batch_size=3, collate_fn=collate), transport, lengths="length")


class Nodes:
    """A BalancerNode under torchdata's Loader, with the interface of a balanced loader."""

    def __init__(self, transport: Transport) -> None:
        numbers = SamplerWrapper(SequentialSampler(Samples(transport.rank)))
        batches = Prefetcher(Batcher(Mapper(numbers, Samples(transport.rank).__getitem__), 3, drop_last=False), 2)
        self.node = BalancerNode(Mapper(batches, collate), transport, lengths="length")
        self.loader: Loader[Any] = Loader(self.node)
        self.state_dict, self.load_state_dict, self.close = (
            self.loader.state_dict,
            self.loader.load_state_dict,
            self.node.close,
        )

    def __iter__(self) -> Any:
        return iter(self.loader)


def take(loader: Any, steps: int | None) -> list[int]:
    ids: list[int] = []
    if steps == 0:
        return ids
    for step, batch in enumerate(loader, 1):
        ids += batch["id"].tolist()
        if step == steps:
            break
    return ids


MAKERS: dict[str, Callable[[Transport], Any]] = {
    "stateful": stateful,
    "stateful_with_workers": stateful_with_workers,
    "replayed": replayed,
    "nodes": Nodes,
}


@pytest.mark.parametrize("stop", range(7))
@pytest.mark.parametrize("maker", ["stateful", "replayed", "nodes"])
def test_stopping_at_any_step_and_going_on_gives_every_sample_once(maker: str, stop: int) -> None:
    if maker == "nodes" and stop == max(NUM_BATCHES):
        check_resume(Nodes, stop, epochs=2)  # torchdata's Loader: a state after the last item begins a new epoch
    else:
        check_resume(MAKERS[maker], stop)


def test_a_loader_with_worker_processes_goes_on_where_it_was() -> None:
    check_resume(stateful_with_workers, 2)


def check_resume(make: Callable[[Transport], Any], stop: int, epochs: int = 1) -> None:
    def before(transport: Transport) -> tuple[list[int], dict[str, Any]]:
        loader = make(transport)
        ids = take(loader, stop)
        state = copy.deepcopy(loader.state_dict())
        loader.close()
        return ids, state

    first = run_in_threads(3, before)

    def after(transport: Transport) -> list[int]:
        loader = make(transport)
        state = first[transport.rank][1]
        original = repr(state)
        loader.load_state_dict(state)
        ids = take(loader, None)
        assert repr(state) == original, "loading a state changed it"
        loader.close()
        return ids

    second = run_in_threads(3, after)
    total = Counter(i for ids, _ in first for i in ids) + Counter(i for ids in second for i in ids)
    assert total == Counter(dict.fromkeys(everything(), epochs))


def test_a_node_that_is_reset_without_a_state_begins_anew_also_after_one_that_was_not_used() -> None:
    def run(transport: Transport) -> tuple[int, int]:
        node = BalancerNode(IterableWrapper([{"length": torch.tensor([n])} for n in range(4)]), transport, "length")
        node.reset()
        first = int(next(node)["length"])
        node.reset(node.state_dict())
        node.reset()
        return first, int(next(node)["length"])

    assert run_in_threads(1, run) == [(0, 0)]


def test_going_on_gives_the_same_batches_as_not_stopping() -> None:
    def whole(transport: Transport) -> list[list[int]]:
        loader = stateful(transport)
        return [batch["id"].tolist() for batch in loader]

    def stopped(transport: Transport) -> list[list[int]]:
        loader, batches = stateful(transport), []
        for _ in range(2):
            for batch in loader:
                batches.append(batch["id"].tolist())
                break
            state = loader.state_dict()
            loader.close()
            loader = stateful(transport)
            loader.load_state_dict(state)
        return batches + [batch["id"].tolist() for batch in loader]

    assert run_in_threads(3, whole) == run_in_threads(3, stopped)


def test_a_state_between_epochs_begins_the_next_one() -> None:
    def run(transport: Transport) -> list[int]:
        loader = stateful(transport)
        take(loader, None)
        state = loader.state_dict()
        assert state["epoch"] == 1
        loader.close()
        again = stateful(transport)
        again.load_state_dict(state)
        return take(again, None)

    assert Counter(i for ids in run_in_threads(3, run) for i in ids) == everything()


def test_a_state_passes_through_torch_save_without_unpickling_objects(tmp_path: Path) -> None:
    def run(transport: Transport) -> list[int]:
        loader = replayed(transport)
        ids = take(loader, 2)
        path = tmp_path / f"{transport.rank}.pt"
        torch.save(loader.state_dict(), path)
        loader.close()
        again = replayed(transport)
        again.load_state_dict(torch.load(path, weights_only=True))
        return ids + take(again, None)

    assert Counter(i for ids in run_in_threads(3, run) for i in ids) == everything()


def test_parquet_goes_on_within_a_row_group(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    lengths = [(i * 31) % 17 for i in range(100)]
    pq.write_table(pa.table({"id": range(100), "uih": [list(range(n)) for n in lengths]}), path, row_group_size=13)

    def make(transport: Transport) -> Any:
        source = read_parquet(path, batch_size=4, rank=transport.rank, world_size=3)
        return balance(source, transport, lengths="uih")

    def run(transport: Transport) -> list[int]:
        loader, ids = make(transport), []
        for _ in range(4):
            for step, batch in enumerate(loader, 1):
                ids += batch["id"].values.tolist()
                if step == 2:
                    break
            state = loader.state_dict()
            loader.close()
            loader = make(transport)
            loader.load_state_dict(state)
        return ids + [i for batch in loader for i in batch["id"].values.tolist()]

    assert Counter(i for ids in run_in_threads(3, run) for i in ids) == Counter(range(100))


def test_the_state_of_a_partitioner_goes_with_the_step_it_belongs_to() -> None:
    def make(transport: Transport) -> tuple[Any, VariableBatchSize]:
        partitioner = VariableBatchSize(alpha=1.0, autotune=True)
        return balance(stateful(transport).dataloader, transport, "length", partitioner), partitioner

    def run(transport: Transport) -> tuple[list[list[int]], list[list[int]]]:
        loader, _ = make(transport)
        batches, states = [], []
        for batch, report in loader.with_reports():
            batches.append(batch["id"].tolist())
            loader.record_seconds(1.0 + transport.rank)
            report.loss_scale()
            states.append(copy.deepcopy(loader.state_dict()))
        loader, _ = make(transport)
        loader.load_state_dict(states[2])
        return batches[3:], [batch["id"].tolist() for batch in loader]

    for expected, got in run_in_threads(3, run):
        assert len(expected) == len(got) == 3


def test_a_shuffled_loader_without_a_state_is_refused_when_it_is_saved_and_on_every_rank_when_loaded() -> None:
    def run(transport: Transport) -> None:
        source = DataLoader(Samples(transport.rank), batch_size=3, shuffle=transport.rank == 1, collate_fn=collate)
        loader = balance(source, transport, lengths="length")
        state = loader.state_dict()
        take(loader, 1)
        if transport.rank == 1:
            with pytest.raises(ValueError, match="RandomSampler shuffles"):
                loader.state_dict()
            state = {**state, "step": 1, "source": {"taken": 1, "fingerprint": 0}}
        else:
            state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(PeerFailed, match=r"rank 1 .*StatefulDataLoader"):
            take(loader, None)

    run_in_threads(3, run)


def test_what_is_no_state_is_refused() -> None:
    def run(transport: Transport) -> None:
        loader = replayed(transport)
        with pytest.raises(ValueError, match="step"):
            loader.load_state_dict({"epoch": 1})
        with pytest.raises(ValueError, match="step must be"):
            loader.load_state_dict({**loader.state_dict(), "step": -1})

    run_in_threads(1, run)


def test_states_of_other_epochs_ranks_or_worlds_are_refused() -> None:
    states = run_in_threads(2, lambda transport: replayed(transport).state_dict())

    def run(transport: Transport) -> None:
        loader = replayed(transport)
        with pytest.raises(ValueError, match=f"saved by rank {1 - transport.rank} of 2, but this is rank"):
            loader.load_state_dict(states[1 - transport.rank])
        with pytest.raises(ValueError, match="of 3, but"):
            loader.load_state_dict({**states[transport.rank], "world_size": 3})
        with pytest.raises(TypeError, match="NoneType"):
            loader.load_state_dict(None)
        with pytest.raises(ValueError, match="exhausted"):
            loader.load_state_dict({**states[transport.rank], "exhausted": "no"})
        loader.load_state_dict({**states[transport.rank], "epoch": transport.rank})
        with pytest.raises(ProtocolError, match="rank 0 is in epoch 0 and rank 1 in epoch 1"):
            take(loader, None)

    run_in_threads(2, run)


def test_a_partitioner_that_refuses_its_state_leaves_the_loader_as_it_was() -> None:
    def run(transport: Transport) -> int:
        source = DataLoader(Samples(transport.rank), batch_size=3, collate_fn=collate)
        loader = balance(source, transport, "length", VariableBatchSize(autotune=True))
        state = loader.state_dict()
        with pytest.raises(ValueError, match="rank_step"):
            loader.load_state_dict({**state, "step": 2, "partitioner": {"rank_step": "wrong"}})
        return len(take(loader, None))

    assert run_in_threads(1, run) == [len(Samples(0))]


class ShufflesByItself:
    """Gives another order each time, and does not say so."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.generator = rank, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Any:
        order = torch.randperm(12, generator=self.generator)
        return iter([collate([Samples(0)[int(i)] for i in order[k : k + 3]]) for k in range(0, 12, 3)])


def test_a_loader_that_shuffles_without_saying_so_is_found_when_it_goes_on() -> None:
    def run(transport: Transport) -> None:
        loader = balance(ShufflesByItself(transport.rank, 1), transport, lengths="length")
        take(loader, 2)
        state = loader.state_dict()
        loader.close()
        again = balance(ShufflesByItself(transport.rank, 2), transport, lengths="length")
        again.load_state_dict(state)
        with pytest.raises(PeerFailed, match="batch 1 is not what it was"):
            take(again, None)

    run_in_threads(2, run)


def go_on_with(batches: Any, transport: Transport, changes: dict[str, Any]) -> None:
    """Stop after four of six batches, change the source's state, and go on over these."""
    loader = balance([collate([Samples(0)[i]]) for i in range(6)], transport, lengths="length")
    take(loader, 4)
    state = loader.state_dict()
    loader.close()
    kept = {name: value for name, value in {**state["source"], **changes}.items() if value is not None}
    again = balance(batches, transport, lengths="length")
    again.load_state_dict({**state, "source": kept})
    take(again, None)


def test_a_loader_that_became_shorter_is_found_when_it_goes_on() -> None:
    def run(transport: Transport) -> None:
        with pytest.raises(PeerFailed, match="saved after 4 batches, but the loader has only 2"):
            go_on_with([collate([Samples(0)[i]]) for i in range(2)], transport, {})

    run_in_threads(1, run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 3}, "state version must be 2, got 3: another version of freescale saved the state"),
        ({"version": None, "fingerprint": 5}, "batch 3 is not what .* unless another version of freescale saved"),
        ({"version": None}, None),  # the last states without a version have this checksum
    ],
)
def test_a_state_whose_checksum_another_version_took_says_so(changes: dict[str, Any], said: str | None) -> None:
    def run(transport: Transport) -> None:
        with nullcontext() if said is None else pytest.raises(PeerFailed, match=said):
            go_on_with([collate([Samples(0)[i]]) for i in range(6)], transport, changes)

    run_in_threads(1, run)
