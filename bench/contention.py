"""Attention and matrix products, alone and beside traffic between GPUs (paper, section 5.3, Figure 10)."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .transport_ways import Begin, agree, is_right, largest, to_others, together

_STEP_MS = 30.0
_HEAD = 64
_TOKENS = 1 << 15  # of a pass over the block, about
_ENDLESS_MESSAGE_BYTES = 64 << 20
_MOST_MESSAGES = 3000
_JOINS = 4  # messages under way at once


@dataclass(frozen=True)
class Contention:
    """One workload beside one way.

    Attributes:
        sequence: Tokens of a sequence.
        hidden: Width of the block.
        traffic: "256 MB a step" or "endless".
        way: Name of the way, or "alone".
        compute_ms: Median of the workload on the compute stream; of the slowest rank.
        slowdown: Of the median against the same workload alone, as a fraction.
        moved_gb: Sent by a rank while the workload ran.
        rate: GB/s each way while traffic and workload ran, for endless traffic.
        outlasted: Endless traffic went on for as long as the workload did.
    """

    sequence: int
    hidden: int
    traffic: str
    way: str
    compute_ms: float
    slowdown: float
    moved_gb: float
    rate: float
    outlasted: bool = True


class Block:
    """A transformer block in bf16, forward, run over and over until a step takes about 30 ms.

    Without `computes` nothing is run: processes that share a GPU take turns on it, so only one of them may compute.

    Attributes:
        launch_ms: What it takes the host to enqueue a step.
    """

    def __init__(self, sequence: int, hidden: int, computes: bool = True) -> None:
        self._computes = computes
        self._batch = max(1, _TOKENS // sequence)
        self._heads = hidden // _HEAD
        make = torch.Generator("cuda").manual_seed(0)
        shapes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
        self._weights = [
            torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[0])
            for shape in shapes
        ]
        shape = (self._batch, sequence, hidden)
        self._input = torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16)
        self._passes = 1
        self.step()
        once = largest(statistics.median(self.timed() for _ in range(3)))
        self._passes = max(1, round(_STEP_MS / once))
        self.step()
        torch.cuda.synchronize()
        clock = time.perf_counter()
        self.step()
        self.launch_ms = (time.perf_counter() - clock) * 1e3
        torch.cuda.synchronize()

    def step(self) -> Tensor:
        """Enqueue a step on the current stream."""
        values = self._input
        for _ in range(self._passes if self._computes else 0):
            values = self._once(values)
        return values

    def _once(self, values: Tensor) -> Tensor:
        widened = (values @ self._weights[0]).unflatten(-1, (3, self._heads, _HEAD)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(widened[0], widened[1], widened[2], is_causal=True)
        values = attended.transpose(1, 2).flatten(2) @ self._weights[1]
        return torch.relu(values @ self._weights[2]) @ self._weights[3]

    def timed(self, before: Callable[[], object] = lambda: None) -> float:
        """Milliseconds of a step on the GPU, from its first kernel to its last; waits for it."""
        before()
        begin, end = self.begin()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def begin(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueue a step. Returns events around it."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.step()
        end.record()
        return begin, end


def measure(
    block: Block,
    place: tuple[int, int],
    ways: dict[str, Begin],
    rank: int,
    world_size: int,
    steps: int,
    has_time: Callable[[], bool],
) -> list[Contention]:
    """Run a workload alone, and beside each way with 256 MB a step and with traffic that does not end; collective.

    Ways for which no time is left are left out.
    """
    found = []
    alone = largest(statistics.median(block.timed() for _ in range(steps)))
    found.append(Contention(*place, "none", "alone", alone, 0.0, 0.0, 0.0))
    for name, begin in ways.items():
        if not agree(has_time()):
            break
        try:
            found += _beside(block, place, name, begin, Place(rank, world_size, steps, alone))
        except RuntimeError as error:  # on all ranks
            sys.stdout.write(f"{name} beside sequence {place[0]}, hidden {place[1]}: {error}\n")
    return found


@dataclass(frozen=True)
class Place:
    """Who measures: this rank of so many, so many steps, of so many milliseconds alone."""

    rank: int
    world_size: int
    steps: int
    alone_ms: float


def _beside(block: Block, place: tuple[int, int], name: str, begin: Begin, here: Place) -> list[Contention]:
    if not is_right(begin, here.rank, here.world_size, 3 << 20):
        raise RuntimeError("wrong data arrived; nothing is timed")
    traffic, steps = Traffic(begin, here.rank, here.world_size), here.steps
    # Just before and just after, as clocks change with what ran before.
    first = statistics.median(block.timed() for _ in range(steps // 2 + 1))
    send = partial(traffic.send, 1, 256 << 20)
    beside = together(lambda: [block.timed(send) for _ in range(steps)])
    endless = [traffic.endless(block, here.alone_ms) for _ in range(max(3, steps // 2))]
    last = statistics.median(block.timed() for _ in range(steps // 2 + 1))
    base = largest((first + last) / 2)
    slow = largest(statistics.median(beside))
    found = [Contention(*place, "256 MB a step", name, slow, slow / base - 1, 0.268, 0.0)]
    slow = largest(statistics.median(ms for ms, _, _ in endless))
    rate = -largest(-statistics.median(rate for _, rate, _ in endless))
    outlasted = agree(all(outlasted for _, _, outlasted in endless))
    return [*found, Contention(*place, "endless", name, slow, slow / base - 1, rate * slow / 1e3, rate, outlasted)]


class Traffic:
    """Messages to the other ranks, beside compute.

    Args:
        begin: The way.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, begin: Begin, rank: int, world_size: int) -> None:
        self._begin, self._place = begin, (rank, world_size)
        self._stream = torch.cuda.Stream()
        self._buffers: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.message_ms = self._message_ms()

    def send(self, count: int, size: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Begin messages, a few at a time under way. Returns events around them."""
        sending = self._begin_to_send(size)
        sending.send(count)
        return sending.begun, sending.end()

    def _begin_to_send(self, size: int) -> _Sending:
        splits = to_others(*self._place, size)
        if size not in self._buffers:
            rows = torch.zeros(sum(splits), dtype=torch.uint8, device="cuda")
            self._buffers[size] = rows, [torch.empty_like(rows) for _ in range(_JOINS)]
            torch.cuda.synchronize()
        return _Sending(self._begin, self._stream, splits, *self._buffers[size])

    def _message_ms(self) -> float:
        """What each message takes when many follow one another."""
        together(lambda: self.send(_JOINS, _ENDLESS_MESSAGE_BYTES))

        def forty() -> float:
            begun, ended = self.send(40, _ENDLESS_MESSAGE_BYTES)
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 40

        return largest(together(forty))

    def endless(self, block: Block, alone_ms: float) -> tuple[float, float, bool]:
        """Run a step beside traffic that is meant to outlast it.

        What a stream holds is limited: whoever enqueues more waits until some of it is done. So the step is enqueued
        when so many messages are under way as its launches take, and the other messages while it runs.

        Returns:
            Milliseconds of the step, rate of the traffic in GB/s each way, and whether the traffic did outlast it.
        """
        count = min(_MOST_MESSAGES, math.ceil(2.2 * alone_ms / self.message_ms) + 8)
        ahead = min(count, math.ceil(1.5 * block.launch_ms / self.message_ms) + _JOINS)

        def beside() -> tuple[float, float, bool]:
            sending = self._begin_to_send(_ENDLESS_MESSAGE_BYTES)
            sending.send(ahead)
            first, over = block.begin()
            sending.send(count - ahead)
            ended = sending.end()
            ended.synchronize()
            over.synchronize()
            rate = count * _ENDLESS_MESSAGE_BYTES / sending.begun.elapsed_time(ended) / 1e6
            return first.elapsed_time(over), rate, over.elapsed_time(ended) > 0

        agree(True)
        return together(beside)


class _Sending:
    """Messages of one size, begun on a stream one after another.

    Attributes:
        begun: Recorded before the first.
    """

    def __init__(
        self, begin: Begin, stream: torch.cuda.Stream, splits: list[int], rows: Tensor, outs: list[Tensor]
    ) -> None:
        self._begin, self._stream, self._splits, self._rows, self._outs = begin, stream, splits, rows, outs
        self._under_way: deque[Callable[[], object]] = deque()
        self._count = 0
        self.begun = torch.cuda.Event(enable_timing=True)
        self.begun.record(stream)

    def send(self, count: int) -> None:
        """Begin so many more."""
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                if len(self._under_way) == len(self._outs):
                    self._under_way.popleft()()
                out = self._outs[self._count % len(self._outs)]
                self._under_way.append(self._begin(self._rows, self._splits, self._splits, out))
                self._count += 1

    def end(self) -> torch.cuda.Event:
        """An event behind all of them."""
        ended = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            while self._under_way:
                self._under_way.popleft()()
            ended.record()
        return ended
