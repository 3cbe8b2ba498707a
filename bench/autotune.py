"""Does autotune settle? A closed loop with a slow rank, late and noisy seconds (paper, section 4.1: AutoTune)."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..balancer.metrics import imbalance, rank_loads
from ..balancer.partitioners.cost import CostModel
from ..balancer.partitioners.partition import greedy_batch_size, home_batch_size
from ..balancer.partitioners.variable import VariableBatchSize
from ..balancer.plan import Partitioner, WorldSamples
from .arguments import output_file, output_folder, picture_file, status_of, write_figures
from .environment import environment
from .lengths import length_source
from .tables import Table, picture_beside, print_table, write_result


@dataclass(frozen=True)
class Cluster:
    """Simulated ranks, of which one is slow. Seconds are `(items + squares * length²)` summed, times noise.

    Attributes:
        world_size: Number of ranks.
        batch_size: Samples that each rank loads.
        slow_rank: The slow one.
        slowness: Its seconds as a multiple of the others'.
        square: Weight of length² beside length; 0 is linear.
        noise: Relative standard deviation of measured seconds.
        delay: Steps by which measured seconds arrive late, as batches are planned ahead.
        max_length: Longer samples are cut.
    """

    world_size: int = 64
    batch_size: int = 128
    slow_rank: int = 5
    slowness: float = 1.3
    square: float = 0.0
    noise: float = 0.01
    delay: int = 1
    max_length: int = 21000

    def batch(self, step: int) -> WorldSamples:
        """The global batch of a step: lognormal lengths. Always the same one."""
        (lengths,), _ = length_source("lognormal").draw(self.world_size * self.batch_size, 1, step)
        rank = torch.arange(self.world_size).repeat_interleave(self.batch_size)
        return WorldSamples(self.world_size, rank, torch.from_numpy(np.minimum(lengths, self.max_length)))

    def seconds(self, world: WorldSamples, owner: Tensor) -> Tensor:
        """Seconds that each rank takes, without noise. Shape [world_size], float64."""
        lengths = world.uih_lengths.double()
        seconds = rank_loads(owner, 1e-6 * (lengths + self.square * lengths**2), self.world_size)
        seconds[self.slow_rank] *= self.slowness
        return seconds


def closed_loop(partitioner: Partitioner, cluster: Cluster, steps: int, seed: int = 0) -> list[float]:
    """Plan, compute, measure, plan with what was measured.

    Args:
        partitioner: A fresh one.
        cluster: What to simulate.
        steps: Steps to run.
        seed: Of the noise.

    Returns:
        Imbalance (max / mean - 1) of the true seconds of every step.
    """
    random = np.random.default_rng(seed)
    found: list[float] = []
    on_the_way: deque[tuple[int, WorldSamples, Tensor]] = deque()
    for step in range(steps):
        world = cluster.batch(step)
        if len(on_the_way) > cluster.delay:
            then, measured, seconds = on_the_way.popleft()
            world = WorldSamples(
                cluster.world_size,
                world.rank,
                world.uih_lengths,
                seconds=seconds,
                seconds_step=torch.full((cluster.world_size,), then),
                measured=measured,
            )
        owner = partitioner(world)
        seconds = cluster.seconds(world, owner)
        found.append(imbalance(seconds))
        noise = torch.from_numpy(1 + cluster.noise * random.standard_normal(cluster.world_size))
        on_the_way.append((step, WorldSamples(cluster.world_size, owner, world.uih_lengths), seconds * noise))
    return found


PARTITIONERS: dict[str, Callable[[], Partitioner]] = {
    "greedy_batch_size, untuned": lambda: greedy_batch_size,
    "VariableBatchSize(1, autotune=True)": lambda: VariableBatchSize(1, autotune=True),
    "VariableBatchSize(1, cost=CostModel())": lambda: VariableBatchSize(1, cost=CostModel()),
    "greedy_batch_size(cost=CostModel())": lambda: greedy_batch_size(cost=CostModel()),
    "home_batch_size(cost=CostModel())": lambda: home_batch_size(cost=CostModel()),
}


@dataclass(frozen=True)
class Outcome:
    """How a partitioner does when seconds arrive late.

    Attributes:
        partitioner: Its name.
        cost: What seconds grow with.
        delay: Steps by which they arrive late.
        first: Imbalance of the first step.
        settled: From which step on it stays under 5 %; None if it never does.
        largest: Of the last hundred steps.
        median: Of the same.
    """

    partitioner: str
    cost: str
    delay: int
    first: float
    settled: int | None
    largest: float
    median: float


def judge(partitioner: str, cost: str, delay: int, found: list[float]) -> Outcome:
    """Boil the imbalance of every step down.

    Example:
        >>> judge("mine", "L", 0, [0.3, 0.2] + [0.01] * 100).settled
        2
    """
    over = [step for step, value in enumerate(found) if value > 0.05]
    settled = over[-1] + 1 if over else 0
    last = found[-100:]
    kept = settled if settled < len(found) else None
    return Outcome(partitioner, cost, delay, found[0], kept, max(last), float(np.median(last)))


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.autotune",
        description="Simulate a cluster with one slow rank and seconds that arrive late; print how even times become.",
        epilog="example:\n  python -m freescale.bench.autotune --delays 1 2 3 5 --results bench/results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--delays", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], metavar="N", help="steps seconds arrive late")
    add("--steps", type=int, default=150, help="at least 101; the last 100 are judged (default 150)")
    add("--slowness", type=float, default=1.3, help="of one rank (default 1.3)")
    add("--seed", type=int, default=0, help="of the noise (default 0)")
    add("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw how even times become (needs matplotlib)")
    add("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file")
    options = parser.parse_args(arguments)
    if options.steps < 101 or options.slowness <= 0 or min(options.delays) < 0:
        parser.error("--steps must be at least 101, --slowness positive and --delays not negative")
    return status_of(lambda: _run(options, Console(emoji=False)))


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .autotune_plot import draw  # before the work, so that a missing library shows at once
    outcomes = [each for square in (0.0, 1e-4) for each in _simulate(options, square, console)]
    title = f"Imbalance of true seconds, one of 64 ranks {options.slowness:g} x as slow"
    costs = dict.fromkeys(each.cost for each in outcomes)
    tables = [_table(f"{title}, cost {cost}", [each for each in outcomes if each.cost == cost]) for cost in costs]
    for table in tables:
        print_table(table, console)
    if options.json is not None:
        write_figures(options.json, {"environment": environment(), "outcomes": [asdict(each) for each in outcomes]})
    if options.plot is not None:
        draw(outcomes, options.plot, title)
    if options.results is not None:
        shown = picture_beside(options.plot, options.results, "imbalance")
        path = write_result(options.results, "autotune", "Autotune with a slow rank", environment(), [*shown, *tables])
        console.print(f"written to {path}")


def _simulate(options: argparse.Namespace, square: float, console: Console) -> list[Outcome]:
    cost, found = "L + L²/10,000" if square else "L", list[Outcome]()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for name, make in progress.track(PARTITIONERS.items(), description="simulating"):
            for delay in options.delays:
                cluster = Cluster(delay=delay, slowness=options.slowness, square=square)
                found.append(judge(name, cost, delay, closed_loop(make(), cluster, options.steps, options.seed)))
    return found


def _table(title: str, outcomes: Sequence[Outcome]) -> Table:
    columns = ["partitioner", "seconds late", "first step", "steps to 5%", "largest of last 100", "median of last 100"]
    table = Table(title, columns)
    for each in outcomes:
        settled = "-" if each.settled is None else f"{each.settled}"
        figures = (f"{each.first:.3f}", settled, f"{each.largest:.4f}", f"{each.median:.4f}")
        table.add(each.partitioner, f"{each.delay}", *figures)
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
