"""The staged pipeline: same weights as a plain loop, everything ahead in order, honest seconds, nothing lost."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from freescale.balancer import (
    CostModel,
    JaggedBatch,
    Report,
    StagedPipeline,
    VariableBatchSize,
    WorldSamples,
    balance,
    greedy_batch_size,
)
from freescale.transport import Transport, connect

from rank_threads import run_in_threads
from staged_training import Batches, Model, Sgd, batch_of, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), weights_of(other), strict=True))


def test_it_trains_what_a_plain_loop_trains_on_every_rank() -> None:
    def run(transport: Transport) -> None:
        plain, staged = Model(), Model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        source = Batches(6, transport.rank)
        for batch, report in balance(source, transport, "uih").with_reports():
            optimizer.zero_grad()
            loss_of(plain(batch), batch, report).backward()
            optimizer.step()
        loader = balance(source, transport, "uih")
        pipeline = StagedPipeline(staged, torch.optim.SGD(staged.parameters(), lr=0.05), loader, loss_fn=loss_of)
        assert len(list(pipeline)) == 6
        assert not torch.equal(plain.score.weight, Model().score.weight)
        assert_same_weights(plain, staged)

    run_in_threads(3, run)


def test_batches_are_taken_and_prefetched_three_ahead_between_forward_and_backward() -> None:
    calls: list[str] = []
    model = Model(calls)
    pipeline = StagedPipeline(model, Sgd(model, calls), loss_fn=loss_of)
    model.score.bias.register_post_accumulate_grad_hook(lambda _: calls.append("backward"))
    iterator = iter(Batches(4, calls=calls))
    for _ in range(4):
        pipeline.progress(iterator)
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    ahead = [f"{what} {i}" for i in range(3) for what in ("load", "prefetch")]
    first = [*ahead, "forward 0", "load 3", "prefetch 3", "backward", "step"]
    assert calls == [*first, *(each for i in (1, 2, 3) for each in (f"forward {i}", "backward", "step"))]


def test_another_iterator_begins_another_epoch() -> None:
    model = Model()
    loader = balance(Batches(2), connect("local"), "uih")
    pipeline = StagedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.05), loader, loss_fn=loss_of)
    assert [len(list(pipeline)) for _ in range(3)] == [2, 2, 2]
    iterator = loader.with_reports()
    assert pipeline.progress(iterator)["scores"].shape == (4,)


def test_reports_belong_to_their_batches_whichever_iterator_gives_them() -> None:
    for pairs in (False, True):
        seen: list[tuple[int, int]] = []

        def metrics(output: Any, batch: JaggedBatch, report: Report | None, seen: Any = seen) -> None:
            assert report is not None
            seen.append((int(batch["id"].values[0]) // 100, report.step))

        model = Model()
        loader = balance(Batches(4), connect("local"), "uih")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pipeline = StagedPipeline(
            model, optimizer, None if pairs else loader, loss_fn=lambda o, b, r: o["scores"].sum(), metrics=metrics
        )
        iterator: Iterator[Any] = loader.with_reports() if pairs else iter(loader)
        for _ in range(4):
            pipeline.progress(iterator)
        assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("form", ["loss", "pair", "triple"])
def test_a_model_may_return_its_own_loss(form: str) -> None:
    class OwnLoss(Model):
        def forward(self, batch: JaggedBatch) -> Any:
            scores = super().forward(batch)["scores"]
            loss = (scores - batch["label"].values).square().mean()
            return {"loss": loss, "pair": (loss, scores), "triple": [loss, scores, batch]}[form]

    own, other = OwnLoss(), Model()
    pipeline = StagedPipeline(own, torch.optim.SGD(own.parameters(), lr=0.05), Batches(2))
    outputs = list(pipeline)
    scores = outputs[0][0] if form == "triple" else outputs[0]
    assert scores.shape == {"loss": (), "pair": (4,), "triple": (4,)}[form]
    reference = StagedPipeline(
        other,
        torch.optim.SGD(other.parameters(), lr=0.05),
        Batches(2),
        loss_fn=lambda o, b, r: (o["scores"] - b["label"].values).square().mean(),
    )
    list(reference)
    assert_same_weights(own, other)


def test_a_batch_is_prepared_before_anything_sees_it() -> None:
    calls: list[str] = []
    model = Model(calls)

    def double(batch: JaggedBatch, report: Report | None) -> JaggedBatch:
        assert report is not None
        calls.append(f"prepare {report.step}")
        return JaggedBatch.concat([batch, batch])

    loader = balance(Batches(2), connect("local"), "uih")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outputs = list(StagedPipeline(model, optimizer, loader, loss_fn=loss_of, prepare=double))
    assert [len(output["scores"]) for output in outputs] == [8, 8]
    assert calls == ["prepare 0", "prefetch 0", "prepare 1", "prefetch 1", "forward 0", "forward 1"]


class Ticks:
    """A clock that stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gathering(nn.Module):
    """Prefetches nothing, but waits for peers."""

    waits_for_peers = True

    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, scores: Tensor) -> Tensor:
        self.clock.now += 700
        return scores


class TimedModel(Model):
    """A second a sample forward, two backward; its table waits for peers, and so does data parallelism at the end."""

    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.clock = clock
        self.scatter = Gathering(clock)

    def forward(self, batch: JaggedBatch) -> dict[str, Tensor]:
        output = super().forward(batch)
        self.clock.now += batch.batch_size
        output["scores"] = self.scatter(output["scores"])
        output["scores"].register_hook(self.compute_backward)
        return output

    def compute_backward(self, grad: Tensor) -> None:
        self.clock.now += 2 * len(grad)


def test_seconds_are_those_of_compute_alone_and_reach_the_partitioner_with_their_step() -> None:
    told: list[list[tuple[int, float, int]]] = []

    def run(transport: Transport) -> None:
        clock = Ticks()
        mine: list[tuple[int, float, int]] = []
        steps = itertools.count()

        def partitioner(world: WorldSamples) -> Tensor:
            rank = transport.rank
            if world.measured is not None and world.seconds_step[rank] >= 0:
                load = int((world.measured.rank == rank).sum())
                mine.append((int(world.seconds_step[rank]), float(world.seconds[rank]), load))
            return (torch.arange(8) > next(steps) % 7).long()  # another load in each step

        model = TimedModel(clock)
        plain_forward = model.table.forward

        def waiting_forward(batch: JaggedBatch) -> Tensor:
            clock.now += 1000
            return plain_forward(batch)

        model.table.forward = waiting_forward  # type: ignore[method-assign]
        wait_for_peers = lambda: setattr(clock, "now", clock.now + 5000)  # noqa: E731
        model.score.weight.register_post_accumulate_grad_hook(
            lambda _: torch.autograd.Variable._execution_engine.queue_callback(wait_for_peers)
        )
        loader = balance(Batches(20, transport.rank), transport, "uih", partitioner, prefetch=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        assert len(list(StagedPipeline(model, optimizer, loader, loss_fn=loss_of, clock=clock))) == 20
        assert clock.now > 20 * 6000
        told.append(mine)

    run_in_threads(2, run)
    for mine in told:
        assert len({load for _, _, load in mine}) >= 3, mine
        assert all(seconds == 3 * load for _, seconds, load in mine), mine


def test_seconds_of_an_epoch_that_was_left_are_told_to_no_step_of_the_next_one() -> None:
    model = Model()
    loader = balance(Batches(5), connect("local"), "uih", greedy_batch_size(cost=CostModel()))
    told: list[int] = []
    tell = loader.record_seconds

    def note(seconds: float, step: int | None = None) -> None:
        assert step is not None
        told.append(step)
        tell(seconds, step)

    loader.record_seconds = note  # type: ignore[method-assign]
    pipeline = StagedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.05), loader, loss_fn=loss_of)
    pipeline.progress(loader.with_reports())
    assert told == [0]
    assert len(list(pipeline)) == 3 + 5  # what was taken ahead of the first epoch, then all of the second
    assert told == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("autotune", [False, True])
def test_nobody_takes_the_time_where_the_partitioner_does_not_read_it(autotune: bool) -> None:
    marks = 0

    def clock() -> float:
        nonlocal marks
        marks += 1
        return float(marks)

    model = Model()
    loader = balance(Batches(4), connect("local"), "uih", VariableBatchSize(autotune=autotune))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert len(list(StagedPipeline(model, optimizer, loader, loss_fn=loss_of, clock=clock))) == 4
    assert (marks > 0) == autotune == loader.reads_seconds


def test_another_batch_is_made_from_the_backward_pass_on_and_at_once_where_none_is_trained_on() -> None:
    calls: list[str] = []
    model = Model()
    model.score.register_forward_hook(lambda *_: calls.append("forward"))
    model.score.bias.register_post_accumulate_grad_hook(lambda _: calls.append("backward"))
    loader = balance(Batches(9), connect("local"), "uih", prefetch=1)
    iterator = loader.with_reports()
    assert loader._worker is not None
    release = loader._worker._room.release

    def note_and_release() -> None:
        calls.append("room")
        release()

    def prepare(batch: JaggedBatch, report: Report | None) -> JaggedBatch:
        calls.append("prepare")
        return batch

    loader._worker._room.release = note_and_release  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pipeline = StagedPipeline(model, optimizer, loader, loss_fn=loss_of, prepare=prepare)
    pipeline.progress(iterator)
    assert calls == 3 * ["room", "prepare"] + ["forward", "prepare", "room", "backward"]
    del calls[:]
    pipeline.progress(iterator)
    model.eval()
    pipeline.progress(iterator)
    assert calls == ["forward", "prepare", "room", "backward", "forward"]
    del calls[:]
    next(iterator)
    assert calls == ["room"]
    loader.close()


def test_a_batch_that_cannot_be_prepared_leaves_room_for_the_next_one() -> None:
    model = Model()
    loader = balance(Batches(6), connect("local"), "uih", prefetch=1)
    taken: list[int] = []

    def prepare(batch: JaggedBatch, report: Report | None) -> JaggedBatch:
        taken.append(0)
        if len(taken) == 4:
            raise ValueError("not this one")
        return batch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pipeline = StagedPipeline(model, optimizer, loader, loss_fn=loss_of, prepare=prepare)
    iterator = loader.with_reports()
    with pytest.raises(ValueError, match="not this one"):
        pipeline.progress(iterator)
    assert len(list(iter(lambda: next(iterator, None), None))) == 2


def test_a_run_that_stops_goes_on_with_the_first_batch_that_was_not_trained_on() -> None:
    def run(transport: Transport) -> list[int]:
        trained: list[int] = []

        def note(output: Any, batch: JaggedBatch, report: Any) -> None:
            trained.extend(batch["id"].values.tolist())

        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = balance(Batches(7, transport.rank), transport, "uih")
        pipeline = StagedPipeline(model, optimizer, loader, loss_fn=loss_of, metrics=note)
        begun = pipeline.state_dict()
        iterator = iter(loader)
        for _ in range(3):
            pipeline.progress(iterator)
        state = copy.deepcopy(pipeline.state_dict())
        assert (begun["step"], state["step"]) == (0, 3)
        loader.close()
        again = balance(Batches(7, transport.rank), transport, "uih")
        again.load_state_dict(state)
        second = StagedPipeline(model, optimizer, again, loss_fn=loss_of, metrics=note)
        assert len(list(second)) == 4
        assert second.state_dict()["step"] == 0
        assert second.state_dict()["epoch"] == 1
        return trained

    trained = Counter(i for rank in run_in_threads(2, run) for i in rank)
    assert trained == Counter(i for r in range(2) for s in range(7) for i in batch_of(s, r)["id"].values.tolist())


def test_detach_leaves_the_model_as_it_was() -> None:
    calls: list[str] = []
    model = Model(calls)
    pipeline = StagedPipeline(model, Sgd(model, []), loss_fn=loss_of)
    iterator = iter(Batches(4))
    pipeline.progress(iterator)
    assert pipeline.detach() is model
    assert not model.table._forward_hooks
    assert not model.table._forward_pre_hooks
    assert calls[-1] == "prefetch 3"
    pipeline.progress(iterator)
    assert calls[-1] == "forward 1"


def test_evaluation_runs_forward_and_metrics_alone() -> None:
    calls: list[str] = []
    model = Model(calls)
    before = weights_of(model)
    scored: list[Tensor] = []
    pipeline = StagedPipeline(
        model, Sgd(model, calls), Batches(2), loss_fn=loss_of, metrics=lambda o, b, r: scored.append(o["scores"])
    )
    model.eval()
    list(pipeline)
    assert calls == ["forward 0", "forward 1"]
    assert len(scored) == 2
    assert not scored[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))


def test_a_grad_scaler_scales_the_loss_and_steps_the_optimizer() -> None:
    plain, scaled = Model(), Model()
    for model, scaler in ((plain, None), (scaled, torch.amp.GradScaler("cpu", init_scale=1024.0))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        list(StagedPipeline(model, optimizer, Batches(3), loss_fn=loss_of, grad_scaler=scaler))
    assert_same_weights(plain, scaled)
    steps: list[str] = []
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pipeline = StagedPipeline(
        model, Sgd(model, steps), Batches(2), loss_fn=lambda o, b, r: o["scores"].sum() * torch.inf, grad_scaler=scaler
    )
    list(pipeline)
    assert steps == []
    assert scaler.get_scale() == 256.0


def test_every_stage_has_a_name_in_a_trace() -> None:
    model = Model()
    loader = balance(Batches(3), connect("local"), "uih")
    pipeline = StagedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.05), loader, loss_fn=loss_of)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        list(pipeline)
    counts = Counter(event.name for event in trace.events() if event.name.startswith("freescale."))
    assert counts == {
        "freescale.data_loading": 7,  # one before each forward, one after it, and one that finds the end
        "freescale.prefetch table": 3,
        "freescale.forward": 3,
        "freescale.backward": 3,
        "freescale.optimizer": 3,
        "freescale.metrics": 3,
    }


class AsksForMore(nn.Module):
    """As TorchRec's sharded modules: a prefetch that is not ours."""

    def prefetch(self, ctx: Any, dist_input: Any, forward_stream: Any = None) -> None:
        raise AssertionError("not ours")

    def forward(self, batch: JaggedBatch) -> Tensor:
        return torch.zeros(())


def test_modules_get_their_part_of_the_batch_and_other_prefetches_are_left_alone() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.other = AsksForMore()

    model = Two()
    got: list[Tensor] = []
    model.table.prefetch = got.append  # type: ignore[method-assign, assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    list(StagedPipeline(model, optimizer, Batches(2), loss_fn=loss_of, ids={"table": lambda b: b["uih"].values}))
    assert [values.tolist() for values in got] == [batch_of(step)["uih"].values.tolist() for step in range(2)]
    with pytest.raises(ValueError, match=r"ids must name the modules that prefetch, \['table'\], got \['tables'\]"):
        StagedPipeline(model, optimizer, ids={"tables": lambda b: b})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"optimizer": 3}, TypeError, "optimizer must have a method 'step', got int"),
        ({"grad_scaler": 3}, TypeError, "grad_scaler must have a method 'scale', got int"),
        ({"optimizer": None, "grad_scaler": torch.amp.GradScaler("cpu")}, ValueError, "grad_scaler needs an optimizer"),
        ({"ids": 3}, TypeError, "ids must be a function of the batch, or one for each module, got int"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Model()
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05)} | options
    with pytest.raises(error, match=message):
        StagedPipeline(**given)


def test_without_a_balanced_loader_there_is_no_state_and_without_a_loader_nothing_to_iterate() -> None:
    pipeline = StagedPipeline(Model(), None, loss_fn=loss_of)
    with pytest.raises(ValueError, match=r"only a loader from balance\(\) has a state"):
        pipeline.state_dict()
    with pytest.raises(ValueError, match="there is nothing to iterate"):
        next(iter(pipeline))
    with pytest.raises(TypeError, match="the loss must be a tensor, got dict; pass loss_fn="):
        list(StagedPipeline(Model(), None, Batches(1)))
