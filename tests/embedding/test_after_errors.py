"""What still works after an error, and what must not: ids out of range, failed backwards, ranks made differently."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.embedding import Adam, EmbeddingError, IdOutOfRange, PrioritizedEmbeddingCollection, Sgd, Table
from freescale.transport import Transport, TransportClosed, TransportError

from embedding_runs import shard_of
from rank_threads import run_in_threads

ITEM = Table("item", 20, 4, ["item"])


def make(transport: Transport, **options: Any) -> PrioritizedEmbeddingCollection:
    return PrioritizedEmbeddingCollection([ITEM], transport, **{"optimizer": Adam(lr=0.1), **options})


def ids(*numbers: int) -> dict[str, Tensor]:
    return {"item": torch.tensor(numbers, dtype=torch.int64)}


def train(tables: PrioritizedEmbeddingCollection, steps: range, last: bool = True) -> None:
    """Prefetches one batch ahead; at the end none unless `last` is False."""
    for step in steps:
        if not last or step + 1 < steps.stop:
            tables.prefetch(ids(step + 1, step + 3))
        tables(ids(step, step + 2))["item"].square().sum().backward()


def look_up(tables: PrioritizedEmbeddingCollection, batches: list[dict[str, Tensor]]) -> None:
    for batch in batches:
        tables.prefetch(batch)
    for batch in batches:
        tables.prefetch(ids(8))
        tables(batch)


def bad_on(rank: int, transport: Transport) -> dict[str, Tensor]:
    return ids(3, 99) if transport.rank == rank else ids(3)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("synchronous", [False, True])
def test_after_an_id_out_of_range_all_can_be_saved_and_training_goes_on_after_reset(
    ahead: int, synchronous: bool, tmp_path: Path
) -> None:
    def story(transport: Transport, breaks: bool) -> dict[str, Tensor]:
        tables = make(transport, synchronous=synchronous)
        train(tables, range(3))
        if breaks:
            batches = [ids(4), ids(5), ids(6), ids(7)]
            batches[ahead] = bad_on(1, transport)
            with pytest.raises(IdOutOfRange, match="got 99 at place 1 on rank 1"):
                look_up(tables, batches[: ahead + 1])
            tables.flush()
            tables.save_sharded(tmp_path)
            assert torch.equal(tables.state_dict()["embeddings.item.weight"], shard_of(tables)["item"])
            with torch.no_grad():
                assert tables(ids(1))["item"].shape == (1, 4)
            with pytest.raises(IdOutOfRange) as again:
                tables(bad_on(1, transport))
            assert len(again.value.__notes__) == 1
            tables.reset()
        train(tables, range(3, 8), last=False)
        left = shard_of(tables)
        tables.close()
        return left

    expected = run_in_threads(3, lambda t: story(t, False))
    found = run_in_threads(3, lambda t: story(t, True))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_after_an_id_out_of_range_in_an_evaluation_training_goes_on_at_once() -> None:
    def story(transport: Transport, breaks: bool) -> dict[str, Tensor]:
        tables = make(transport)
        train(tables, range(3), last=False)
        if breaks:
            with torch.no_grad(), pytest.raises(IdOutOfRange, match="got 99 at place 1 on rank 0"):
                tables(bad_on(0, transport))
        train(tables, range(3, 8), last=False)
        left = shard_of(tables)
        tables.close()
        return left

    expected = run_in_threads(2, lambda t: story(t, False))
    found = run_in_threads(2, lambda t: story(t, True))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (lambda rank: {"optimizer": Adam(lr=0.1 + (rank == 1))}, r"optimizer must be the same .*Adam\(lr="),
        (lambda rank: {"optimizer": Adam(lr=0.1) if rank else Sgd(lr=0.1)}, "optimizer must be the same on all ranks"),
        (lambda rank: {"synchronous": rank == 1}, "synchronous must be the same on all ranks"),
        (lambda rank: {"wire_dtype": torch.bfloat16 if rank else None}, "wire_dtype must be the same on all ranks"),
        (lambda rank: {"gradient_division": rank == 1}, "gradient_division must be the same on all ranks"),
        (lambda rank: {"configs": [Table("item", 20 + rank, 4)]}, r"tables must be .* rank \d has item \[2\d, 4\]"),
        (lambda rank: {"configs": [Table("item", 20, 4), Table("user", 2, 4)][: 1 + rank]}, "tables must be the same"),
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_ranks_made_with_different_settings_are_all_told_which(option: Any, words: str, evaluates: bool) -> None:
    def story(transport: Transport) -> None:
        options = {"configs": [ITEM], "optimizer": Adam(lr=0.1), **option(transport.rank)}
        tables = PrioritizedEmbeddingCollection(options.pop("configs"), transport, **options)
        batch = {**ids(1), "user": torch.tensor([1])}
        with pytest.raises(EmbeddingError, match=words), torch.set_grad_enabled(not evaluates):
            tables(batch)
        tables.close()

    run_in_threads(3, story)


def test_rates_may_differ_from_those_the_tables_were_made_with() -> None:
    def story(transport: Transport) -> None:
        tables = make(transport)
        tables.fused_optimizer.param_groups[0]["lr"] = 0.5
        train(tables, range(3))
        tables.close()

    run_in_threads(2, story)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_prefetch_too_many_on_one_rank_is_told_as_that(world_size: int) -> None:
    def story(transport: Transport) -> str:
        tables = make(transport)
        tables.prefetch(ids(2))
        if transport.rank == 1:
            tables.prefetch(ids(3))
        with pytest.raises((EmbeddingError, TransportClosed)) as caught:  # who is told first hangs up
            train(tables, range(3))
        tables.close()
        return str(caught.value)

    told = run_in_threads(world_size, story)
    assert any("prefetch #2" in each and "comparison #2" in each for each in told), told


@pytest.mark.parametrize("prefetches", [False, True])
def test_after_a_failed_backward_nobody_gets_weights(prefetches: bool, tmp_path: Path) -> None:
    """Rank 1 is gone when rank 0's gradients should travel."""

    def story(transport: Transport) -> None:
        tables = make(transport)
        train(tables, range(3), last=not prefetches)
        loss = tables(ids(3, 5))["item"].sum()
        if prefetches:
            tables.prefetch(ids(4))
        if transport.rank == 1:
            tables.close()
            transport.close()
            return
        with pytest.raises(TransportError):
            loss.backward()
        for call in (
            tables.state_dict,
            tables.fused_optimizer.state_dict,
            tables.flush,
            tables.reset,
            lambda: tables.save_sharded(tmp_path),
        ):
            with pytest.raises(TransportError, match="a backward failed, and weights may be updated in part"):
                call()
        with pytest.raises(TransportError):
            tables(ids(1))
        assert not list(tmp_path.iterdir())
        tables.close()

    run_in_threads(2, story)


def test_errors_of_ids_can_be_sent_to_other_processes() -> None:
    original = IdOutOfRange(1, "item", 20, "clicked", 3, 99)
    original.add_note("the trainer was at embedding forward, step 7")
    error = original.within("pages")
    received = pickle.loads(pickle.dumps(error))
    assert str(received) == str(error)
    assert received.__notes__ == original.__notes__
    assert str(error).startswith("ids that 'pages' looks up must be from 0 to 19, the rows of table 'item': got 99")
