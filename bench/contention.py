"""Attention and matrix products, alone and beside traffic between GPUs (paper, section 5.3, Figure 10)."""

from __future__ import annotations

import math
import statistics
import sys
import time
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
_MOST_MESSAGES = 600


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
        return self.run()[0]

    def run(self) -> tuple[float, torch.cuda.Event]:
        """Milliseconds of a step, and an event at its end; waits for it."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)), end


def measure(
    block: Block, place: tuple[int, int], ways: dict[str, Begin], rank: int, world_size: int, steps: int
) -> list[Contention]:
    """Run a workload alone, and beside each way with 256 MB a step and with traffic that does not end; collective."""
    found = []
    alone = largest(statistics.median(block.timed() for _ in range(steps)))
    found.append(Contention(*place, "none", "alone", alone, 0.0, 0.0, 0.0))
    for name, begin in ways.items():
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

    def send(self, count: int, size: int, joins: int = 4) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Begin messages on a stream of their own, a few at a time under way. Returns events around them."""
        splits = to_others(*self._place, size)
        if size not in self._buffers:
            rows = torch.zeros(sum(splits), dtype=torch.uint8, device="cuda")
            self._buffers[size] = rows, [torch.empty_like(rows) for _ in range(joins)]
            torch.cuda.synchronize()
        rows, outs = self._buffers[size]
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begun.record()
            under_way: list[Callable[[], object]] = []
            for number in range(count):
                if len(under_way) == joins:
                    under_way.pop(0)()
                under_way.append(self._begin(rows, splits, splits, outs[number % joins]))
            for join in under_way:
                join()
            ended.record()
        return begun, ended

    def _message_ms(self) -> float:
        """How much later the last of some messages arrives for each message more, once all have been begun."""
        together(lambda: self.send(4, _ENDLESS_MESSAGE_BYTES))

        def forty() -> float:
            clock = time.perf_counter()
            begun, ended = self.send(40, _ENDLESS_MESSAGE_BYTES)
            host_ms = (time.perf_counter() - clock) * 1e3
            ended.synchronize()
            whole = float(begun.elapsed_time(ended))
            return max(whole - host_ms, whole / 4) / 40

        return largest(together(forty))

    def endless(self, block: Block, alone_ms: float) -> tuple[float, float, bool]:
        """Run a step beside traffic that is meant to outlast it.

        Returns:
            Milliseconds of the step, rate of the traffic in GB/s each way, and whether the traffic did outlast it.
        """
        count = min(_MOST_MESSAGES, math.ceil(2.2 * alone_ms / self.message_ms) + 8)

        def beside() -> tuple[float, float, bool]:
            begun, ended = self.send(count, _ENDLESS_MESSAGE_BYTES)
            took, over = block.run()
            ended.synchronize()
            rate = count * _ENDLESS_MESSAGE_BYTES / begun.elapsed_time(ended) / 1e6
            return took, rate, over.elapsed_time(ended) > 0

        agree(True)
        return together(beside)
