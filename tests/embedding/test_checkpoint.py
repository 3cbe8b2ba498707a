"""What is saved on some ranks loads on others; loading forgets rows that were fetched ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor

from freescale.embedding import Adam, EmbeddingError, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table
from freescale.transport import Transport, connect

from embedding_runs import Data, shard_of
from rank_threads import run_in_threads

TABLES = [Table("item", 21, 4, ["clicked", "shown"]), Table("user", 3, 4)]
DATA = Data(TABLES)


def make(transport: Transport, optimizer: Any = None, seed: int = 0) -> PrioritizedEmbeddingCollection:
    return PrioritizedEmbeddingCollection(TABLES, transport, optimizer=optimizer or Adam(lr=0.1), seed=seed)


def step(tables: PrioritizedEmbeddingCollection, rank: int, number: int) -> None:
    tables.prefetch(DATA.batch(rank, number + 1))
    rows = tables(DATA.batch(rank, number))
    sum((each * each).sum() for each in rows.values()).backward()


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_files_of_three_ranks_load_on_any_number(world_size: int, tmp_path: Path) -> None:
    def save(transport: Transport) -> dict[str, Tensor]:
        tables = make(transport)
        for number in range(4):
            step(tables, transport.rank, number)
        tables.save_sharded(tmp_path)
        return shard_of(tables)

    def load(transport: Transport) -> dict[str, Tensor]:
        tables = make(transport, seed=1)
        tables.load_sharded(str(tmp_path))
        assert tables._engine.shards[0].step == 4
        return shard_of(tables)

    saved, loaded = whole(run_in_threads(3, save)), whole(run_in_threads(world_size, load))
    assert saved["item.momentum2"].any()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks the files of ranks \[0\]"):
        make(connect("local")).load_sharded(tmp_path)
    make(connect("local")).save_sharded(tmp_path)
    with pytest.raises(ValueError, match="another optimizer"):
        make(connect("local"), Sgd(lr=0.1)).load_sharded(tmp_path)
    other = PrioritizedEmbeddingCollection([Table("shop", 2, 4)], connect("local"), optimizer=Adam(lr=0.1))
    with pytest.raises(ValueError, match=r"must hold tables \['shop'\], got \['item', 'user'\]"):
        other.load_sharded(tmp_path)
    torch.save({}, tmp_path / "rank_0_of_2.pt")
    with pytest.raises(ValueError, match=r"must hold the files of one save, got those of \[1, 2\] ranks"):
        make(connect("local")).load_sharded(tmp_path)


def test_a_save_that_breaks_off_leaves_the_one_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make(connect("local"))
    step(tables, 0, 0)
    tables.save_sharded(tmp_path)
    before = shard_of(tables)
    step(tables, 0, 1)

    def full_disk(_: object, file: BinaryIO) -> None:
        file.write(b"half a file")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="No space left"):
            tables.save_sharded(tmp_path)
    tables.load_sharded(tmp_path)
    for name, value in shard_of(tables).items():
        assert torch.equal(value, before[name]), name
    tables.close()


def test_a_save_beside_that_of_another_number_of_ranks_is_refused_and_leaves_it_whole(tmp_path: Path) -> None:
    def save(transport: Transport) -> None:
        tables = make(transport)
        step(tables, transport.rank, 0)
        tables.save_sharded(tmp_path)
        tables.close()

    run_in_threads(3, save)
    run_in_threads(3, save)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"no files of another number of ranks than 2, got those of \[3\]"):
        run_in_threads(2, save)
    assert sorted(tmp_path.iterdir()) == before
    make(connect("local")).load_sharded(tmp_path)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), RowwiseAdagrad(lr=0.1)], ids=lambda each: type(each).__name__)
def test_training_goes_on_from_state_dicts_as_if_nothing_had_happened(optimizer: Any) -> None:
    def story(transport: Transport) -> list[dict[str, Tensor]]:
        tables = make(transport, optimizer)
        for number in range(3):
            step(tables, transport.rank, number)
        state = copy.deepcopy((dict(tables.state_dict()), tables.fused_optimizer.state_dict()))
        results = []
        for _ in range(2):
            for number in range(3, 6):
                step(tables, transport.rank, number)
            results.append(shard_of(tables))
            assert tables.load_state_dict(state[0]).missing_keys == []
            tables.fused_optimizer.load_state_dict(state[1])
        tables.close()
        return results

    for first, second in run_in_threads(2, story):
        for name, value in first.items():
            assert torch.equal(second[name], value), name


def test_loading_forgets_rows_that_were_fetched_ahead() -> None:
    tables = make(connect("local"), Sgd(lr=0.1))
    step(tables, 0, 0)
    loaded = {key: torch.full_like(value, 7.0) for key, value in tables.state_dict().items()}
    tables.load_state_dict(loaded)
    for rows in tables(DATA.batch(0, 1)).values():
        assert (rows == 7.0).all()
    tables.close()


def test_whole_tables_load_on_every_rank() -> None:
    full = {"embeddings.item.weight": torch.randn(21, 4), "embeddings.user.weight": torch.randn(3, 4)}

    def story(transport: Transport) -> dict[str, Tensor]:
        tables = make(transport)
        tables.load_state_dict(full)
        return shard_of(tables)

    loaded = whole(run_in_threads(2, story))
    assert torch.equal(loaded["item"], full["embeddings.item.weight"])
    assert torch.equal(loaded["user"], full["embeddings.user.weight"])


def test_a_state_dict_is_that_of_an_embedding_collection() -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    from torchrec import EmbeddingCollection, EmbeddingConfig

    configs = [
        EmbeddingConfig(name=t.name, embedding_dim=4, num_embeddings=t.num_embeddings, feature_names=list(t.features))
        for t in TABLES
    ]
    plain = EmbeddingCollection(tables=configs)
    tables = PrioritizedEmbeddingCollection(configs, connect("local"), optimizer=Sgd(lr=0.1))
    plain.load_state_dict(tables.state_dict())
    for name, value in tables.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("embeddings.user.weight"), 'Missing key.*"embeddings.user.weight"'),
        (lambda state: state.update(extra=torch.ones(1)), 'Unexpected key.*"extra"'),
        (lambda state: state.update({"embeddings.user.weight": torch.ones(4, 4)}), r"must have shape \[3, 4\]"),
    ],
)  # fmt: skip
def test_state_dicts_that_do_not_fit_are_refused(change: Callable[[Any], object], words: str) -> None:
    tables = make(connect("local"))
    state = dict(tables.state_dict())
    change(state)
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        tables.load_state_dict(state)


def test_optimizer_states_that_do_not_fit_are_refused() -> None:
    adam, adagrad = make(connect("local")), make(connect("local"), RowwiseAdagrad(lr=0.1))
    with pytest.raises(ValueError, match=r"state of table 'item' must have \['momentum1', 'momentum2', 'step'\], got"):
        adam.fused_optimizer.load_state_dict(adagrad.fused_optimizer.state_dict())
    with pytest.raises(ValueError, match=r"state must be of tables \['item', 'user'\], got \[\]"):
        adam.fused_optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_weights_are_neither_parameters_nor_buffers_and_move_by_dtype() -> None:
    tables = make(connect("local"))
    assert list(tables.parameters()) == list(tables.buffers()) == []
    before = shard_of(tables)["item"]
    tables.to(torch.bfloat16)
    assert torch.equal(shard_of(tables)["item"], before.to(torch.bfloat16))
    assert shard_of(tables)["item.momentum1"].dtype == torch.float32
    assert tables.fused_optimizer.param_groups[0]["params"][0].dtype == torch.bfloat16
    step(tables, 0, 0)
    tables.close()


def test_copies_are_refused() -> None:
    with pytest.raises(EmbeddingError, match="cannot be copied"):
        copy.deepcopy(make(connect("local")))
