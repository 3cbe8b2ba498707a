"""The balancer at the hooks of a trainer: nothing waits in a hook, whatever the trainer does, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.nodes import IterableWrapper as NodeWrapper
from torchdata.nodes import Loader

from freescale.balancer import (
    BalancerNode,
    Column,
    JaggedBatch,
    PeerClosed,
    PeerFailed,
    attach,
    balance,
    greedy_batch_size,
)
from freescale.transport import Transport, connect

from loaded_batches import await_no_balancer_threads, balancer_threads
from rank_threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")


@pytest.fixture(autouse=True)
def _none_of_an_earlier_test() -> None:
    await_no_balancer_threads()


def batch_of(step: int, rank: int, size: int = 4) -> JaggedBatch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.arange(size) + 100 * step + 10_000 * rank
    lengths = torch.randint(0, 9, (size,), generator=generator)
    counts = torch.randint(0, 3, (size,), generator=generator)
    contents = torch.randint(0, 3, (int(counts.sum()),), generator=generator)
    columns = {
        "id": Column(ids),
        "uih": Column(ids.repeat_interleave(lengths), (lengths,)),
        "candidate": Column(torch.zeros(int(contents.sum())), (counts, contents)),
    }
    return JaggedBatch(columns, size)


class Batches:
    def __init__(self, num_batches: int, rank: int = 0, fails_at: int | None = None) -> None:
        self.num_batches, self.rank, self.fails_at = num_batches, rank, fails_at

    def __iter__(self) -> Iterator[JaggedBatch]:
        for step in range(self.num_batches):
            if step == self.fails_at:
                raise OSError("disk gone")
            yield batch_of(step, self.rank)


@dataclass
class Output:
    """What a model may return: no hook of a whole module's backward fires for it."""

    scores: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 3), nn.Linear(3, 1)

    def forward(self, batch: JaggedBatch) -> Output:
        return Output(self.second(self.first(batch["uih"].levels[0].float().unsqueeze(1))))


class Trainer:
    """A loop that calls what trainers call."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen: list[int] = []

    def step(self, batch: JaggedBatch, *, backward: bool = True, step: bool = True) -> None:
        self.seen += batch["id"].values.tolist()
        loss = self.model(batch).scores.sum()
        if backward:
            loss.backward()
        if step:
            self.optimizer.step()


def all_ids(num_batches: list[int]) -> Counter[int]:
    return Counter(i for r, n in enumerate(num_batches) for s in range(n) for i in batch_of(s, r)["id"].values.tolist())


def train(
    num_batches: list[int], use: Callable[[Trainer, int, int, JaggedBatch], None], hooked: Callable[[int], bool]
) -> Counter[int]:
    """Train on all ranks; `use(trainer, rank, step, batch)` is a step. Gives what was trained on."""

    def run(transport: Transport) -> list[int]:
        trainer = Trainer()
        loader = balance(Batches(num_batches[transport.rank], transport.rank), transport, "uih")
        attachment = attach(loader, trainer.model, trainer.optimizer) if hooked(transport.rank) else None
        for step, batch in enumerate(loader):
            use(trainer, transport.rank, step, batch)
        if attachment is not None:
            attachment.detach()
        return trainer.seen

    return Counter(i for seen in run_in_threads(len(num_batches), run) for i in seen)


def plain(trainer: Trainer, rank: int, step: int, batch: JaggedBatch) -> None:
    trainer.step(batch)


def skips_backward(trainer: Trainer, rank: int, step: int, batch: JaggedBatch) -> None:
    trainer.step(batch, backward=(step + rank) % 3 != 0)


def skips_the_optimizer(trainer: Trainer, rank: int, step: int, batch: JaggedBatch) -> None:
    trainer.step(batch, step=rank == 1 and step % 2 == 0)


def does_nothing_on_one_rank(trainer: Trainer, rank: int, step: int, batch: JaggedBatch) -> None:
    if rank == 0:
        trainer.seen += batch["id"].values.tolist()
    else:
        trainer.step(batch)


def evaluates_in_between(trainer: Trainer, rank: int, step: int, batch: JaggedBatch) -> None:
    trainer.step(batch)
    if rank == 0:
        trainer.model.eval()
        with torch.no_grad():
            for other in range(3):
                trainer.model(batch_of(other, 0))
        trainer.model.train()


@pytest.mark.parametrize("num_batches", [[5, 5], [5, 2, 0]], ids=str)
@pytest.mark.parametrize(
    "use", [plain, skips_backward, skips_the_optimizer, does_nothing_on_one_rank, evaluates_in_between]
)
def test_whatever_the_trainer_does_every_sample_arrives_once(
    num_batches: list[int], use: Callable[[Trainer, int, int, JaggedBatch], None]
) -> None:
    assert train(num_batches, use, hooked=lambda rank: True) == all_ids(num_batches)
    assert not balancer_threads()


def test_ranks_with_hooks_and_ranks_with_threads_keep_the_same_order() -> None:
    assert train([4, 6, 3], plain, hooked=lambda rank: rank != 1) == all_ids([4, 6, 3])


def test_stages_are_where_the_paper_has_them_and_next_has_nothing_left_to_do() -> None:
    together = threading.Barrier(2, timeout=60)  # after each hook, so that both ranks have answered by the next one

    def run(transport: Transport) -> list[list[str]]:
        trainer = Trainer()
        loader = balance(Batches(6, transport.rank), transport, "uih")
        steps: list[list[str]] = []
        advance = loader.advance

        def watched(passing: frozenset[str]) -> None:
            worker = loader._worker
            assert worker is not None
            before = worker._posted
            advance(passing)
            if worker._posted is not before:
                moment = ("optimizer" if "load" in passing else "backward") if "shuffle" in passing else "forward"
                steps[-1].append(f"{moment}: {worker._posted.stage if worker._posted else 'ready'}")
            together.wait()

        loader.advance = watched  # type: ignore[method-assign, assignment]
        with attach(loader, trainer.model, trainer.optimizer):
            for batch in loader:
                assert not balancer_threads()
                steps.append([])
                trainer.step(batch)
                worker = loader._worker
                assert len(steps) in (1, 5, 6) or (worker is not None and worker.queue.qsize() == 1)
        return steps

    for steps in run_in_threads(2, run):
        for step in steps[1:4]:
            assert [entry for entry in step if entry.endswith("shuffle")] in ([], ["backward: shuffle"]), step
            assert "backward: ready" in step, step
            assert step[-1] == "optimizer: gather_lengths", step
            assert {entry.split(": ")[1] for entry in step if entry.startswith("forward")} & {
                "gather_candidates",
                "plan",
            }


def test_a_hook_does_not_wait_for_a_rank_that_waits_for_this_one() -> None:
    """Rank 1 has no hook to answer at, and waits for rank 0 in a collective of the trainer: rank 0 must get there."""
    together = threading.Barrier(2, timeout=60)

    def run(transport: Transport) -> list[int]:
        trainer = Trainer()
        loader = balance(Batches(4, transport.rank), transport, "uih", prefetch=1)
        with attach(loader, trainer.model, trainer.optimizer):
            for batch in loader:
                if transport.rank == 0:
                    trainer.step(batch)
                else:
                    trainer.seen += batch["id"].values.tolist()
                together.wait()
        return trainer.seen

    seen = Counter(i for rank in run_in_threads(2, run) for i in rank)
    assert seen == all_ids([4, 4])


def test_a_rank_that_leaves_early_is_told_to_those_that_go_on() -> None:
    def run(transport: Transport) -> str:
        trainer = Trainer()
        loader = balance(Batches(6, transport.rank), transport, "uih")
        with attach(loader, trainer.model, trainer.optimizer):
            try:
                for step, batch in enumerate(loader):
                    trainer.step(batch)
                    if transport.rank == 1 and step == 2:
                        break
            except PeerClosed as closed:
                return f"rank {closed.rank} left"
            loader.close()
        return "left"

    assert run_in_threads(2, run) == ["rank 1 left", "left"]
    assert not balancer_threads()


def test_a_loader_that_fails_is_an_error_on_every_rank_outside_of_hooks() -> None:
    def run(transport: Transport) -> str:
        trainer = Trainer()
        loader = balance(Batches(6, transport.rank, 3 if transport.rank else None), transport, "uih")
        with attach(loader, trainer.model, trainer.optimizer):
            batches = iter(loader)
            for _ in range(3):
                trainer.step(next(batches))  # no error here
            with pytest.raises(PeerFailed) as caught:
                next(batches)
        return str(caught.value)

    assert run_in_threads(2, run) == ["rank 1 failed at step 3: OSError: disk gone"] * 2


def test_detached_in_the_middle_the_epoch_goes_on_in_a_thread() -> None:
    def run(transport: Transport) -> list[int]:
        trainer = Trainer()
        loader = balance(Batches(6, transport.rank), transport, "uih")
        attachment = attach(loader, trainer.model, trainer.optimizer)
        for step, batch in enumerate(loader):
            trainer.step(batch)
            if step == 2:
                attachment.detach()
        assert not trainer.model._forward_hooks
        assert not trainer.model._forward_pre_hooks
        assert not trainer.optimizer._optimizer_step_post_hooks
        assert not any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())
        return trainer.seen

    seen = Counter(i for rank in run_in_threads(2, run) for i in rank)
    assert seen == all_ids([6, 6])


def test_nodes_and_datapipes_can_be_attached_too() -> None:
    trainer = Trainer()
    batches = [batch_of(step, 0) for step in range(3)]
    node = BalancerNode(NodeWrapper(batches), connect("local"), "uih")
    with attach(node, trainer.model, trainer.optimizer):
        for batch in Loader(node):
            assert not balancer_threads()
            trainer.step(batch)
        node.close()
    pipe: Any = IterableWrapper(batches).balance(connect("local"), "uih")
    with attach(pipe, trainer.model, trainer.optimizer):
        for batch in pipe:
            assert not balancer_threads()
            trainer.step(batch)
    assert Counter(trainer.seen) == Counter(dict.fromkeys(all_ids([3]), 2))


def test_work_at_hooks_has_names_in_a_trace() -> None:
    trainer = Trainer()
    loader = balance(Batches(4), connect("local"), "uih", lambda world: greedy_batch_size(world))
    with (
        attach(loader, trainer.model, trainer.optimizer),
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace,
    ):
        for batch in loader:
            trainer.step(batch)
    names = {event.name for event in trace.events() if event.name.startswith("freescale.balancer")}
    stages = ["load", "hello", "gather_lengths", "gather_candidates", "plan", "shuffle"]
    assert names == {f"freescale.balancer {stage}" for stage in stages}


LEAVES_HALF_WAY = """
import torch
from freescale.balancer import attach, balance
from freescale.transport import connect
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = balance([{"x": torch.ones(2, 1), "n": torch.tensor([3, 5])}] * 9, connect("local"), "n")
attachment = attach(loader, model, optimizer)
for batch in loader:
    model(batch["x"]).sum().backward()
    optimizer.step()
    END
"""


@pytest.mark.parametrize(("end", "code"), [("break", 0), ("raise KeyError", 1)])
def test_a_process_that_ends_half_way_through_an_epoch_ends(end: str, code: int) -> None:
    command = [sys.executable, "-c", LEAVES_HALF_WAY.replace("END", end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == code, done.stderr
    assert ("KeyError" in done.stderr) == (code == 1)
    assert "hread" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, r"balancer must come from balance\(…\) or be a BalancerNode, got int"),
        (1, "model must be a torch.nn.Module, got int"),
        (2, "optimizer must be a torch.optim.Optimizer, got int"),
    ],
)
def test_wrong_arguments_are_refused(place: int, message: str) -> None:
    trainer = Trainer()
    arguments: list[Any] = [balance(Batches(1), connect("local"), "uih"), trainer.model, trainer.optimizer]
    arguments[place] = 3
    with pytest.raises(TypeError, match=message):
        attach(*arguments)
