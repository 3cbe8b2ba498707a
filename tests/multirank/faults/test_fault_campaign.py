"""A rank of three gets into trouble, wherever it is: the others end within the deadline and say why; nothing is left.

Ranks balance batches and train prioritized embeddings. The quick half runs always, the rest with `make test-long`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fault_ranks
from fault_training import rank_in_trouble
from rank_processes import launch

pytestmark = pytest.mark.multirank
SCRIPT = Path(fault_ranks.__file__)
DEADLINE_S = 6.0
SLACK_S = 90.0  # of a machine that is busy, or stands still for a while

# What the balancer or the embeddings were at, in which step. Batches are planned ahead of the step trained on.
PLACE = r"(hello|stage I+ \(.*\)|agreement on the plan|embedding \w+), step \d+: "
# Whoever hears of it late may see that another rank has ended too, if the store that would have told has gone with it.
GONE = PLACE + r".*(gone|missing): ranks \[[02, ]*1[02, ]*\]"
# A rank that waits for one that waits for the missing one names both.
LATE = PLACE + r".*rank \d of 3 waited \d s.*missing: ranks \[[012, ]*1[012, ]*\]"
# Rank 0 serves the store in which others would find what was said first.
FIRST_GONE = PLACE + r".*(gone|missing): ranks \[[12, ]*0[12, ]*\]"
TOLD = r"PeerFailed: rank 1 failed at step 3: "
QUICK = {
    "kill loader": GONE,
    "kill stage I": GONE,
    "kill stage III": GONE,
    "kill backward": GONE,
    "stop stage III": LATE,
    "pause stage I": "trained to the end",
    # The loader hears of it at the step that it loads then, which depends on how far ahead it is.
    "kill worker": r"rank 1 failed.*DataLoader worker \(pid.* (is killed|exited unexpectedly)",
    "raise partitioner": TOLD + "partitioner: RuntimeError: on fire",
    "exhaust packing": TOLD + r"packing: ArrowMemoryError: malloc of size \d+ failed",
    "corrupt file": TOLD + r"ValueError: cannot read row group 10 of .*pages-1\.parquet",
    "raise prefetch": r"embedding \w+, step \d: .*rank 1 failed: RuntimeError: on fire|rank 1 failed at .*: on fire",
    "spoil id": r"IdOutOfRange: ids of feature 'uih' must be from 0 to 99, .*: got 100 at place \d+ on rank \d; "
    r"the trainer was at embedding \w+, step [234]",  # which has heard of the next batch
    "interrupt-all forward": "KeyboardInterrupt",
}
LONG = {
    "none": "trained to the end",
    "kill hello": GONE,
    "kill stage II": GONE,
    "kill agreement": GONE,
    "kill partitioner": GONE,
    "kill packing": GONE,
    "kill prefetch": GONE,
    "kill forward": GONE,
    "kill optimizer": GONE,
    "stop loader": LATE,
    "stop stage I": LATE,
    "stop forward": LATE,
    "stop backward": LATE,
    "pause backward": "trained to the end",
    "pause partitioner": "trained to the end",
    "raise loader": TOLD + "RuntimeError: on fire",
    "fill loader": TOLD + "OSError: .*No space left on device",
    "fill optimizer": r"rank 1 failed.*: OSError: .*No space left on device",
    "spoil adapter": TOLD + "ValueError: the batch is of type dict, in the first batch it was JaggedBatch",
    "truncated file": r"rank 1 failed: ValueError: cannot read .*pages-1\.parquet as Parquet",
    "kill-first stage I": FIRST_GONE,
    "kill-first backward": FIRST_GONE,
    "raise forward": r"rank 1 failed.*: RuntimeError: on fire",
    "raise backward": r"rank 1 failed.*: RuntimeError: on fire",
    "raise optimizer": r"rank 1 failed.*: RuntimeError: on fire",
    "interrupt loader": r"rank 1 failed.*: KeyboardInterrupt",
    "interrupt backward": r"rank 1 failed.*: KeyboardInterrupt",
    "interrupt-all backward": "KeyboardInterrupt",
}
ENDS_WELL = {trouble for trouble, message in (QUICK | LONG).items() if message == "trained to the end"}


@dataclass
class Ended:
    """How a run ended, as `fault_ranks` wrote it down."""

    codes: list[int]
    said: list[str]
    seconds: float
    timed_out: bool
    orphans: list[str]
    shared_memory: list[str]

    def explain(self) -> str:
        """All of it, for an assertion's message."""
        parts = [f"exit statuses {self.codes} after {self.seconds:.1f} s, left: {self.orphans} {self.shared_memory}"]
        return "\n".join([*parts, *(f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(self.said))])


def run_all(folder: Path, troubles: list[str]) -> dict[str, Ended]:
    """Run many troubles over gloo, from one process."""
    command = [sys.executable, str(SCRIPT), str(folder), str(DEADLINE_S), *troubles]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    texts = [(folder / str(number) / "result.json").read_text() for number in range(len(troubles))]
    return {trouble: Ended(**json.loads(text)) for trouble, text in zip(troubles, texts, strict=True)}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(tmp_path_factory.mktemp("quick"), list(QUICK))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(tmp_path_factory.mktemp("long"), list(LONG))


def check(trouble: str, message: str, ended: Ended) -> None:
    """Every rank ended by itself, in time, the others with the message; and nothing stays."""
    assert not ended.timed_out, ended.explain()
    assert ended.seconds < DEADLINE_S + SLACK_S, ended.explain()
    everybody = trouble.startswith("interrupt-all")
    victim = rank_in_trouble(trouble)
    for rank in {0, 1, 2} - {victim}:
        assert re.search(message, ended.said[rank], re.DOTALL), ended.explain()
        # Some installations of Python end with status 1 after Ctrl-C, not by the signal.
        assert ended.codes[rank] in ((-2, 1) if everybody else (0,)), ended.explain()
        assert everybody or "threads left: []" in ended.said[rank], ended.explain()
        found = re.search(r"\| after ([\d.]+) s", ended.said[rank])
        assert found is None or float(found[1]) < DEADLINE_S + SLACK_S, ended.explain()
    assert (ended.codes[victim] == 0) == (trouble in ENDS_WELL), ended.explain()
    assert not ended.orphans, ended.explain()
    assert not ended.shared_memory, ended.explain()


@pytest.mark.parametrize("trouble", QUICK)
def test_a_rank_in_trouble_is_an_error_of_all_within_the_deadline_and_nothing_stays(
    trouble: str, quick: dict[str, Ended]
) -> None:
    check(trouble, QUICK[trouble], quick[trouble])


@pytest.mark.long
@pytest.mark.parametrize("trouble", LONG)
def test_trouble_anywhere_else_is_an_error_of_all_within_the_deadline_too(trouble: str, long: dict[str, Ended]) -> None:
    check(trouble, LONG[trouble], long[trouble])


def run_under(launcher: str, trouble: str, message: str) -> None:
    """The same under mpiexec or torchrun, one trouble a launch."""
    done = launch(launcher, 3, SCRIPT, [launcher.replace("torchrun", "process_group"), "8", trouble], recovery=True)
    assert not done.timed_out, done.explain()
    assert not done.orphans, done.explain()
    assert not done.shared_memory, done.explain()
    if trouble in ENDS_WELL:
        assert done.returncode == 0, done.explain()
    for rank in {0, 1, 2} - {rank_in_trouble(trouble)}:
        said = done.outputs[rank] + done.errors[rank]
        if launcher == "mpi":
            assert re.search(message, said, re.DOTALL), done.explain()
        assert "threads left: []" in said or launcher != "mpi" or trouble.startswith("interrupt"), done.explain()


@pytest.mark.parametrize("trouble", ["kill backward"])
def test_under_mpiexec_the_survivors_name_stage_step_and_the_rank_that_is_missing(trouble: str) -> None:
    run_under("mpi", trouble, LATE)


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["kill forward", "kill stage III", "raise backward", "interrupt loader"])
def test_under_torchrun_a_killed_rank_leaves_no_process(trouble: str) -> None:
    run_under("torchrun", trouble, "")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_ctrl_c_at_the_launcher_leaves_no_process_and_no_shared_memory(launcher: str) -> None:
    done = launch(launcher, 3, SCRIPT, [launcher.replace("torchrun", "process_group"), "8", "ctrl-c forward"])
    assert not done.timed_out, done.explain()
    assert done.returncode != 0, done.explain()
    assert not done.orphans, done.explain()
    assert not done.shared_memory, done.explain()


@pytest.mark.long
@pytest.mark.parametrize("trouble", [*QUICK, *LONG])
def test_any_trouble_under_mpiexec_is_an_error_of_all(trouble: str) -> None:
    message = (QUICK | LONG)[trouble]
    run_under("mpi", trouble, LATE if message == GONE else message)
