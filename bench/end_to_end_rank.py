"""What one rank of bench.end_to_end does: builds the contenders, times them in turn, traces each (section 5.4)."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from .embedding_contenders import Setup
from .embedding_workload import Workload
from .end_to_end_batch import make_ring
from .end_to_end_contenders import BUILDERS, Contender
from .end_to_end_settings import Cell, Settings
from .measured_rank import MeasuredRank, run_measured

_SMALL_TABLE = 1000  # rows, where there is nothing to gain
_AFTER_MEETING = 2  # steps of the warm-up that fill the device's queue again


class Rank(MeasuredRank):
    """One rank of one launch.

    Args:
        settings: What to do.
        folder: Where measurements and traces go.
        rank: This rank.
    """

    def __init__(self, settings: Settings, folder: Path, rank: int) -> None:
        super().__init__(settings.link, settings.device, settings.until, folder, rank)
        self._settings = settings

    def run(self) -> None:
        """Do everything, most important first; what there is no time for is said."""
        for even, cells in groupby(self._settings.cells, key=lambda cell: cell.even):
            contenders: dict[str, Contender] = {}
            if self._in_time():
                for name in self._settings.contenders:
                    self._build(name, contenders, even)
            for cell in cells:
                if contenders and self._in_time():
                    self._measure(cell, contenders)
                else:
                    self._record("skipped", cell=asdict(cell))
            contenders.clear()
            self._tidy()

    def _build(self, name: str, contenders: dict[str, Contender], even: bool) -> None:
        """Build a contender; one that cannot be built is left out and said."""
        before, started = self._allocated(), time.perf_counter()
        sizes = self._settings.sizes
        num_rows = _SMALL_TABLE if even else sizes.num_rows
        setup = Setup(
            self._device, 1, num_rows, sizes.dim, sizes.batch_size, sizes.num_layers, sizes.width,
            torch.bfloat16, 0.01, self._transport,
        )  # fmt: skip
        try:
            contenders[name] = BUILDERS[name](setup)
        except Exception:
            self._record("failed", contender=name, traceback=traceback.format_exc())
        built = {"bytes": self._allocated() - before, "seconds": time.perf_counter() - started}
        self._record("built", contender=name, **built)

    def _measure(self, cell: Cell, contenders: dict[str, Contender]) -> None:
        """Time all contenders in one workload, in turn; trace each after the last turn."""
        self._record("begun", cell=asdict(cell))
        sizes, world_size = self._settings.sizes, self._settings.world_size
        workload = Workload(
            cell.cut, self._settings.ratio, 1, cell.batch_size * world_size,
            _SMALL_TABLE if cell.even else sizes.num_rows,
            median=cell.cut if cell.even else sizes.median, sigma=0.0 if cell.even else 1.0,
        )  # fmt: skip
        ring = make_ring(workload, self._settings.pace.ring, self._rank, world_size, self._cuda)
        tokens = [len(step["history"].values) for step in ring.steps]
        self._record("workload", cell=asdict(cell), ids_of_steps=tokens)
        for turn in range(self._settings.pace.rounds):
            for name, contender in contenders.items():
                if not self._in_time():
                    self._record("skipped", cell=asdict(cell), contender=name)
                    continue
                try:
                    contender.use(ring)
                    self._record("measurement", cell=asdict(cell), contender=name, **self._time(contender))
                    if turn == self._settings.pace.rounds - 1:
                        self._trace(cell, name, contender)
                    contender.leave()
                except Exception:
                    self._record("failed", cell=asdict(cell), contender=name, traceback=traceback.format_exc())
                    raise  # other ranks may have gone on: what was measured so far is kept

    def _time(self, contender: Contender) -> dict[str, Any]:
        pace = self._settings.pace
        if self._cuda:
            torch.cuda.empty_cache()
        losses = [contender.step() for _ in range(pace.warm_up - _AFTER_MEETING)]
        found = self._time_steps(contender.step, pace.timed, _AFTER_MEETING)
        found["losses"] = [float(loss) for loss in losses] + found["losses"]
        return found | {"waited_ms": [1e3 * seconds for seconds in contender.waited_s[-pace.timed :]]}

    def _trace(self, cell: Cell, name: str, contender: Contender) -> None:
        steps = self._settings.pace.traced
        if steps and self._cuda:
            what, all_threads = f"{cell.cut}-{cell.batch_size}-{cell.even}-{name}", self._settings.all_threads
            path = self._trace_steps(contender.step, steps, what, all_threads=all_threads)
            self._record("trace", cell=asdict(cell), contender=name, path=str(path))


def run_rank(path: Path, rank: int, port: int) -> None:
    """Be one rank of the launch that a file of settings describes."""
    run_measured(path, rank, port, Settings.load, Rank)
