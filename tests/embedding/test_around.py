"""First and last batches, evaluation, empty ranks, wrong ids, unusual orders: what is around a steady step."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from freescale.embedding import (
    Adam,
    EmbeddingError,
    IdOutOfRange,
    PrioritizedEmbeddingCollection,
    RowwiseAdagrad,
    Sgd,
    Table,
)
from freescale.transport import Transport, connect

from embedding_runs import Data, shard_of
from rank_threads import run_in_threads

ITEM = Table("item", 20, 4, ["item"])


def make(transport: Transport | None = None, **options: Any) -> PrioritizedEmbeddingCollection:
    options = {"optimizer": Sgd(lr=0.1), **options}
    return PrioritizedEmbeddingCollection([ITEM], transport or connect("local"), **options)


def ids(*numbers: int) -> dict[str, Tensor]:
    return {"item": torch.tensor(numbers, dtype=torch.int64)}


def both_orders(story: Callable[[PrioritizedEmbeddingCollection, int], None], world_size: int = 2) -> None:
    """A story told to a prioritized and a synchronous collection leaves the same weights."""

    def tell(transport: Transport, synchronous: bool) -> dict[str, Tensor]:
        tables = make(transport, optimizer=Adam(lr=0.1), synchronous=synchronous)
        story(tables, transport.rank)
        left = shard_of(tables)
        tables.close()
        return left

    ours = run_in_threads(world_size, lambda t: tell(t, False))
    theirs = run_in_threads(world_size, lambda t: tell(t, True))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert any(one["item.momentum1"].any() for one in ours)


def batch(rank: int, step: int) -> dict[str, Tensor]:
    return Data([ITEM], num_ids=8).batch(rank, step)


def test_an_evaluation_in_between_changes_nothing_and_sees_all_updates() -> None:
    def story(tables: PrioritizedEmbeddingCollection, rank: int) -> None:
        for step in range(8):
            tables.prefetch(batch(rank, step + 1))
            tables(batch(rank, step))["item"].square().sum().backward()
            if step % 3 == 1:
                tables.eval()
                tables.prefetch(batch(rank, 50))
                seen = tables(batch(rank, 50))["item"]
                with pytest.raises(EmbeddingError, match=r"eval mode does not train them: call train\(\) before it"):
                    seen.sum().backward()
                tables.train()
                with torch.no_grad():
                    assert torch.equal(tables(batch(rank, 50))["item"], seen)

    both_orders(story)


def test_evaluation_sees_deferred_updates() -> None:
    tables = make(gradient_division=False)
    tables.prefetch(ids(5))
    before = tables(ids(3))["item"]
    before.sum().backward()
    with torch.no_grad():
        assert torch.equal(tables(ids(3))["item"], before - 0.1)
    tables.close()


def test_a_forward_without_backward_updates_nothing_and_the_next_step_is_right() -> None:
    def story(tables: PrioritizedEmbeddingCollection, rank: int) -> None:
        for step in range(9):
            tables.prefetch(batch(rank, step + 1))
            loss = tables(batch(rank, step))["item"].square().sum()
            if step % 3 != 1:
                loss.backward()

    both_orders(story)


def test_two_hundred_forwards_without_backward_leave_memory_flat() -> None:
    tables = make()
    counts = []
    for step in range(200):
        tables.prefetch(batch(0, step + 1))
        tables(batch(0, step))
        if step in (49, 199):
            counts.append(settled_tensors())
    assert counts[-1] <= counts[0] + 5, counts
    tables.close()


def settled_tensors() -> int:
    """How many there are once the threads of the tables have done what they have to do: when the number stays."""
    looks = [-1, -2]
    while len(set(looks[-4:])) > 1:
        time.sleep(0.1)
        gc.collect()
        looks.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
        assert len(looks) < 100, looks
    return looks[-1]


def test_backwards_out_of_turn_are_iterations_of_their_own() -> None:
    def story(tables: PrioritizedEmbeddingCollection, rank: int) -> None:
        for step in range(0, 12, 2):
            tables.prefetch(batch(rank, step + 1))
            tables.prefetch(batch(rank, step + 2))
            first = tables(batch(rank, step))["item"].square().sum()
            second = tables(batch(rank, step + 1))["item"].square().sum()
            first.backward(retain_graph=True)
            first.backward()
            second.backward()
            assert tables(batch(rank, step + 2))["item"].requires_grad

    both_orders(story)


def test_the_end_of_the_data_and_a_new_epoch_need_no_care() -> None:
    def story(tables: PrioritizedEmbeddingCollection, rank: int) -> None:
        for _ in range(3):
            for step in range(4):
                if step < 3:
                    tables.prefetch(batch(rank, step + 1))
                tables(batch(rank, step))["item"].square().sum().backward()

    both_orders(story)


def test_a_first_batch_like_the_one_prefetched_is_told_apart_on_all_ranks() -> None:
    """Rank 1 has no ids in either batch, so only the others see which of the two comes first."""

    def story(tables: PrioritizedEmbeddingCollection, rank: int) -> None:
        first = ids(1, 2) if rank == 0 else ids()
        second = ids(2, 3) if rank == 0 else ids()
        tables.prefetch(second)
        tables(first)["item"].square().sum().backward()
        tables(second)["item"].square().sum().backward()

    both_orders(story)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_ids_at_all_are_fine(world_size: int) -> None:
    def story(transport: Transport) -> None:
        tables = make(transport, optimizer=RowwiseAdagrad(lr=0.1))
        before = shard_of(tables)
        for _ in range(3):
            tables.prefetch(ids())
            rows = tables(ids())["item"]
            assert rows.shape == (0, 4)
            rows.sum().backward()
        assert torch.equal(shard_of(tables)["item"], before["item"])
        tables.close()

    run_in_threads(world_size, story)


def test_fewer_rows_than_ranks_are_fine() -> None:
    def story(transport: Transport) -> Tensor:
        table = Table("tiny", 2, 3, init_fn=lambda rows: rows.fill_(1.0))
        tables = PrioritizedEmbeddingCollection([table], transport, optimizer=Sgd(lr=1.0))
        tables({"tiny": torch.tensor([1])})["tiny"].sum().backward()
        left = shard_of(tables)["tiny"]
        tables.close()
        return left

    assert [len(left) for left in run_in_threads(4, story)] == [1, 1, 0, 0]
    assert run_in_threads(4, story)[1].tolist() == [[0.0, 0.0, 0.0]]


def _step(tables: PrioritizedEmbeddingCollection, wrong: dict[str, Tensor], prefetched: bool) -> None:
    if prefetched:
        tables.prefetch(wrong)
        tables(ids(1))["item"].sum().backward()
    tables(wrong)


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("value", [-1, 20])
def test_an_id_out_of_range_is_an_error_on_every_rank(value: int, prefetched: bool) -> None:
    def story(transport: Transport) -> str:
        tables = make(transport)
        bad = ids(3, value) if transport.rank == 1 else ids(3)
        with pytest.raises(IdOutOfRange) as caught:
            _step(tables, bad, prefetched)
        tables.close()
        return str(caught.value)

    for said in run_in_threads(3, story):
        assert said == (
            f"ids of feature 'item' must be from 0 to 19, the rows of table 'item': got {value} at place 1 on rank 1"
        )


def test_another_batch_than_the_one_prefetched_is_refused() -> None:
    tables = make()
    tables.prefetch(ids(1, 2))
    tables(ids(1))
    with pytest.raises(EmbeddingError, match="feature 'item' was prefetched with 2 ids, forward got 3"):
        tables(ids(1, 2, 3))
    tables.reset()
    tables.prefetch(ids(1, 2))
    tables(ids(1))
    with pytest.raises(EmbeddingError, match="feature 'item' was prefetched with other ids"):
        tables(ids(2, 1))
    tables.close()


def test_a_loop_may_be_left_and_begun_again() -> None:
    def story(tables: PrioritizedEmbeddingCollection, rank: int) -> None:
        for _ in range(2):
            tables.prefetch(batch(rank, 1))
            for step in range(5):
                tables.prefetch(batch(rank, step + 2))
                tables(batch(rank, step))["item"].square().sum().backward()
                if step == 2:
                    tables.reset()
                    break

    both_orders(story)


def test_batches_that_nobody_takes_are_refused() -> None:
    tables = make()
    for step in range(16):
        tables.prefetch(ids(step))
    with pytest.raises(EmbeddingError, match="prefetch was called for 16 batches that no forward has taken"):
        tables.prefetch(ids(1))
    tables.close()


def test_ranks_out_of_step_are_told_so() -> None:
    def story(transport: Transport) -> None:
        tables = make(transport)
        if transport.rank == 1:
            tables.prefetch(ids(2))
        tables(ids(1))["item"].sum().backward()

    with pytest.raises(
        RuntimeError, match=r"at forward #0, rank 1 at prefetch #0|at prefetch #0, rank 0 at forward #0"
    ):
        run_in_threads(2, story)


@pytest.mark.parametrize("reentrant", [False, True])
def test_lookups_inside_activation_checkpointing_are_refused(reentrant: bool) -> None:
    tables, factor = make(), torch.ones((), requires_grad=True)
    with pytest.raises(EmbeddingError, match="outside of activation checkpointing"):
        checkpoint(lambda x: tables(ids(1))["item"].sum() * x, factor, use_reentrant=reentrant).backward()
    tables.close()


def test_gradients_are_unscaled_and_strange_rows_left_out() -> None:
    scale = [65536.0]
    tables = make(grad_scale=lambda: scale[0])
    before = shard_of(tables)["item"]
    tables.prefetch(ids(2, 4))
    (tables(ids(1, 2))["item"].sum() * scale[0]).backward()
    assert torch.equal(shard_of(tables)["item"][1:3], before[1:3] - 0.1)
    rows = tables(ids(2, 4))["item"]
    (rows * torch.tensor([[1.0], [float("nan")]])).sum().backward()
    scale[0] = 1.0
    after = shard_of(tables)["item"]
    assert torch.equal(after[4], before[4])
    assert torch.equal(after[2], before[2] - 0.1 - torch.tensor(0.1) * (1 / 65536))
    assert tables.num_skipped_rows == 1
    tables.close()


def test_a_scaler_of_torch_is_understood() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tables = make(grad_scale=scaler)
    before = shard_of(tables)["item"]
    scaler.scale(tables(ids(1))["item"].sum()).backward()
    assert torch.equal(shard_of(tables)["item"][1], before[1] - 0.1)
    tables.close()


def test_schedulers_change_the_rate_of_the_iteration_they_belong_to() -> None:
    tables = make()
    scheduler = torch.optim.lr_scheduler.StepLR(tables.fused_optimizer, step_size=1, gamma=0.5)
    before = shard_of(tables)["item"]
    tables.prefetch(ids(9))
    tables(ids(1))["item"].sum().backward()  # deferred
    scheduler.step()  # would warn of a step that is missing
    assert tables.fused_optimizer.param_groups[0]["lr"] == 0.05
    assert torch.equal(shard_of(tables)["item"][1], before[1] - 0.1)
    tables(ids(9))["item"].sum().backward()
    assert torch.equal(shard_of(tables)["item"][9], before[9] - 0.05)
    tables.close()


def test_tables_do_not_depend_on_the_number_of_ranks() -> None:
    configs = [
        Table("item", 40000, 2),
        Table("user", 9, 3, init_fn=torch.nn.init.normal_),
        Table("shop", 9, 3, init_fn=torch.nn.init.normal_),
    ]
    state = torch.random.get_rng_state()

    def story(transport: Transport) -> dict[str, Tensor]:
        return shard_of(PrioritizedEmbeddingCollection(configs, transport, optimizer=Sgd(lr=1.0), seed=7))

    (whole,) = run_in_threads(1, story)
    parts = run_in_threads(3, story)
    for name, weight in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), weight)
    assert not torch.equal(whole["user"], whole["shop"])
    assert whole["item"].abs().max() <= 40000**-0.5
    assert whole["item"].unique().numel() > 30000
    assert torch.equal(torch.random.get_rng_state(), state)


def test_threads_end_with_the_collection() -> None:
    def ours() -> set[threading.Thread]:
        gc.collect()
        return {thread for thread in threading.enumerate() if thread.name.startswith("freescale-embedding")}

    before = ours()  # of earlier tests, which may be about to end
    tables = make()
    tables(ids(1))
    made = ours() - before
    assert made
    del tables
    deadline = time.monotonic() + 60
    while ours() & made and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ours() & made


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Sgd(lr=-1.0), "lr must be a finite number and not negative, got -1.0"),
        (lambda: Adam(lr=0.1, beta2=1.0), "beta2 must be below 1, got 1.0"),
        (lambda: RowwiseAdagrad(lr=0.1, eps=float("nan")), "eps must be a finite number"),
        (lambda: Table("a", 0, 4), "num_embeddings of table 'a' must be at least 1, got 0"),
        (lambda: Table("a", 4, 4, dtype=torch.float64), "dtype of table 'a' must be one of"),
        (lambda: Table("a", 4, 4, padding_idx=4), "padding_idx of table 'a' must be from 0 to 3, got 4"),
        (lambda: PrioritizedEmbeddingCollection([], connect("local"), optimizer=Sgd(lr=1.0)), "at least one table"),
        (
            lambda: PrioritizedEmbeddingCollection([ITEM, ITEM], connect("local"), optimizer=Sgd(lr=1.0)),
            "names of tables must be unique, got 'item' twice",
        ),
        (
            lambda: PrioritizedEmbeddingCollection([ITEM], connect("local"), optimizer={"user": Sgd(lr=1.0)}),
            "got none for 'item'",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_features_of_a_wrong_kind_are_named() -> None:
    tables = make()
    with pytest.raises(KeyError, match="must have 'item' to look up, got"):
        tables({"user": torch.tensor([1])})
    with pytest.raises(TypeError, match=r"ids of 'item' must be a tensor of int64 or int32, got torch\.float32"):
        tables({"item": torch.tensor([1.0])})
    with pytest.raises(TypeError, match="configs must be Table or torchrec's EmbeddingConfig, got str"):
        PrioritizedEmbeddingCollection(["item"], connect("local"), optimizer=Sgd(lr=1.0))
    with pytest.raises(TypeError, match="optimizer must be Sgd, RowwiseAdagrad or Adam, got float"):
        PrioritizedEmbeddingCollection([ITEM], connect("local"), optimizer=0.1)  # type: ignore[arg-type]


def test_ids_of_any_shape_and_integer_type_are_taken() -> None:
    tables = make()
    numbers = torch.tensor([[1, 2, 3], [3, 2, 1]], dtype=torch.int32)
    rows = tables({"item": numbers})["item"]
    assert rows.shape == (2, 3, 4)
    assert torch.equal(rows, shard_of(tables)["item"][numbers.long()])
    tables.close()
