"""Tables of bench.end_to_end: step time, waiting and its causes, memory, for every technique (section 5.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from .end_to_end_settings import CONTENDERS, Cell
from .tables import Table

_IDS = ("ids", "masks")
_ROWS = ("rows", "early rows", "late rows")
_GRADIENTS = ("gradients", "urgent gradients", "deferred gradients")
_WORTH = 0.05  # share of the baseline's step from which the goal counts
_LITTLE = 0.01  # and what a step may take longer where it does not


@dataclass(frozen=True)
class Row:
    """One contender in one workload over one link; times in milliseconds.

    Attributes:
        step: On average, of the slower rank; the middle one of several turns.
        turns: The same of each turn.
        samples_per_s: Of all ranks together.
        peak_bytes: Beyond what is there between steps, of the rank with more.
        waited: Longest wait for a balanced batch; None where nothing is balanced.
        loss: Of the last step, over all ranks.
        traced: The step under the profiler; None without a trace, as the rest.
        compute: The main stream computes, on average over ranks.
        bubble: It does not: waiting for ranks, traffic, copies, the host.
        straggling: Ranks wait for the one that computes longest, step by step, on average over ranks.
        waiting: Part of the bubble in which data travels, or a rank waits for it.
        moving: Part of it in which data moves; None where that is not known, as of one rank.
        exposed: As `waiting`, by kind; kinds that overlap count in full.
        other: The rest of the bubble: side streams, copies, nothing at all.
    """

    step: float
    turns: list[float]
    samples_per_s: float
    peak_bytes: float
    waited: float | None
    loss: float
    traced: float | None = None
    compute: float = 0.0
    bubble: float = 0.0
    straggling: float = 0.0
    waiting: float = 0.0
    moving: float | None = None
    exposed: dict[str, float] = field(default_factory=dict)
    other: float = 0.0

    @property
    def straggler_percentage(self) -> float:
        """Share of the step."""
        return 100 * self.straggling / self.traced if self.traced else float("nan")

    @property
    def bubble_percentage(self) -> float:
        """Share of the step."""
        return 100 * self.bubble / self.traced if self.traced else float("nan")


Key = tuple[str, Cell, str]


def rows(found: list[dict[str, Any]], world_size: int) -> dict[Key, Row]:
    """Put together what the ranks recorded, by link, workload and contender."""
    measured: dict[Key, list[dict[str, Any]]] = {}
    traces: dict[Key, list[dict[str, Any]]] = {}
    for each in found:
        into = {"measurement": measured, "trace": traces}.get(each["kind"])
        if into is not None:
            into.setdefault((each["link"], Cell(**each["cell"]), each["contender"]), []).append(each)
    return {key: _row(key[1], records, traces.get(key, []), world_size) for key, records in measured.items()}


def _row(cell: Cell, records: list[dict[str, Any]], traces: list[dict[str, Any]], world_size: int) -> Row:
    by_rank: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in records:
        by_rank.setdefault((record.get("launch", 0), record["rank"]), []).append(record)
    launches = sorted({launch for launch, _ in by_rank})
    turns = [
        max(mean(each["step_ms"]) for each in turn)
        for launch in launches
        for turn in zip(*(own for (of, _), own in by_rank.items() if of == launch), strict=False)
    ]
    waited = [ms for record in records for ms in record["waited_ms"]]
    step = median(turns)
    row = {
        "step": step,
        "turns": turns,
        "samples_per_s": 1e3 * cell.batch_size * world_size / step,
        "peak_bytes": max(record["peak_bytes"] for record in records),
        "waited": max(waited) if waited else None,
        "loss": mean(own[-1]["losses"][-1] for own in by_rank.values()),
    }
    times = [
        [trace["times"] for trace in traces if "times" in trace and trace.get("launch", 0) == launch]
        for launch in sorted({trace.get("launch", 0) for trace in traces})
    ]
    return Row(**row, **_causes([of_launch for of_launch in times if len(of_launch) == world_size]))


def _causes(launches: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Where the time of a step goes, on average over ranks and launches; nothing where none was traced on all ranks."""
    times = [each for launch in launches for each in launch]
    if not times:
        return {}
    exposed: dict[str, float] = {}
    for each in times:
        for kind, traffic in each["traffic"].items():
            exposed[kind] = exposed.get(kind, 0.0) + traffic["exposed_ms"] / len(times)
    moving = [each["exposed_moving_ms"] for each in times if each.get("exposed_moving_ms") is not None]
    return {
        "moving": mean(moving) if len(moving) == len(times) else None,
        "traced": mean(each["step_ms"] for each in times),
        "compute": mean(each["compute_ms"] for each in times),
        "bubble": mean(each["bubble_ms"] for each in times),
        "straggling": mean(map(_straggling, launches)),
        "waiting": mean(each["exposed_ms"] for each in times),
        "exposed": exposed,
        "other": mean(each["side_ms"] + each["copy_ms"] + each["idle_ms"] for each in times),
    }


def _straggling(times: list[dict[str, Any]]) -> float:
    """Milliseconds that ranks of a launch wait for the one that computes longest, step by step."""
    steps: list[tuple[float, ...]] = list(zip(*(each["compute_by_step"] for each in times), strict=True))
    return mean(max(step) - mean(step) for step in steps)


def tables(found: dict[Key, Row]) -> Iterator[Table]:
    """One table for each link and workload."""
    columns = [
        "", "step ms", "turns", "against SDD", "samples/s", "bubble %", "straggler %", "ids", "rows", "gradients",
        "dense", "other", "moving", "for ranks", "waited", "peak GB",
    ]  # fmt: skip
    for link, cell in dict.fromkeys((link, cell) for link, cell, _ in found):
        table = Table(f"{link}: {cell.title}", columns)
        baseline = found.get((link, cell, "sdd"))
        for name in CONTENDERS:
            row = found.get((link, cell, name))
            if row is not None:
                table.add(CONTENDERS[name], *_cells(row, baseline))
        yield table


def _cells(row: Row, baseline: Row | None) -> list[str]:
    against = "" if baseline is None else f"{100 * (row.step / baseline.step - 1):+.1f} %"
    kinds: list[str] = [""] * 7
    if row.traced is not None:
        exposed = [sum(row.exposed.get(kind, 0.0) for kind in group) for group in (_IDS, _ROWS, _GRADIENTS)]
        dense = sum(row.exposed.values()) - sum(exposed)
        parts = ["-", "-"] if row.moving is None else [f"{ms:.2f}" for ms in (row.moving, row.waiting - row.moving)]
        kinds = [*(f"{ms:.2f}" for ms in (*exposed, dense)), f"{row.other:.2f}", *parts]
    return [
        f"{row.step:.2f}",
        f"{min(row.turns):.1f}-{max(row.turns):.1f}",
        against,
        f"{row.samples_per_s:,.0f}",
        "" if row.traced is None else f"{row.bubble_percentage:.1f}",
        "" if row.traced is None else f"{row.straggler_percentage:.2f}",
        *kinds,
        "" if row.waited is None else f"{row.waited:.2f}",
        f"{row.peak_bytes / 1e9:.1f}",
    ]


def host_stages(found: list[dict[str, Any]]) -> Iterator[Table]:
    """How long the host spends in each named range of a step, by contender: who waits for whom, on the slower rank."""
    for link, cell in dict.fromkeys((e["link"], Cell(**e["cell"])) for e in found if e["kind"] == "trace"):
        by_name: dict[str, dict[str, float]] = {}
        for each in found:
            if each["kind"] == "trace" and (each["link"], Cell(**each["cell"])) == (link, cell):
                for name, ms in each.get("times", {}).get("stages", {}).items():
                    of_stage = by_name.setdefault(name, {})
                    of_stage[each["contender"]] = max(ms, of_stage.get(each["contender"], 0.0))
        shown = [name for name in CONTENDERS if any(name in each for each in by_name.values())]
        table = Table(f"{link}: {cell.title}: milliseconds of the host", ["", *shown])
        for name, of_stage in by_name.items():
            table.add(name, *(f"{of_stage[c]:.2f}" if c in of_stage else "" for c in shown))
        if shown:
            yield table


def verdicts(found: dict[Key, Row]) -> list[str]:
    """What was reached of the goals, a line for each link and workload."""
    said = []
    for link, cell in dict.fromkeys((link, cell) for link, cell, _ in found):
        ours = found.get((link, cell, "freescale"))
        for name in ("base", "sdd", "sdd_dedup"):
            theirs = found.get((link, cell, name))
            if ours is not None and theirs is not None:
                said.append(f"{link}, {cell.title}, against {CONTENDERS[name]}: {_verdict(ours, theirs)}")
        if ours is not None and ours.waited is not None:
            said.append(f"{link}, {cell.title}: the trainer waited {ours.waited:.2f} ms for a balanced batch at most")
    return said


def _verdict(ours: Row, theirs: Row) -> str:
    longer = ours.step / theirs.step - 1
    step = f"step {100 * longer:+.1f} %"
    if theirs.traced is None or ours.traced is None:
        return f"{step}; nothing traced"
    if theirs.bubble / theirs.traced < _WORTH:
        outcome = "met" if longer <= _LITTLE else "missed"
        return f"{step}; little to gain (bubble {theirs.bubble_percentage:.1f} %), at most 1 % longer: {outcome}"
    cut = 1 - ours.bubble / theirs.bubble
    outcome = "met" if cut >= 0.9 else "missed"
    return (
        f"{step}; bubble {theirs.bubble:.2f} -> {ours.bubble:.2f} ms{_less(theirs.bubble, ours.bubble)} "
        f"(90 %: {outcome}), of it waiting for ranks and their data {theirs.waiting:.2f} -> {ours.waiting:.2f} ms"
        f"{_less(theirs.waiting, ours.waiting)}"
    )


def _less(before: float, after: float) -> str:
    return f", {100 * (1 - after / before):.0f} % less" if 0 < after < before else ""


def faults(found: list[dict[str, Any]]) -> list[str]:
    """What went wrong or was left out, each once."""
    said = []
    for each in found:
        if each["rank"] == 0 and each["kind"] == "failed":
            said.append(f"{each['link']}, {each['contender']}: {each['traceback']}")
        if each["rank"] == 0 and each["kind"] == "skipped":
            said.append(f"{each['link']}, {Cell(**each['cell']).title}, {each.get('contender', 'all')}: no time")
        if each["kind"] == "trace" and "fault" in each:
            said.append(f"{each['link']}, {each['contender']}: {each['fault']}")
    return list(dict.fromkeys(said))
