"""Trains in processes of which rank 1 is killed, then goes on with new ones: python resume_ranks.py FOLDER CASE…

A case is a moment: twice a step, before its files are saved, or one more, after that; and, after colons, the numbers of
ranks before and after, if they are not three, as in 5:4:2. Several cases go on at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # as in fault_ranks

from freescale.transport import Transport

from fault_ranks import AT_ONCE, Run, start
from fault_training import IN_TROUBLE
from resume_training import WORLD_SIZE, train_saving, write_samples

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Case:
    """What happens in a folder.

    Attributes:
        folder: Its name is the case's.
        moment: When rank 1 is killed; None for never.
        before: Number of ranks until then.
        after: Number of ranks that go on.
    """

    folder: Path
    moment: int | None = None
    before: int = WORLD_SIZE
    after: int = WORLD_SIZE


def read_case(folder: Path, text: str) -> Case:
    """Read it from the command line."""
    return Case(folder / text, *map(int, text.split(":")))


def body(case: Case, turn: int, transport: Transport) -> None:
    """One rank; rank 1 ends at the moment, in the first turn."""

    def die(now: int) -> None:
        if turn == 0 and transport.rank == IN_TROUBLE and now == case.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    train_saving(transport, case.folder, die, case.before)


def begin(case: Case, turn: int) -> Run:
    """Start the ranks, for the first time or again."""
    world_size = case.before if turn == 0 else case.after
    return start(case.folder / f"turn-{turn}", TIMEOUT_S, partial(body, case, turn), world_size)


def main(folder: Path, cases: list[str]) -> None:
    """See the module's text; what goes wrong in a run that nobody kills is shown."""
    write_samples(folder / "data.parquet")
    waiting = [(Case(folder / "whole"), 1), *((read_case(folder, text), 0) for text in cases)]
    for case, _ in waiting:
        case.folder.mkdir()
        shutil.copy(folder / "data.parquet", case.folder)
    running: list[tuple[Run, Case, int]] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            case, turn = waiting.pop(0)
            running.append((begin(case, turn), case, turn))
        for one in list(running):
            run, case, turn = one
            run.look()
            if len(run.codes) == len(run.pids):
                running.remove(one)
                if turn == 0 and -signal.SIGKILL in run.codes.values():
                    waiting.append((case, 1))
                elif turn == 0 or any(run.codes.values()):
                    sys.exit("\n".join(path.read_text() for path in sorted(run.folder.glob("*.txt"))))
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
