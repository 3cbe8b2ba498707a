"""One rank of bench.transport_host: our transport over MPI and plain MPI, on the same buffers in turn (section 5.3)."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..transport import Transport, connect
from .launch import rank_main
from .transport_ways import to_others

if TYPE_CHECKING:
    from mpi4py import MPI

_BUDGET_S = 0.06
_UNDER_WAY = 4
_ROUNDS_OF_LONG_ONES = 4
Join = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """What the ranks are to measure.

    Attributes:
        operations: "all_to_all", "all_gather".
        sizes: Bytes that a rank sends to all others together.
        rounds: How often each way has its turn.
        limit_s: No size is begun after so many seconds.
    """

    operations: tuple[str, ...] = ("all_to_all", "all_gather")
    sizes: tuple[int, ...] = ()
    rounds: int = 7
    limit_s: float = 60.0


@dataclass(frozen=True)
class Timing:
    """One way with one size.

    Attributes:
        operation: What was called.
        way: "MPI", "MPI non-blocking", "mpi" or "mpi, sizes unchecked".
        size_bytes: What a rank sends.
        correct: Whether the right bytes arrived; otherwise nothing was timed.
        one_us: Median of the rounds, one at a time, of the slowest rank.
        flight_us: A message when four are under way; 0 for a way that blocks.
    """

    operation: str
    way: str
    size_bytes: int
    correct: bool
    one_us: float = 0.0
    flight_us: float = 0.0


class Buffers:
    """The same memory for all ways: one source, and as many targets as may be under way."""

    def __init__(self, operation: str, rank: int, world_size: int, size_bytes: int) -> None:
        self.operation, self.rank, self.world_size = operation, rank, world_size
        if operation == "all_to_all":
            self.sent = self.received = to_others(rank, world_size, size_bytes)
        else:
            block = size_bytes // (world_size - 1)
            self.sent, self.received = [block], [block] * world_size
        self.piece = max(self.sent)
        self.size_bytes = self.piece * (world_size - 1)
        self.source = torch.empty(sum(self.sent), dtype=torch.uint8)
        self.targets = [torch.empty(sum(self.received), dtype=torch.uint8) for _ in range(_UNDER_WAY)]

    def fill(self, step: int) -> None:
        """Put bytes into the source that name their sender, receiver and step, and spoil the targets."""
        whom = range(self.world_size) if self.operation == "all_to_all" else [0]
        pieces = [self._content(self.rank, peer, step) for peer in whom if self._travels(self.rank, peer)]
        self.source.copy_(torch.cat(pieces))
        for target in self.targets:
            target.fill_(255)

    def are_right(self, step: int) -> bool:
        """Whether all targets have what the others' `fill` made."""
        to = self.rank if self.operation == "all_to_all" else 0
        pieces = [self._content(peer, to, step) for peer in range(self.world_size) if self._travels(peer, self.rank)]
        wanted = torch.cat(pieces)
        return all(torch.equal(target, wanted) for target in self.targets)

    def _travels(self, source: int, target: int) -> bool:
        return self.operation == "all_gather" or source != target

    def _content(self, source: int, target: int, step: int) -> Tensor:
        first = (7 * source + 3 * target + step) % 31 << 26
        return torch.arange(first, first + self.piece // 4 + 1, dtype=torch.int32).view(torch.uint8)[: self.piece]


class Way:
    """Begins one operation into one target; what it returns waits for it."""

    def __init__(self, name: str, begin: Callable[[Buffers, Tensor], Join], blocks: bool = False) -> None:
        self.name, self.begin, self.blocks = name, begin, blocks


def make_ways(communicator: MPI.Intracomm, transports: dict[str, Transport]) -> list[Way]:
    """Plain MPI, as a program of one's own would call it, and ours."""

    def messages(buffers: Buffers, target: Tensor) -> tuple[list[object], list[object]]:
        from mpi4py import MPI

        starts = np.cumsum(buffers.received) - buffers.received
        received = [target.numpy(), buffers.received, starts.tolist(), MPI.BYTE]
        if buffers.operation == "all_gather":
            return [buffers.source.numpy(), buffers.piece, MPI.BYTE], received
        return [buffers.source.numpy(), buffers.sent, starts.tolist(), MPI.BYTE], received

    def blocking(buffers: Buffers, target: Tensor) -> Join:
        gathers = buffers.operation == "all_gather"
        (communicator.Allgatherv if gathers else communicator.Alltoallv)(*messages(buffers, target))
        return _nothing

    def posted(buffers: Buffers, target: Tensor) -> Join:
        gathers = buffers.operation == "all_gather"
        request = (communicator.Iallgatherv if gathers else communicator.Ialltoallv)(*messages(buffers, target))
        wait: Join = request.Wait
        return wait

    def ours(transport: Transport) -> Callable[[Buffers, Tensor], Join]:
        def begin(buffers: Buffers, target: Tensor) -> Join:
            if buffers.operation == "all_gather":
                return transport.all_gather(buffers.source, buffers.received, target).wait
            return transport.all_to_all(buffers.source, buffers.sent, buffers.received, target).wait

        return begin

    plain = [Way("MPI", blocking, blocks=True), Way("MPI non-blocking", posted)]
    return [*plain, *(Way(name, ours(transport)) for name, transport in transports.items())]


def _nothing() -> None:
    """What has been waited for already."""


class Clock:
    """Times ways in turn, so that what else the machine does meets all of them."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator

    def largest(self, mine: float) -> float:
        """The largest of all ranks' numbers; collective."""
        from mpi4py import MPI

        return float(self._communicator.allreduce(mine, MPI.MAX))

    def measure(self, ways: list[Way], buffers: Buffers, rounds: int) -> list[Timing]:
        """Check every way, then time all that are right."""
        size = buffers.size_bytes
        wrong = [way for way in ways if not self._is_right(way, buffers)]
        right = [way for way in ways if way not in wrong]
        counts = {way.name: self._count(way, buffers) for way in right}
        ones: dict[str, list[float]] = {way.name: [] for way in right}
        flights: dict[str, list[float]] = {way.name: [] for way in right}
        for _ in range(rounds if max(counts.values()) > 1 else min(rounds, _ROUNDS_OF_LONG_ONES)):
            for way in right:
                ones[way.name].append(self._one_at_a_time(way, buffers, counts[way.name]))
                if not way.blocks:
                    flights[way.name].append(self._in_flight(way, buffers, counts[way.name]))
        found = [Timing(buffers.operation, way.name, size, correct=False) for way in wrong]
        for way in right:
            flight = statistics.median(flights[way.name] or [0.0])
            found.append(Timing(buffers.operation, way.name, size, True, statistics.median(ones[way.name]), flight))
        return found

    def _is_right(self, way: Way, buffers: Buffers) -> bool:
        found = True
        for step in range(2):
            buffers.fill(step)
            for join in [way.begin(buffers, target) for target in buffers.targets]:
                join()
            found = found and buffers.are_right(step)
        return self.largest(0.0 if found else 1.0) == 0.0

    def _count(self, way: Way, buffers: Buffers) -> int:
        """How many to time at once."""
        once = self._one_at_a_time(way, buffers, 1) / 1e6
        return max(1, min(1000, int(_BUDGET_S / max(once, 1e-6))))

    def _one_at_a_time(self, way: Way, buffers: Buffers, count: int) -> float:
        target = buffers.targets[0]
        self._communicator.Barrier()
        clock = time.perf_counter()
        for _ in range(count):
            way.begin(buffers, target)()
        return self.largest((time.perf_counter() - clock) / count * 1e6)

    def _in_flight(self, way: Way, buffers: Buffers, count: int) -> float:
        self._communicator.Barrier()
        clock = time.perf_counter()
        fours = -(-count // _UNDER_WAY)
        for _ in range(fours):
            for join in [way.begin(buffers, target) for target in buffers.targets]:
                join()
        return self.largest((time.perf_counter() - clock) / (_UNDER_WAY * fours) * 1e6)


def main(path: Path) -> None:
    """Measure and, on rank 0, write `found.json` beside the settings after every size."""
    settings = Settings(**json.loads(path.read_text()))
    begun = time.monotonic()
    transports = {"mpi": connect("mpi", timeout_s=30)}
    transports["mpi, sizes unchecked"] = transports["mpi"].channel("unchecked", check_sizes=False)
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD.Dup()
    clock, rank = Clock(communicator), communicator.Get_rank()
    found: list[Timing] = []
    ways = make_ways(communicator, transports)
    for operation in settings.operations:
        for size in settings.sizes:
            if clock.largest(time.monotonic() - begun) > settings.limit_s:
                break
            found += clock.measure(ways, Buffers(operation, rank, communicator.Get_size(), size), settings.rounds)
            if rank == 0:
                path.with_name("found.json").write_text(json.dumps([asdict(each) for each in found]))
                sys.stdout.write(f"{operation}, {size} bytes: done\n")
                sys.stdout.flush()
    communicator.Barrier()
    transports["mpi"].close()


if __name__ == "__main__":
    with rank_main(Path(sys.argv[1])):
        main(Path(sys.argv[1]))
