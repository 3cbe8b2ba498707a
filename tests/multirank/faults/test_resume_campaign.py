"""Stopped after any step, or killed, training goes on: every sample once, and the weights of a run without a stop."""

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

    return run_in_threads(world_size, run, timeout_s=60)


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


def killed(folder: Path, moments: list[int]) -> list[Path]:
    """Run processes, of which one is killed at each moment in turn; folders of the runs, the first one undisturbed."""
    command = [sys.executable, resume_ranks.__file__, str(folder), *map(str, moments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [folder / "whole", *(folder / str(moment) for moment in moments)]


def check_killed(folder: Path, moments: list[int]) -> None:
    def load(folder: Path) -> list[Ended]:
        ends = [torch.load(folder / f"end-{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
        return [(end["ids"], end["weights"], 0) for end in ends]

    whole, *others = killed(folder, moments)
    for other in others:
        assert_same(load(other), load(whole))


@pytest.mark.multirank
def test_killed_while_training_or_saving_it_goes_on_from_the_newest_files(tmp_path: Path) -> None:
    check_killed(tmp_path, [5])


@pytest.mark.long
@pytest.mark.multirank
def test_killed_at_any_moment_it_goes_on_from_the_newest_files(tmp_path: Path) -> None:
    check_killed(tmp_path, list(range(13)))
