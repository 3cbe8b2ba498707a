"""What bench.embedding found: medians over launches, tables, and whether the goals are met (paper, section 5.2)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from .embedding_measured import GROUPS, Measured, by_launch, knows_moving, middle, traffic
from .embedding_settings import Cell, Sizes
from .tables import Table

TITLES = {
    "base": "TorchRec base",
    "sdd": "TorchRec SDD",
    "sdd_dedup": "TorchRec SDD + dedup",
    "pec": "TorchRec PEC",
    "synchronous": "ours, synchronous",
    "prioritized": "ours, prioritized",
}
_ALLOCATIONS = ("cudaMalloc", "cudaHostAlloc", "cudaMallocHost")  # of allocators that grow; not waits by design
_PARITY = 1e-6  # relative, of one step
_COLUMNS = (
    "", "step", "launches", "host", "computing", "bubble", "exposed", "moving", "waiting", "ids", "rows",
    "gradients", "dense", "side", "idle", "tables GB", "step GB",
)  # fmt: skip


@dataclass
class Report:
    """All records of a run.

    Attributes:
        sizes: That all cells share.
        found: Records of all ranks and launches.
        faults: What went wrong.
        notes: What else to say.
    """

    sizes: Sizes
    found: list[dict[str, Any]]
    faults: list[str]
    notes: list[str]

    def of_kind(self, kind: str, **same: Any) -> list[dict[str, Any]]:
        """Records of a kind whose fields have these values."""
        return [each for each in self.found if each["kind"] == kind and all(each.get(k) == v for k, v in same.items())]

    def links(self) -> list[str]:
        """Links with measurements, in order."""
        return list(dict.fromkeys(each["link"] for each in self.of_kind("measurement")))

    def cells(self, link: str) -> list[Cell]:
        """Workloads measured over a link, in order."""
        return list(dict.fromkeys(Cell(**each["cell"]) for each in self.of_kind("measurement", link=link)))

    def series(self, link: str, varied: str) -> list[Cell]:
        """The longest row of workloads that differ in their "cut" or "ratio" alone, ascending; of equals the first."""
        other = {"ratio": "cut", "cut": "ratio"}[varied]
        groups: dict[tuple[object, int], list[Cell]] = {}
        for cell in self.cells(link):
            if cell.recurring == "spread":
                groups.setdefault((getattr(cell, other), cell.num_tables), []).append(cell)
        longest = max(groups.values(), key=len, default=[])
        return sorted(longest, key=lambda cell: float(getattr(cell, varied)))

    def contenders(self, link: str, cell: Cell) -> list[str]:
        """Contenders measured there, in the order of `TITLES`."""
        found = {each["contender"] for each in self.of_kind("measurement", link=link, cell=vars(cell))}
        return [name for name in TITLES if name in found]

    def measured(self, link: str, cell: Cell, contender: str) -> Measured:
        """Put the records of a contender together."""
        same = {"link": link, "cell": vars(cell), "contender": contender}
        timed = self.of_kind("measurement", **same)
        traced = [each for each in self.of_kind("trace", **same) if "times" in each]
        built = self.of_kind("built", link=link, contender=contender, num_tables=cell.num_tables)
        steps = by_launch(timed, "step_ms")
        names = ("step_ms", "compute_ms", "bubble_ms", "exposed_ms", "side_ms", "copy_ms", "idle_ms")
        return Measured(
            step_ms=statistics.median(steps),
            host_ms=statistics.median(by_launch(timed, "host_ms")),
            spread_ms=(min(steps), max(steps)),
            parts={name: middle(traced, itemgetter(name)) for name in names} if traced else {},
            exposed=traffic(traced, "exposed_ms"),
            moving=traffic(traced, "exposed_moving_ms") if knows_moving(traced) else {},
            total=traffic(traced, "total_ms"),
            memory_bytes=(
                max((each["bytes"] for each in built), default=0),
                max((each["peak_bytes"] for each in timed), default=0),
            ),
        )

    def urgent_bytes(self, cell: Cell) -> float | None:
        """Bytes of urgent traffic that a rank sends in a step of a workload."""
        return next((each["urgent_bytes"] for each in self.of_kind("workload", cell=vars(cell))), None)


LEGEND = (
    "Milliseconds. Step: median of the slower rank, by events of the main stream; launches: smallest and largest "
    "of the launches' medians; host: what the trainer's thread takes. The rest is of a profile of a few more "
    "steps, on average over ranks. Computing: the stream that computes most runs a compute kernel; bubble: it "
    "does not. The bubble is exposed traffic, plus side (only kernels of other streams run), plus copies, plus "
    "idle. Exposed: embedding traffic during the bubble; ids (with masks), rows, gradients and dense (those of "
    "the other weights): exposed / whole time of that traffic. A transfer also waits for the other "
    "rank, so it holds what one rank is behind: moving is the part of the exposed in which data moves (for as long as "
    "a transfer takes on the rank that comes last), waiting the rest. Tables GB: weights and optimizer; step GB: the "
    "most that a step needs on top."
)
"""What the columns mean."""


# ---- tables ------------------------------------------------------------------------------------------------------


def tables(report: Report) -> list[Table]:
    """What a batch shares with the next one, and for each link and workload what a step takes."""
    made = [_workloads(report)]
    for link in report.links():
        for cell in report.cells(link):
            table = Table(f"{link}, {cell.title}: milliseconds a step", _COLUMNS)
            for name in report.contenders(link, cell):
                table.add(TITLES[name], *_row(report.measured(link, cell, name)))
            made.append(table)
    return [table for table in made if table.rows]


def _row(found: Measured) -> list[str]:
    low, high = found.spread_ms
    cells = [f"{found.step_ms:.2f}", f"{low:.1f}-{high:.1f}", f"{found.host_ms:.2f}"]
    if found.parts:
        cells += [f"{found.parts[name]:.2f}" for name in ("compute_ms", "bubble_ms")]
        cells += [f"{found.exposed_ms:.2f}", *_moving_and_waiting(found)]
        cells += [f"{found.exposed[group]:.2f}/{found.total[group]:.2f}" for group in GROUPS]
        cells += [f"{found.parts[name]:.2f}" for name in ("side_ms", "idle_ms")]
    else:
        cells += ["-"] * 11
    return cells + [f"{size / 1e9:.2f}" for size in found.memory_bytes]


def _moving_and_waiting(found: Measured) -> list[str]:
    return (
        ["-", "-"]
        if found.moving_ms is None
        else [f"{ms:.2f}" for ms in (found.moving_ms, found.exposed_ms - found.moving_ms)]
    )


def _workloads(report: Report) -> Table:
    table = Table(
        "Workloads: what a global batch shares with the next one",
        ["workload", "ids", "distinct rows", "rows %", "requests %", "ids %", "urgent MB a rank"],
    )
    for each in {str(each["cell"]): each for each in report.of_kind("workload")}.values():
        found = each["tables"]
        counts = [f"{sum(t[name] for t in found):,}" for name in ("num_occurrences", "num_rows")]
        shares = [
            f"{100 * statistics.fmean(t[name] for t in found):.2f}" for name in ("rows", "requests", "occurrences")
        ]
        table.add(Cell(**each["cell"]).title, *counts, *shares, f"{each['urgent_bytes'] / 1e6:.2f}")
    return table


# ---- verdicts ----------------------------------------------------------------------------------------------------


def found_checks(found: Sequence[dict[str, Any]]) -> list[str]:
    """What the check before the timing found, of rank 0."""
    return [
        f"check of {TITLES[each['contender']]} against ours, synchronous: weights differ by "
        f"{each['first_weights']:.1e} after the first step and {each['last_weights']:.1e} after the last, losses by "
        f"{each['first_loss']:.1e} and {each['last_loss']:.1e} (relative)"
        for record in found
        if record["kind"] == "check" and record["rank"] == 0
        for each in record["results"]
        if "fault" not in each
    ]


def faults(report: Report) -> list[str]:
    """What went wrong: launches that failed, contenders that could not be built, weights that are not alike."""
    lines = list(report.faults)
    lines += [
        f"{TITLES[each['contender']]} over {each['link']} failed: {each['traceback'].strip()}"
        for each in report.of_kind("failed", rank=0)
    ]
    for record in report.of_kind("check", rank=0):
        for each in record["results"]:
            if "fault" in each:
                lines.append(f"{TITLES[each['contender']]} could not be checked: {each['fault']}")
                continue
            same_code = each["contender"] == "prioritized"
            allowed = 0.0 if same_code else _PARITY
            if each["first_weights"] > allowed or (same_code and (each["last_weights"] or each["last_loss"])):
                lines.append(f"{TITLES[each['contender']]} does not train as ours, synchronous, does: {each}")
    lines += [f"a trace could not be read: {each['fault']}" for each in report.of_kind("trace") if "fault" in each]
    return lines


def notes(report: Report) -> list[str]:
    """What the figures say of the goals, one line each."""
    sizes = report.sizes
    lines = [
        f"{sizes.batch_size} samples a rank and step, tables of {sizes.num_rows:,} x {sizes.dim}, {sizes.num_layers} "
        f"layers of {sizes.width} behind them",
        *report.notes,
        *found_checks(report.found),
        *_skipped(report),
    ]
    for link in report.links():
        for cell in report.cells(link):
            lines += _comparison(report, link, cell)
        lines += _linearity(report, link)
    return lines + _waits(report) + _memory(report)


def _skipped(report: Report) -> list[str]:
    return [
        f"no time for {Cell(**each['cell']).title} over {each['link']}, launch {each['launch'] + 1}"
        for each in report.of_kind("skipped", rank=0)
    ]


def _comparison(report: Report, link: str, cell: Cell) -> list[str]:
    names = report.contenders(link, cell)
    theirs = [name for name in names if name not in ("synchronous", "prioritized")]
    if "prioritized" not in names or not theirs:
        return []
    ours = report.measured(link, cell, "prioritized")
    best = min(theirs, key=lambda name: report.measured(link, cell, name).step_ms)
    step = report.measured(link, cell, best).step_ms
    line = f"{link}, {cell.title}: ours takes {ours.step_ms / step:.3f} times the step of the best, {TITLES[best]}"
    if "sdd" in theirs and ours.parts:
        sdd = report.measured(link, cell, "sdd")
        if sdd.parts:
            line += (
                f"; exposed embedding traffic {ours.exposed_ms:.2f} ms against SDD's {sdd.exposed_ms:.2f}"
                f"{_of_it_moving(ours, sdd)}, bubble "
                f"{ours.parts['bubble_ms']:.2f} against {sdd.parts['bubble_ms']:.2f}"
            )
    return [line]


def _of_it_moving(ours: Measured, sdd: Measured) -> str:
    if ours.moving_ms is None or sdd.moving_ms is None:
        return ""
    share = f", 1/{sdd.moving_ms / ours.moving_ms:.1f}" if ours.moving_ms else ""
    return f" (of it moving {ours.moving_ms:.3f} against {sdd.moving_ms:.3f}{share}; the rest waits for other ranks)"


def _linearity(report: Report, link: str) -> list[str]:
    exposed, moving = [], []
    for cell in report.series(link, "ratio"):
        urgent = report.urgent_bytes(cell)
        if urgent is not None and "prioritized" in report.contenders(link, cell):
            found = report.measured(link, cell, "prioritized")
            if found.parts:
                exposed.append((urgent / 1e6, found.exposed_ms))
            if found.moving_ms is not None:
                moving.append((urgent / 1e6, found.moving_ms))
    lines = []
    for points, which in ((exposed, ""), (moving, ", of what moves")):
        if len(points) >= 3:
            slope, intercept, fit = line_through(points)
            lines.append(
                f"{link}: ours exposes {intercept:.2f} ms + {slope:.3f} ms for each MB of urgent traffic, R² {fit:.3f} "
                f"over {len(points)} ratios{which}"
            )
    return lines


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Slope, intercept and R² of the line of least squares.

    Example:
        >>> line_through([(0, 1), (1, 3), (2, 5)])
        (2.0, 1.0, 1.0)
    """
    xs, ys = [x for x, _ in points], [y for _, y in points]
    slope, intercept = statistics.linear_regression(xs, ys)
    spread = sum((y - statistics.fmean(ys)) ** 2 for y in ys)
    left = sum((y - slope * x - intercept) ** 2 for x, y in points)
    return slope, intercept, 1 - left / spread if spread else 1.0


def _waits(report: Report) -> list[str]:
    """Runtime calls of the trainer that wait, in the longest trace of ours and of each of TorchRec's."""
    lines = []
    for name in TITLES:
        traces = [each for each in report.of_kind("trace", contender=name, rank=0) if "times" in each]
        if not traces:
            continue
        times = max(traces, key=lambda each: int(each["times"]["num_steps"]))["times"]
        trainer = [wait for wait in times["host_waits"] if wait["thread"] != "other"]
        waits = [wait for wait in trainer if wait["call"] not in _ALLOCATIONS]
        allocations = sum(wait["calls"] for wait in trainer if wait["call"] in _ALLOCATIONS)
        said = "; ".join(
            f"{wait['calls']:.2g} {wait['call']} of {wait['ms']:.2f} ms in {_ends(wait['where'])}, "
            f"{wait['thread']} thread"
            for wait in waits[:4]
        )
        total = f"{sum(wait['calls'] for wait in waits):.3g} a step, {sum(wait['ms'] for wait in waits):.2f} ms"
        lines.append(
            f"{TITLES[name]}: synchronising runtime calls of the trainer in {times['num_steps']} steps: "
            + (f"{total}: {said}" if waits else "none")
            + (f"; and {allocations:.2g} allocations of memory a step" if allocations else "")
        )
    return lines


def _ends(where: str) -> str:
    """The outermost and the innermost of what encloses a call."""
    places = where.split(" / ")
    return places[0] + (f" … {places[-1]}" if len(places) > 1 else "") or "no range"


def _memory(report: Report) -> list[str]:
    lines = []
    for each in report.of_kind("memory", rank=0):
        steps, device, host = zip(*each["allocated"], strict=True)
        if steps[-1] == 0:
            lines.append("no time to watch memory")
            continue
        lines.append(
            f"memory over {steps[-1]:,} steps of ours: device from {device[0] / 1e6:,.1f} MB to "
            f"{device[-1] / 1e6:,.1f} MB (largest {max(device) / 1e6:,.1f}), process from {host[0] / 1e6:,.0f} MB to "
            f"{host[-1] / 1e6:,.0f} MB"
        )
    return lines
