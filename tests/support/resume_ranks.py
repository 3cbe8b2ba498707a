"""Trains in processes of which rank 1 is killed, then goes on with new ones: python resume_ranks.py FOLDER MOMENT…

A moment is twice a step, before its files are saved, or one more, after that. Runs of several moments go on at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # as in fault_ranks

from freescale.transport import Transport

from fault_ranks import AT_ONCE, WORLD_SIZE, Run, start
from fault_training import IN_TROUBLE
from resume_training import train_saving, write_samples

TIMEOUT_S = 10.0


def body(folder: Path, moment: int | None, transport: Transport) -> None:
    """One rank; rank 1 ends at the moment."""

    def die(now: int) -> None:
        if transport.rank == IN_TROUBLE and now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    train_saving(transport, folder, die)


def begin(folder: Path, moment: int | None, turn: int) -> Run:
    """Start the ranks, for the first time or again."""
    return start(folder / f"turn-{turn}", TIMEOUT_S, partial(body, folder, moment if turn == 0 else None))


def main(folder: Path, moments: list[int]) -> None:
    """See the module's text; what goes wrong in a run that nobody kills is shown."""
    write_samples(folder / "data.parquet")
    waiting: list[tuple[Path, int | None, int]] = [(folder / "whole", None, 1)]
    waiting += [(folder / str(moment), moment, 0) for moment in moments]
    for place, _, _ in waiting:
        place.mkdir()
        shutil.copy(folder / "data.parquet", place)
    running: list[tuple[Run, Path, int | None, int]] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            entry = waiting.pop(0)
            running.append((begin(*entry), *entry))
        for one in list(running):
            run, place, moment, turn = one
            run.look()
            if len(run.codes) == WORLD_SIZE:
                running.remove(one)
                if turn == 0 and -signal.SIGKILL in run.codes.values():
                    waiting.append((place, moment, 1))
                elif turn == 0 or any(run.codes.values()):
                    sys.exit("\n".join((run.folder / f"{rank}.txt").read_text() for rank in range(WORLD_SIZE)))
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), [int(moment) for moment in sys.argv[2:]])
