"""Simulates training steps of many ranks, with and without each technique (paper, Figures 1, 5, 9 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .simulate_network import Cluster
from .simulate_schedule import HOST, TRANSFER, WAIT, Schedule
from .simulate_traffic import Traffic

Floats = NDArray[np.float64]

_FORWARD = 1 / 3  # of the computing; the rest is backward
_BUCKETS = 0.1  # of backward has passed when the first dense gradients can travel


@dataclass(frozen=True)
class Technique:
    """What a trainer does about waiting and traffic.

    Attributes:
        name: For people.
        balanced: Samples are moved between ranks.
        ids_ahead: The exchange of ids runs behind computing.
        deduplicated: A row travels once to each rank that asks for it.
        prioritized: Only rows that collide with the neighbouring batch are in the way.
        sm_free: What runs behind computing takes no SM from it.
    """

    name: str
    balanced: bool = False
    ids_ahead: bool = False
    deduplicated: bool = False
    prioritized: bool = False
    sm_free: bool = False


TECHNIQUES = (
    Technique("TorchRec"),
    Technique("TorchRec, SDD", ids_ahead=True),
    Technique("TorchRec, SDD, ids deduplicated", ids_ahead=True, deduplicated=True),
    Technique("balanced only", ids_ahead=True, deduplicated=True, balanced=True),
    Technique("prioritized only", ids_ahead=True, deduplicated=True, prioritized=True),
    Technique("FreeScale over NCCL", ids_ahead=True, deduplicated=True, balanced=True, prioritized=True),
    Technique("FreeScale", ids_ahead=True, deduplicated=True, balanced=True, prioritized=True, sm_free=True),
)
"""From the baseline to everything together."""


@dataclass(frozen=True)
class StepLoad:
    """What one step costs the ranks.

    Attributes:
        compute_s: Seconds of forward and backward of each rank, undisturbed. Shape [world_size].
        traffic: Rows that ranks ask for.
        moved_bytes: Bytes that balancing takes from each rank. Shape [world_size].
        num_samples: Samples of all ranks.
    """

    compute_s: Floats
    traffic: Traffic
    moved_bytes: Floats
    num_samples: int


@dataclass(frozen=True)
class Model:
    """Sizes that set the traffic.

    Attributes:
        row_bytes: Bytes of an embedding row.
        dense_bytes: Bytes of the gradients that are all-reduced.
        contention: How much transfers with SMs slow the computing they overlap.
    """

    row_bytes: int = 512
    dense_bytes: int = 8_000_000
    contention: float = 0.1


@dataclass(frozen=True)
class Simulated:
    """Means over the steps and ranks. Everything here is simulated.

    Attributes:
        step_ms: Length of a step.
        straggler_percentage: Waiting for the slowest rank, as a share of the step.
        exposed_ms: Transfers in the way of computing.
        bubble_ms: Waiting, exposed transfers, and what the host adds: the step without its computing.
        samples_per_s: Of all ranks.
    """

    step_ms: float
    straggler_percentage: float
    exposed_ms: float
    bubble_ms: float
    samples_per_s: float


def simulate(
    technique: Technique, steps: Sequence[StepLoad], cluster: Cluster, model: Model
) -> tuple[Simulated, Schedule]:
    """Run steps one after the other; the first one warms up and does not count.

    Args:
        technique: What the trainer does.
        steps: At least two.
        cluster: What the collectives run on.
        model: Sizes.

    Returns:
        Means over the steps after the first, and all events.
    """
    if len(steps) < 2:
        raise ValueError(f"at least two steps are needed, the first warms up; got {len(steps)}")
    world_size = len(steps[0].compute_s)
    schedule = Schedule(world_size, 0.0 if technique.sm_free else model.contention)
    run = _Run(technique, cluster, model, schedule)
    since = 0.0
    for index, step in enumerate(steps):
        run.step(step, steps[index + 1] if index + 1 < len(steps) else None)
        schedule.end_step()
        if index == 0:
            since = float(schedule.now.min())
    count = len(steps) - 1
    seconds = (float(schedule.now.max()) - since) / count
    waited, moved, hosted = (float(schedule.spent(kind, since).mean()) / count for kind in (WAIT, TRANSFER, HOST))
    samples = sum(step.num_samples for step in steps[1:]) / count
    found = Simulated(
        step_ms=1e3 * seconds,
        straggler_percentage=100 * waited / seconds,
        exposed_ms=1e3 * moved,
        bubble_ms=1e3 * (waited + moved + hosted),
        samples_per_s=samples / seconds,
    )
    return found, schedule


class _Run:
    """One technique on one schedule, step by step."""

    def __init__(self, technique: Technique, cluster: Cluster, model: Model, schedule: Schedule) -> None:
        self._technique, self._cluster, self._model, self._schedule = technique, cluster, model, schedule
        self._rows_ready = np.zeros(len(schedule.now))

    def step(self, step: StepLoad, upcoming: StepLoad | None) -> None:
        if self._technique.prioritized:
            self._prioritized(step, upcoming)
        else:
            self._synchronous(step, upcoming)

    def _synchronous(self, step: StepLoad, upcoming: StepLoad | None) -> None:
        """Ids, rows, forward, backward, gradients, one after the other (Figure 1)."""
        schedule, asked, served = self._schedule, self._asked(step.traffic), self._served(step.traffic)
        if not self._technique.ids_ahead:
            schedule.host("host reads the sizes of ids", 1e-3 * self._cluster.host_ms)
            schedule.exchange("ids", self._all_to_all(8 * asked, 8 * served))
        schedule.compute("look up", self._memory(served))
        schedule.exchange("rows", self._rows(served, asked))
        self._behind(upcoming)
        self._compute(step)
        schedule.exchange("gradients", self._rows(asked, served))
        schedule.compute("update", self._memory(served))

    def _prioritized(self, step: StepLoad, upcoming: StepLoad | None) -> None:
        """Rows that do not collide travel behind computing; gradients that do not collide travel later (Figure 5)."""
        schedule, traffic = self._schedule, step.traffic
        schedule.wait_for("rows fetched ahead", self._rows_ready)
        self._behind(upcoming)
        begin = schedule.now
        if upcoming is not None:  # exclusive gradients of the step before were put first, by _after_backward
            later = upcoming.traffic
            rows = self._rows(later.served - later.late_served, later.asked - later.late, behind=True)
            looked_up = begin + self._memory(later.served - later.late_served)
            self._rows_ready = schedule.background("exclusive rows", rows, looked_up, not self._technique.sm_free)
        self._compute(step)
        schedule.exchange("colliding gradients", self._rows(traffic.urgent, traffic.urgent_served))
        if upcoming is not None:
            late = upcoming.traffic
            schedule.compute("update and look up", self._memory(2 * late.late_served))
            schedule.exchange("colliding rows", self._rows(late.late_served, late.late))
        others = self._rows(traffic.asked - traffic.urgent, traffic.served - traffic.urgent_served, behind=True)
        schedule.background("exclusive gradients", others, None, not self._technique.sm_free)

    def _compute(self, step: StepLoad) -> None:
        """Forward, backward, and the dense gradients behind the latter."""
        schedule = self._schedule
        schedule.host("gaps between kernels", 1e-3 * self._cluster.gap_ms)
        schedule.compute("forward", _FORWARD * step.compute_s)
        dense = self._cluster.all_reduce_s(self._model.dense_bytes, len(step.compute_s))
        ready = schedule.now + _BUCKETS * (1 - _FORWARD) * step.compute_s
        schedule.compute("backward", (1 - _FORWARD) * step.compute_s)
        longer = self._cluster.launch_prioritized_ms if self._technique.prioritized else 0.0
        schedule.launch("host launches the step", 1e-3 * max(self._cluster.launch_ms, longer))
        last = float(schedule.now.max())  # the last bucket is ready when the slowest rank has finished
        schedule.exchange("dense gradients", max(_BUCKETS * dense, dense - (last - float(ready.max()))))

    def _behind(self, upcoming: StepLoad | None) -> None:
        """Put the id exchange of the next batch, and the samples that balancing moves, behind computing."""
        if upcoming is None:
            return
        with_sms = not self._technique.sm_free
        if self._technique.ids_ahead:
            asked, served = self._asked(upcoming.traffic), self._served(upcoming.traffic)
            self._schedule.background("ids", self._all_to_all(8 * asked, 8 * served, behind=True), None, with_sms)
        if self._technique.balanced:
            moved = self._all_to_all(upcoming.moved_bytes, upcoming.moved_bytes, behind=True)
            self._schedule.background("samples", moved, None, with_sms=False)  # between hosts, in host memory

    def _asked(self, traffic: Traffic) -> Floats:
        return traffic.asked if self._technique.deduplicated else traffic.occurrences

    def _served(self, traffic: Traffic) -> Floats:
        if self._technique.deduplicated:
            return traffic.served
        repeats = float(traffic.occurrences.sum()) / max(1.0, float(traffic.served.sum()))
        return repeats * traffic.served

    def _rows(self, sent: Floats, received: Floats, behind: bool = False) -> float:
        return self._all_to_all(self._model.row_bytes * sent, self._model.row_bytes * received, behind)

    def _all_to_all(self, sent: Floats, received: Floats, behind: bool = False) -> float:
        """Seconds for bytes to all ranks, this one included: the share of the others travels."""
        others = 1 - 1 / len(sent)
        return self._cluster.all_to_all_s(others * sent, others * received, behind and self._technique.sm_free)

    def _memory(self, rows: Floats) -> Floats:
        """Seconds of reading and writing rows in GPU memory."""
        seconds: Floats = 2 * self._model.row_bytes * rows / (1e9 * self._cluster.device_gb_s)
        return seconds
