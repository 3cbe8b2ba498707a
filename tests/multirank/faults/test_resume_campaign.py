"""Stopped after any step, or killed, training goes on: every sample once, and, on as many ranks, the same weights."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.transport import Transport

import resume_ranks
from rank_threads import run_in_threads
from resume_training import NUM_SAMPLES, WORLD_SIZE, Trainer, write_samples

Ended = tuple[list[int], dict[str, Tensor], int]


def train(data: Path, world_size: int, stop: int | None) -> list[Ended]:
    """Train in threads; with `stop`, the epoch is left after that many steps and gone on with by new objects."""

    def run(transport: Transport) -> Ended:
        saved: list[dict[str, Any]] = []
        steps = []

        def after_step(trainer: Trainer, step: int, loader_state: dict[str, Any]) -> bool:
            steps.append(step)
            if len(steps) == stop:
                saved.append(trainer.state_dict(loader_state))
            return len(steps) == stop

        trainer = Trainer(transport, data)
        trainer.run(after_step)
        if saved:
            trainer.close()
            trainer = Trainer(transport, data)
            trainer.load_state_dict(saved[0])
            trainer.run(after_step)
        assert steps == list(range(len(steps)))
        result = trainer.ids, trainer.everything(), len(steps)
        trainer.close()
        return result

    return run_in_threads(world_size, run)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.parquet"
    write_samples(path)
    return path


def assert_same(ours: list[Ended], theirs: list[Ended]) -> None:
    assert Counter(k for ids, _, _ in ours for k in ids) == Counter(range(NUM_SAMPLES))
    for (ids, weights, steps), (other_ids, other_weights, other_steps) in zip(ours, theirs, strict=True):
        assert (ids, steps) == (other_ids, other_steps)
        assert weights.keys() == other_weights.keys()
        for name, value in weights.items():
            assert torch.equal(value, other_weights[name]), name


@pytest.mark.parametrize("world_size", [WORLD_SIZE, pytest.param(2, marks=pytest.mark.long)])
def test_stopped_after_any_step_of_an_epoch_training_ends_with_the_same_weights(data: Path, world_size: int) -> None:
    whole = train(data, world_size, None)
    assert_same(whole, whole)
    for stop in range(1, whole[0][2]):
        assert_same(train(data, world_size, stop), whole)


def train_some_steps(data: Path, world_size: int, stop: int, tables: Path) -> list[dict[str, Any]]:
    """States of all ranks after that many steps."""

    def run(transport: Transport) -> dict[str, Any]:
        saved = dict[str, Any]()

        def after_step(trainer: Trainer, step: int, loader_state: dict[str, Any]) -> bool:
            if step + 1 < stop:
                return False
            trainer.tables.save_sharded(tables)
            saved.update(trainer.state_dict(loader_state))
            return True

        trainer = Trainer(transport, data)
        trainer.run(after_step)
        trainer.close()
        return saved

    return run_in_threads(world_size, run)


def go_on_elsewhere(data: Path, world_size: int, states: list[dict[str, Any]], tables: Path) -> list[Ended]:
    """Train the rest of the epoch on another number of ranks."""

    def run(transport: Transport) -> Ended:
        trainer = Trainer(transport, data)
        trainer.load_those_of_others(states, tables)
        (rows,) = trainer.weights().values()
        channel = transport.channel("rows")
        sizes = channel.all_gather(torch.tensor([len(rows)])).wait()
        loaded = channel.all_gather(rows.detach(), sizes).wait()
        assert torch.equal(loaded, torch.cat([rows for state in states for rows in state["tables"].values()]))
        steps: list[int] = []

        def after_step(trainer: Trainer, step: int, loader_state: dict[str, Any]) -> bool:
            steps.append(step)
            return False

        trainer.run(after_step)
        result = trainer.ids, trainer.everything(), len(steps)
        trainer.close()
        return result

    return run_in_threads(world_size, run)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 3), pytest.param(2, 8, marks=pytest.mark.long)])
def test_stopped_after_any_step_another_number_of_ranks_trains_on_every_sample_once(
    data: Path, tmp_path: Path, before: int, after: int
) -> None:
    num_steps = train(data, before, None)[0][2]
    for stop in range(1, num_steps + 1):
        states = train_some_steps(data, before, stop, tmp_path / str(stop))
        ended = go_on_elsewhere(data, after, states, tmp_path / str(stop))
        assert Counter(k for ids, _, _ in ended for k in ids) == Counter(range(NUM_SAMPLES))
        for _, weights, _ in ended:
            assert torch.equal(weights["weight"], ended[0][1]["weight"])
            assert all(value.isfinite().all() for value in weights.values())


def run_killed(folder: Path, cases: list[str]) -> None:
    """Run processes, of which one is killed; see `resume_ranks`."""
    command = [sys.executable, resume_ranks.__file__, str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def moments(data: Path, world_size: int) -> range:
    """All of an epoch: before each step is saved, and after it."""
    return range(2 * train(data, world_size, None)[0][2])


def load_ends(folder: Path, world_size: int = WORLD_SIZE) -> list[Ended]:
    ends = [torch.load(folder / f"end-{rank}.pt", weights_only=True) for rank in range(world_size)]
    return [(end["ids"], end["weights"], 0) for end in ends]


def check_same_ranks(folder: Path, case: str) -> None:
    assert_same(load_ends(folder / case), load_ends(folder / "whole"))


def check_other_ranks(folder: Path, case: str) -> None:
    ended = load_ends(folder / case, int(case.split(":")[2]))
    assert Counter(k for ids, _, _ in ended for k in ids) == Counter(range(NUM_SAMPLES)), case
    assert all(torch.equal(weights["weight"], ended[0][1]["weight"]) for _, weights, _ in ended), case


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    run_killed(folder, ["5", "5:4:2", "6:4:3"])
    return folder


@pytest.mark.multirank
def test_killed_while_training_or_saving_it_goes_on_from_the_newest_files(quick: Path) -> None:
    check_same_ranks(quick, "5")


@pytest.mark.multirank
@pytest.mark.parametrize("case", ["5:4:2", "6:4:3"])
def test_killed_on_four_ranks_it_goes_on_with_two_or_three_from_the_newest_files(quick: Path, case: str) -> None:
    check_other_ranks(quick, case)


@pytest.mark.long
@pytest.mark.multirank
def test_killed_at_any_moment_it_goes_on_from_the_newest_files(data: Path, tmp_path: Path) -> None:
    cases = [str(moment) for moment in moments(data, WORLD_SIZE)]
    run_killed(tmp_path, cases)
    for case in cases:
        check_same_ranks(tmp_path, case)


@pytest.mark.long
@pytest.mark.multirank
@pytest.mark.parametrize("sizes", ["4:2", "4:3", "2:4", "3:1"])
def test_killed_at_any_moment_it_goes_on_with_another_number_of_ranks(data: Path, tmp_path: Path, sizes: str) -> None:
    cases = [f"{moment}:{sizes}" for moment in moments(data, int(sizes[0]))]
    run_killed(tmp_path, cases)
    for case in cases:
        check_other_ranks(tmp_path, case)
