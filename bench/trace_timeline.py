"""What a step's time goes to, read from a Kineto trace: compute, bubble, exposed traffic, host waits (section 5.2).

The *main stream* is the one that computes most. A step's **bubble** is the time in which that stream runs no compute
kernel, whatever the reason; *exposed* traffic is the part of it in which data travels. The bubble is the figure to
compare: traffic counted against kernels of all streams flatters, since one long index kernel on a side stream hides a
transfer that the model waits for.

A transfer's kernel runs from when its own rank comes until the last rank has come and the data is there. The traces of
all ranks tell the two apart: a transfer *moves* for as long as it takes on the rank that is last, and *waits* before.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .intervals import Interval, clip, ends, length, subtract, union

Event = Mapping[str, Any]
Kinds = Sequence[tuple[str, str]]
Durations = Mapping[str, Sequence[float]]

TORCHREC_KINDS: tuple[tuple[str, str], ...] = (
    (r"pec_overlap_dist", "masks"),
    (r"pec_ol_grad", "urgent gradients"),
    (r"pec_nol_grad", "deferred gradients"),
    (r"pec_ol_compute", "late rows"),
    (r"pec_nol_compute", "early rows"),
    (r"All2All_Seq_bwd", "gradients"),
    (r"All2All_Seq_fwd|all2all_sequence", "rows"),
    (r"kjt |all2all_data:|input_dist|sparse_data_dist", "ids"),
)
"""How TorchRec names the launches of its traffic: regular expressions and kinds."""

OUR_KINDS: tuple[tuple[str, str], ...] = ((r"freescale: ((early|late) rows|(urgent|deferred) gradients)", r"\1"),)
"""How `freescale.embedding` names them."""

DENSE_KINDS: tuple[tuple[str, str], ...] = ((r"allreduce|all_reduce|AllReduce|DistributedDataParallel", "dense"),)
"""The gradients of the replicated part."""

ALL_KINDS = (*OUR_KINDS, *TORCHREC_KINDS, *DENSE_KINDS)

_WAITS = re.compile(
    r"^(cuda(Stream|Event|Device)Synchronize|cu(Stream|Event|Ctx)Synchronize|cudaMemcpy(2D|3D|ToSymbol|FromSymbol)?"
    r"|cuMemcpy(DtoH|HtoD)(_v2)?|cudaFree|cudaMalloc|cudaHostAlloc|cudaMallocHost|cudaFreeHost|cudaHostRegister)$"
)
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2}


@dataclass(frozen=True)
class Traffic:
    """One kind of traffic, a step.

    Attributes:
        total_ms: Time in which it travels.
        exposed_ms: The part of it in which the main stream computes nothing.
        calls: Kernels (or ranges of host traffic).
        sent_bytes: What this rank puts in, where the trace says so.
        moving_ms: The part of `total_ms` in which no rank is waited for; None without the traces of other ranks.
        exposed_moving_ms: The same of `exposed_ms`.
    """

    total_ms: float
    exposed_ms: float
    calls: float
    sent_bytes: float
    moving_ms: float | None = None
    exposed_moving_ms: float | None = None


@dataclass(frozen=True)
class HostWait:
    """Runtime calls that make the host wait for the device, a step.

    Attributes:
        call: Name of the runtime call.
        thread: "trainer", "autograd" (the thread of backward, for which the trainer waits) or "other".
        where: What encloses it: ranges and operators, outermost first, with # for numbers.
        calls: How many.
        ms: How long they took.
    """

    call: str
    thread: str
    where: str
    calls: float
    ms: float


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one rank's step, on average over the steps looked at.

    Attributes:
        num_steps: Steps looked at.
        step_ms: From the first kernel of a step on the main stream to the first of the next.
        compute_ms: The main stream runs a compute kernel.
        bubble_ms: It does not; the sum of the next four.
        exposed_ms: Data travels between ranks meanwhile.
        side_ms: Only kernels of other streams run meanwhile.
        copy_ms: Only copies run meanwhile.
        idle_ms: Nothing runs.
        traffic: By kind; kinds that overlap each count in full.
        host_waits: Longest first.
        exposed_moving_ms: The part of `exposed_ms` in which a transfer moves; None without the traces of other ranks.
    """

    num_steps: int
    step_ms: float
    compute_ms: float
    bubble_ms: float
    exposed_ms: float
    side_ms: float
    copy_ms: float
    idle_ms: float
    traffic: dict[str, Traffic]
    host_waits: list[HostWait]
    exposed_moving_ms: float | None = None

    def waits_of_trainer(self) -> list[HostWait]:
        """Waits that hold up the trainer: on its thread, and on autograd's."""
        return [wait for wait in self.host_waits if wait.thread != "other"]


# ---- the trace ---------------------------------------------------------------------------------------------------


def read_events(path: Path) -> list[Event]:
    """Read what `torch.profiler.profile.export_chrome_trace` wrote, also compressed (`.gz`), or raise ValueError."""
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        return [event for event in found["traceEvents"] if event.get("ph") == "X"]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no trace of torch.profiler: {type(error).__name__}: {error}") from error


def step_times(
    events: Sequence[Event],
    kinds: Kinds = ALL_KINDS,
    *,
    communication: str = "nccl",
    host_kinds: Kinds = (),
    step_name: str = "step_",
    skip_first: int = 2,
    skip_last: int = 1,
    shortest: Durations | None = None,
) -> StepTimes:
    """Divide the time of the steps in a trace of one rank.

    Args:
        events: What `read_events` gives, from a profile with CPU and CUDA activities in which every step ran inside
            `record_function(f"{step_name}{number}")`.
        kinds: Regular expressions and kinds for communication kernels; the first that is found decides (a kind may
            refer to its groups, as in `re.sub`). They are searched in what encloses the launch, outermost first, and
            the kernel's own group and name, joined by "/".
        communication: Regular expression of the kernels that move data between ranks.
        host_kinds: Regular expressions and kinds of ranges (`record_function`, on any thread) that are communication by
            themselves, for transports without kernels.
        step_name: What the names of the steps' ranges begin with.
        skip_first: Steps left out at the start.
        skip_last: Steps left out at the end; at least one, since its end is not seen.
        shortest: What `shortest_transfers` says of the traces of all ranks; None: what waits is not told from what
            moves.

    Raises:
        ValueError: Too few steps, or no compute kernels on a device, in the trace.
    """
    trace = _Trace(events, re.compile(communication), step_name)
    if skip_last < 1 or len(trace.steps) < skip_first + skip_last + 1:
        raise ValueError(
            f"the trace must have more than skip_first + skip_last = {skip_first} + {skip_last} steps (skip_last at "
            f"least 1), it has {len(trace.steps)}"
        )
    if not trace.on_main:
        raise ValueError("the trace must have compute kernels of a device, it has none")
    first, last = trace.steps[skip_first], trace.steps[-skip_last]
    low, high = trace.starts_on_device(first[0]), trace.starts_on_device(last[0])
    num_steps = len(trace.steps) - skip_first - skip_last
    sorted_out = trace.by_kind(kinds, host_kinds)
    moving = None if shortest is None else {k: ends(map(_span, e), shortest.get(k, ())) for k, e in sorted_out.items()}
    return _divide(trace, low, high, num_steps, sorted_out, moving, trace.host_waits(first[0], last[0], num_steps))


def shortest_transfers(
    traces: Iterable[Sequence[Event]], kinds: Kinds = ALL_KINDS, *, communication: str = "nccl"
) -> Durations:
    """How long each transfer took on the rank where it was shortest, which was the last to come.

    Args:
        traces: Of all ranks, over the same steps, each to its end: a transfer is the same on all ranks by its place
            among those of its kind, counted from the end.
        kinds: As for `step_times`.
        communication: As for `step_times`.

    Returns:
        By kind the microseconds of each transfer that all ranks have, the last one first.
    """
    durations: list[dict[str, list[float]]] = []
    for events in traces:
        sorted_out = _Trace(events, re.compile(communication), "step_").by_kind(kinds, ())
        durations.append({kind: [e.get("dur", 0) for e in reversed(found)] for kind, found in sorted_out.items()})
    common = set.intersection(*(set(each) for each in durations)) if durations else set()
    return {kind: list(map(min, zip(*(each[kind] for each in durations), strict=False))) for kind in sorted(common)}


def _divide(
    trace: _Trace,
    low: float,
    high: float,
    num_steps: int,
    sorted_out: Mapping[str, Sequence[Event]],
    moves: Mapping[str, Sequence[Interval]] | None,
    host_waits: list[HostWait],
) -> StepTimes:
    """Split the window between the main stream, traffic, other streams and copies, in that order of precedence."""

    def ms(intervals: Iterable[Interval]) -> float:
        return length(intervals) / 1e3 / num_steps

    def inside(intervals: Iterable[Interval]) -> list[Interval]:
        return union(clip(intervals, low, high))

    main, computing, copies = (inside(map(_span, each)) for each in (trace.on_main, trace.compute, trace.copies))
    traffic = {}
    for kind, found in sorted_out.items():
        busy = inside(map(_span, found))
        shown = [event for event in found if low < _span(event)[1] and _span(event)[0] < high]
        if shown:
            sent = sum(_sent_bytes(event) for event in shown) / num_steps
            moved = None if moves is None else inside(moves[kind])
            parts = (None, None) if moved is None else (ms(moved), ms(subtract(moved, main)))
            traffic[kind] = Traffic(ms(busy), ms(subtract(busy, main)), len(shown) / num_steps, sent, *parts)
    travelling = inside(_span(event) for found in sorted_out.values() for event in found)
    moving = None if moves is None else inside(interval for each in moves.values() for interval in each)
    bubble = subtract([(low, high)], main)
    exposed = subtract(travelling, main)
    side = subtract(subtract(computing, main), travelling)
    copying = subtract(subtract(subtract(copies, main), travelling), computing)
    return StepTimes(
        num_steps=num_steps,
        step_ms=ms([(low, high)]),
        compute_ms=ms(main),
        bubble_ms=ms(bubble),
        exposed_ms=ms(exposed),
        side_ms=ms(side),
        copy_ms=ms(copying),
        idle_ms=ms(bubble) - ms(exposed) - ms(side) - ms(copying),
        traffic=traffic,
        host_waits=host_waits,
        exposed_moving_ms=None if moving is None else ms(subtract(moving, main)),
    )


class _Trace:
    """The events of a trace, sorted by what they are.

    Args:
        events: Complete events.
        communication: Tells kernels that move data between ranks from those that compute.
        step_name: What the names of the steps' ranges begin with.
    """

    def __init__(self, events: Sequence[Event], communication: re.Pattern[str], step_name: str) -> None:
        kernels = [e for e in events if e.get("cat") == "kernel"]
        self.copies = [e for e in events if e.get("cat") in ("gpu_memcpy", "gpu_memset")]
        self.compute = [e for e in kernels if not communication.search(e["name"])]
        self.traffic = [e for e in kernels if communication.search(e["name"])]
        self.runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        self.ranges = [e for e in events if e.get("cat") in ("user_annotation", "cpu_op", "python_function")]
        named = [e for e in self.ranges if e["cat"] == "user_annotation" and e["name"].startswith(step_name)]
        self.ranges = [e for e in self.ranges if not e["name"].startswith(step_name)]
        self.steps = sorted(_span(e) for e in named)
        self._trainer = _thread(named[0]) if named else None
        self._launches: dict[int, Event] = {}
        for event in self.runtime:
            correlation = event.get("args", {}).get("correlation")
            if correlation is not None and ("aunch" in event["name"] or correlation not in self._launches):
                self._launches[correlation] = event
        busy: dict[Any, float] = defaultdict(float)
        for event in self.compute:
            busy[_stream(event)] += event.get("dur", 0)
        main = max(busy, key=lambda stream: busy[stream]) if busy else None
        self.on_main = [e for e in self.compute if _stream(e) == main]
        self.traffic.sort(key=lambda e: float((self._launch(e) or e)["ts"]))
        launched = [(launch["ts"], e["ts"]) for e in self.on_main if (launch := self._launch(e)) is not None]
        self._main_starts = sorted(launched)

    def starts_on_device(self, host_time: float) -> float:
        """Start of the first kernel on the main stream that was launched at a time or later."""
        at = bisect_left(self._main_starts, (host_time, 0.0))
        if at == len(self._main_starts):
            raise ValueError("a step in the trace launches nothing on the stream that computes most")
        starts: float = self._main_starts[at][1]
        return starts

    def by_kind(self, kinds: Kinds, host_kinds: Kinds) -> dict[str, list[Event]]:
        """Sort traffic by kind, and by the name of the collective where no kind is found; in the order of launches."""
        sorted_out: dict[str, list[Event]] = defaultdict(list)
        launches = [launch for e in self.traffic if (launch := self._launch(e)) is not None]
        enclosing = _enclosing(self.ranges, launches)
        for event in self.traffic:
            arguments, launch = event.get("args", {}), self._launch(event)
            names = enclosing[id(launch)] if launch is not None else []
            own = [arguments.get("Process Group Description"), arguments.get("Collective name"), event["name"]]
            text = "/".join([*names, *(str(each) for each in own if each)])
            default = f"other: {arguments.get('Collective name') or event['name']}"
            sorted_out[_first_match(kinds, text) or default].append(event)
        for event in self.ranges:
            if event["cat"] == "user_annotation" and (kind := _first_match(host_kinds, event["name"])):
                sorted_out[kind].append(event)
        return sorted_out

    def host_waits(self, low: float, high: float, num_steps: int) -> list[HostWait]:
        """Find runtime calls between two host times that wait for the device or may do so."""
        pageable = {e.get("args", {}).get("correlation") for e in self.copies if "Pageable" in e["name"]}
        found = []
        for event in self.runtime:
            may_wait = _WAITS.match(event["name"]) or event.get("args", {}).get("correlation") in pageable
            if may_wait and low <= event["ts"] < high:
                found.append(event)
        autograd = {_thread(e) for e in self.ranges if e["name"].startswith("autograd::engine::evaluate_function")}
        enclosing = _enclosing(self.ranges, found)
        groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for event in found:
            thread = _thread(event)
            role = "trainer" if thread == self._trainer else "autograd" if thread in autograd else "other"
            where = re.sub(r"\b\d+\b", "#", " / ".join(enclosing[id(event)]))  # a number tells steps apart
            groups[event["name"], role, where].append(event.get("dur", 0) / 1e3)
        waits = [HostWait(*key, len(took) / num_steps, sum(took) / num_steps) for key, took in groups.items()]
        return sorted(waits, key=lambda wait: -wait.ms)

    def _launch(self, kernel: Event) -> Event | None:
        return self._launches.get(kernel.get("args", {}).get("correlation"))


def _enclosing(ranges: Sequence[Event], events: Sequence[Event]) -> dict[int, list[str]]:
    """Names of the ranges around events on their own thread, outermost first, by the events' `id`."""
    threads: dict[Any, tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for event in events:
        threads[_thread(event)][1].append(event)
    for event in ranges:
        if _thread(event) in threads:
            threads[_thread(event)][0].append(event)
    names = {}
    for around, asked in threads.values():
        around.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
        opened: list[Event] = []
        at = 0
        for event in sorted(asked, key=lambda e: float(e["ts"])):
            while at < len(around) and around[at]["ts"] <= event["ts"]:
                opened.append(around[at])
                at += 1
            opened = [e for e in opened if _span(e)[1] > event["ts"]]
            names[id(event)] = [e["name"] for e in opened]
    return names


def _first_match(kinds: Kinds, text: str) -> str | None:
    found = ((re.search(pattern, text), kind) for pattern, kind in kinds)
    return next((match.expand(kind) for match, kind in found if match), None)


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _thread(event: Event) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _stream(event: Event) -> Any:
    return event.get("args", {}).get("stream")


def _sent_bytes(event: Event) -> int:
    arguments = event.get("args", {})
    return int(arguments.get("In msg nelems") or 0) * _BYTES.get(str(arguments.get("dtype")), 1)
