"""A simulated step beside a measured one, and how far they are apart (paper, sections 5.2 and 5.4)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .tables import Table

LINKS = {"nvlink": "nvlink_pair", "shared memory": "shared_memory", "sockets": "sockets", "one rank": "nvlink_pair"}
"""Links of bench.embedding and bench.end_to_end, and the clusters that stand for them; one rank sends nothing."""

LEAST_COMPUTE_MS = 40.0
"""Shorter steps may wait for the host, which takes 20 to 30 ms to launch one, and longer under a profiler: they are
compared with steps that were timed without one."""


_SLOWED = 1.1  # times as long under the profiler: traffic over sockets shares the host with it


@dataclass(frozen=True)
class Comparison:
    """One contender in one workload over one link, measured and simulated.

    Attributes:
        link: What NCCL ran over.
        workload: For people.
        technique: What the trainer did.
        world_size: Ranks.
        compute_ms: Measured, and taken from the measurement.
        measured_ms: The bubble: a step without its computing; `bubble_ms` says which.
        simulated_ms: The same, simulated.
    """

    link: str
    workload: str
    technique: str
    world_size: int
    compute_ms: float
    measured_ms: float
    simulated_ms: float

    @property
    def step_error(self) -> float:
        """By how much the simulated step is too long, as a share of the measured one."""
        measured = self.compute_ms + self.measured_ms
        return (self.simulated_ms - self.measured_ms) / measured if measured else 0.0


def bubble_ms(timed_ms: float, compute_ms: float, traced_ms: float) -> float:
    """The bubble to compare with: the traced one, unless the step is short or the profiler made it longer.

    Args:
        timed_ms: A step, timed without a profiler.
        compute_ms: Computing in traced steps.
        traced_ms: The bubble of traced steps.

    Example:
        >>> bubble_ms(30.5, 28.0, 6.8), bubble_ms(111.5, 103.2, 8.6), bubble_ms(104.0, 98.0, 71.0)
        (2.5, 8.6, 6.0)
    """
    slowed = compute_ms + traced_ms > _SLOWED * timed_ms
    return timed_ms - compute_ms if slowed or compute_ms < LEAST_COMPUTE_MS else traced_ms


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Show both, and how far they are apart."""
    heads = [
        "link, workload, technique",
        "ranks",
        "computing ms",
        "bubble, measured",
        "bubble, simulated",
        "step off %",
    ]
    table = Table("Simulated beside measured", heads)
    for each in compared:
        table.add(
            f"{each.link}, {each.workload}, {each.technique}",
            str(each.world_size),
            f"{each.compute_ms:.1f}",
            f"{each.measured_ms:.2f}",
            f"{each.simulated_ms:.2f}",
            f"{100 * each.step_error:+.1f}",
        )
    return table


def said(compared: Sequence[Comparison]) -> str:
    """Say how far the simulation is off, apart for steps that are too short for it."""
    long = [each for each in compared if each.compute_ms >= LEAST_COMPUTE_MS]
    short = [each for each in compared if each.compute_ms < LEAST_COMPUTE_MS]
    lines = [f"Checked against {len(long)} measured steps: {_how_far(long)}."] if long else []
    if short:
        lines.append(
            f"Against {len(short)} steps with less than {LEAST_COMPUTE_MS:g} ms of computing, as timed without the "
            f"profiler, which makes hosts late: {_how_far(short)}."
        )
    return " ".join(lines)


def _how_far(compared: Sequence[Comparison]) -> str:
    steps = [100 * abs(each.step_error) for each in compared]
    bubbles = [abs(each.simulated_ms - each.measured_ms) for each in compared]
    return (
        f"a simulated step is off by {statistics.median(steps):.1f} % in the median and {max(steps):.1f} % at most; a "
        f"bubble by {statistics.median(bubbles):.2f} ms in the median and {max(bubbles):.2f} ms at most"
    )
