"""What bench.kernels says of its outcomes: tables, notes, Markdown and JSON (paper, Figure 7)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from .environment import environment
from .kernel_cases import Case
from .tables import Table, print_table, write_result


@dataclass(frozen=True)
class Outcome:
    """One way to do one case; `device_ms` is None where the way synchronises, takes long or runs on a CPU."""

    operation: str
    rows: str
    lengths: str
    world_size: int
    megabytes: float
    way: str
    correct: bool
    call_ms: float | None
    device_ms: float | None
    remark: str = ""

    @property
    def case(self) -> tuple[str, str, str, int]:
        """Operation, rows, lengths and world size."""
        return self.operation, self.rows, self.lengths, self.world_size

    @property
    def ms(self) -> float | None:
        """The device's time where it is known, otherwise the call's."""
        return self.call_ms if self.device_ms is None else self.device_ms


class Report:
    """Collects outcomes, prints each table when it is complete, and keeps the files up to date after every case.

    Args:
        device: "cuda" or "cpu".
        console: Where tables are printed.
        json_path: File for all figures, if any.
        folder: Folder for a dated Markdown file, if any.
        fbgemm: Whether FBGEMM's operators take part, where they are installed.
        kept: Outcomes of an earlier run that the file of figures keeps, though they are not part of this one.
    """

    def __init__(
        self,
        device: str,
        console: Console,
        json_path: Path | None,
        folder: Path | None,
        *,
        fbgemm: bool = True,
        kept: Sequence[Outcome] = (),
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._fbgemm, self._failed, self._kept = fbgemm, list[str](), list(kept)
        self._device, self._console, self._json, self._folder = device, console, json_path, folder
        self._tables: dict[str, Table] = {}
        self._environment = environment(("torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow"))

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Take the outcomes of one case."""
        self.outcomes += outcomes
        title = f"{outcomes[0].operation}, {outcomes[0].rows} rows, {self._device}"
        if title not in self._tables:
            self._print_last()
            self._tables[title] = _table(title, self._device)
        _add(self._tables[title], outcomes)
        self._write(["Not all cases were measured yet."])

    def fail(self, case: Case, words: str) -> None:
        """Take a case that could not be measured."""
        self._failed.append(f"Failed: {case.operation}, {case.rows} rows, {case.lengths}, {case.world_size}: {words}")
        self._console.print(self._failed[-1], soft_wrap=True, highlight=False, markup=False)

    def close(self, *, interrupted: bool) -> None:
        """Print and write what is left."""
        self._print_last()
        notes = (
            self._failed
            + _notes(self.outcomes, fbgemm=self._fbgemm)
            + ["Interrupted: not all cases were measured."] * interrupted
        )
        for note in notes:
            self._console.print(note, soft_wrap=True, highlight=False)
        self._write(notes)

    def _print_last(self) -> None:
        for table in list(self._tables.values())[-1:]:
            print_table(table, self._console)

    def _write(self, notes: Sequence[str]) -> None:
        if self._json is not None:
            found = {
                "environment": self._environment,
                "outcomes": [asdict(each) for each in self.outcomes + self._kept],
            }
            self._json.write_text(json.dumps(found, indent=1) + "\n")
        if self._folder is not None:
            name = f"kernels-{self._device}" + "-no-fbgemm" * (not self._fbgemm)
            long = _long_table(self.outcomes)
            parts: list[Table | str] = [*self._tables.values(), *([long] if long.rows else []), *notes]
            write_result(self._folder, name, "Jagged kernels", self._environment, parts)


def read_outcomes(path: Path) -> list[Outcome]:
    """What a report wrote as JSON.

    Raises:
        ValueError: The file is not such a report.
    """
    try:
        return [Outcome(**outcome) for outcome in json.loads(path.read_text())["outcomes"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} must be a file that --json wrote, got {type(error).__name__}: {error}") from None


_NAMES = ("loop, cat", "loop, copies", "vectorised", "FBGEMM", "ours", "copy")
_RATIOS = {"loop, cat": 0, "loop, copies": 0, "vectorised": 1, "FBGEMM": 2, "copy": 2}  # decimals


def _table(title: str, device: str) -> Table:
    unit = "device ms" if device == "cuda" else "ms"
    columns = ["lengths, ranks", "MB", *(f"{name} {'ms' if 'loop' in name else unit}" for name in _NAMES)]
    columns += [f"{name} / ours" for name in _RATIOS]
    return Table(title, columns + (["FBGEMM call ms", "ours call ms"] if device == "cuda" else []))


def _add(table: Table, outcomes: Sequence[Outcome]) -> None:
    by_way = {outcome.way: outcome for outcome in outcomes if outcome.correct}
    rivals = [outcome for name, outcome in by_way.items() if name.startswith("FBGEMM")]
    if rivals:
        by_way["FBGEMM"] = min(rivals, key=lambda outcome: outcome.ms or 0.0)
    times = {name: by_way[name].ms if name in by_way else None for name in _NAMES}
    ours, first = times["ours"], outcomes[0]
    ratios = [
        f"{time / ours:.{digits}f}" if (time := times[name]) and ours else "-" for name, digits in _RATIOS.items()
    ]
    megabytes = f"{first.megabytes:.{1 if first.megabytes >= 1 else 2}f}"
    cells = [f"{first.lengths}, {first.world_size}", megabytes, *map(_ms, times.values()), *ratios]
    if len(table.columns) > len(cells):
        cells += [_ms(by_way[name].call_ms) if name in by_way else "-" for name in ("FBGEMM", "ours")]
    table.add(*cells)


def _long_table(outcomes: Sequence[Outcome]) -> Table:
    """Few long sequences, operator by operator: which one a trainer meets decides what it gains."""
    table = Table("Few long sequences, every way", ["operation, rows, cut", "way", "ms", "call ms", "/ ours"])
    ours = {o.case: o.ms for o in outcomes if o.way == "ours" and o.correct}
    for o in outcomes:
        if o.lengths.startswith("long") and o.ms and ours.get(o.case):
            ranks = f", {o.world_size} ranks" if o.world_size > 1 else ""
            name = f"{o.operation}, {o.rows}, {o.lengths.removeprefix('long ')}{ranks}"
            table.add(name, o.way, _ms(o.ms), _ms(o.call_ms), f"{o.ms / (ours[o.case] or o.ms):.1f}")
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _notes(outcomes: Sequence[Outcome], *, fbgemm: bool) -> list[str]:
    notes = []
    if not fbgemm:
        notes.append("FBGEMM was left out, and not loaded.")
    elif importlib.util.find_spec("fbgemm_gpu") is None:
        notes.append("FBGEMM is not installed: its columns are left out.")
    failed = sorted({f"{o.way}, {o.rows} rows: {o.remark}" for o in outcomes if not o.correct})
    best: dict[str, int] = {}
    for case in {o.case for o in outcomes}:
        rivals = [o for o in outcomes if o.case == case and o.correct and o.way.startswith("FBGEMM")]
        if rivals:
            way = min(rivals, key=lambda o: o.ms or 0.0).way
            best[way] = best.get(way, 0) + 1
    if best:
        counts = ", ".join(f"{way} in {count}" for way, count in sorted(best.items()))
        notes.append(f"The FBGEMM column is the fastest of its operators in each row: {counts}.")
    return notes + [f"Left out: {text}" for text in failed]
