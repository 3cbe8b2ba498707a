"""What the paper says, and what the files of this report say of the same (paper, section 5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .embedding_measured import Measured
from .embedding_report import TITLES, Report
from .embedding_settings import Cell
from .end_to_end_report import Key, Row, rows
from .simulate_check import NO_SIZES
from .simulate_comparison import bubble_ms
from .virtual_study import AS_LOADED, COST_MODEL, FLOOR

Found = dict[str, Any]
NOT_HERE = "not measured on this machine"
_SHORT = {"base": "TorchRec", "sdd": "SDD", "sdd_dedup": "SDD, ids deduplicated", "freescale": "ours"}


@dataclass(frozen=True)
class Claim:
    """One statement of the paper beside ours."""

    figure: str
    paper: str
    ours: str
    simulated: bool = False


def claims(files: Mapping[str, Path | None]) -> list[Claim]:
    """Read the JSON files of the parts.

    Args:
        files: Of each part by name; None where there is none. "earlier …" is a result of another day.
    """
    lines: list[tuple[str, str, str, Callable[[Found], str]]] = [
        ("Figure 2", "over 20 % straggler percentage from 8,000 items on", "virtual_ranks", _stragglers),
        ("Figure 7", "20 times a PyTorch loop at 32 ranks, 600 times at 512", "kernels", _kernels),
        ("Figure 7", "(the same, earlier)", "earlier kernels", _kernels),
        ("Figure 8", "FBS: more than nine times less at 21,000 / 128 / 64", "virtual_ranks", _reduction),
        ("Figure 8", "(not in the paper) partitioned by measured cost", "virtual_ranks", _cost_model),
        ("Figures 2 and 8", "(the same, earlier)", "earlier virtual_ranks", _reduction),
        ("Figure 3", "collisions stay modest", "collisions", _collisions),
        ("Figure 9", "exposed embedding communication nine times less", "embedding", _embedding),
        ("Figure 9", "(the same, earlier)", "earlier embedding", _embedding),
        ("Figure 10", "SM-free transfers: about 10 % faster than beside NCCL", "transport", _contention),
        ("Figure 10", "(the same, earlier)", "earlier transport", _contention),
        ("Figure 11", "90.3 % less exposed than TorchRec on 256 GPUs", "end_to_end", _end_to_end),
        ("Figure 11", "(the same, earlier)", "earlier end_to_end", _end_to_end),
        ("Figure 11", "90.3 % less exposed than TorchRec on 256 GPUs", "simulate", _overall),
    ]
    return [_claim(figure, paper, files.get(part), read, part == "simulate") for figure, paper, part, read in lines]


def _claim(figure: str, paper: str, path: Path | None, read: Callable[[Found], str], simulated: bool) -> Claim:
    if path is None:
        return Claim(figure, paper, NOT_HERE)
    try:
        return Claim(figure, paper, read(json.loads(path.read_text())), simulated)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        return Claim(figure, paper, f"not to be read from {path.name}: {type(error).__name__} {error}")
    except (ValueError, IndexError, StopIteration):  # of an empty list: its time was over before
        return Claim(figure, paper, f"too little was measured in the time there was ({path.name})")


def _at(found: Found, partitioner: str) -> tuple[float, str]:
    """Straggler percentage at the base point, the first one measured, and where that is."""
    base = found["outcomes"][0]
    keys = ("max_length", "batch_size", "world_size")
    same = (o for o in found["outcomes"] if o["partitioner"] == partitioner and all(o[k] == base[k] for k in keys))
    where = f"{base['max_length']:,} / {base['batch_size']} / {base['world_size']} on {found['device']}"
    if found.get("length_scale", 1) != 1:
        where += f", lengths x {found['length_scale']:g}"
    return float(next(same)["straggler_percentage"]), where


def _stragglers(found: Found) -> str:
    value, where = _at(found, AS_LOADED)
    return f"{value:.1f} % at {where}"


def _reduction(found: Found) -> str:
    (before, where), (after, _), (floor, _) = (_at(found, name) for name in (AS_LOADED, "FBS", FLOOR))
    less = before / max(after, 1e-9)
    return f"{before:.1f} % to {after:.2f} %, {less:.1f} times less, at {where} (timing noise alone: {floor:.2f} %)"


def _cost_model(found: Found) -> str:
    (value, where), (floor, _) = _at(found, COST_MODEL), _at(found, FLOOR)
    return f"{value:.2f} %, {value - floor:+.2f} points from the floor of timing noise, at {where}"


def _collisions(found: Found) -> str:
    def mean(outcome: Found, field: str) -> float:
        return 100 * float(sum(each[field] for each in outcome["found"])) / len(outcome["found"])

    values = [mean(outcome, "requests") for outcome in found["outcomes"]]
    ids = [mean(outcome, "occurrences") for outcome in found["outcomes"]]
    return (
        f"{min(values):.0f} to {max(values):.0f} % of the rows that ranks ask for, {min(ids):.0f} to {max(ids):.0f} % "
        f"of ids with repeats ({found['outcomes'][0]['source']})"
    )


def _kernels(found: Found) -> str:
    """How many times faster than the loops: over all operations and rows, at the paper's numbers of ranks."""
    by_case: dict[tuple[Any, ...], dict[str, float]] = {}
    for each in found["outcomes"]:
        ms = each["call_ms"] if each["device_ms"] is None else each["device_ms"]
        if each["correct"] and ms and not each["lengths"].startswith("long"):
            case = (each["world_size"], each["operation"], each["rows"], each["lengths"])
            by_case.setdefault(case, {})[each["way"]] = ms
    times: dict[int, list[float]] = {}
    for (size, *_), ms_of in by_case.items():
        loops = [ms for way, ms in ms_of.items() if way.startswith("loop")]
        if "ours" in ms_of and loops:
            times.setdefault(size, []).extend(ms / ms_of["ours"] for ms in loops)
    shown: list[int] = [size for size in (32, 512) if size in times] or [max(times)]
    said = [f"{min(times[size]):,.0f} to {max(times[size]):,.0f} times at {size} ranks" for size in shown]
    where = found["environment"].get("accelerator", found["environment"]["processor"])
    return f"{', '.join(said)}, over all operations and two kinds of loops, on {where}"


def _contention(found: Found) -> str:
    """How much slower computing is beside traffic that never stops, the middle one of all workloads."""
    slower: dict[str, list[float]] = {}
    for each in found["contention"]:
        if each["traffic"] == "endless":
            slower.setdefault(each["way"], []).append(100 * each["slowdown"])
    most = max(map(len, slower.values()))
    said = [f"{median(values):.1f} % ({way})" for way, values in slower.items() if len(values) == most]
    return f"computing slower beside endless traffic by {', '.join(said)}, the middle one of {most} workloads"


def _embedding(found: Found) -> str:
    """At the longest histories at which two contenders were traced, over each link."""
    report = Report(NO_SIZES, found["found"], [], [])
    said = []
    for link in report.links():
        cell = max(report.cells(link), key=lambda cell: (len(_traced(report, link, cell)) > 1, cell.cut))
        shown = [f"{TITLES[name]} {_exposed(each)}" for name, each in _traced(report, link, cell).items()]
        said.append(f"{link}, {cell.title}: exposed ms (bubble): {', '.join(shown)}")
    return "\n".join(said)


def _traced(report: Report, link: str, cell: Cell) -> dict[str, Measured]:
    """What was traced there, by contender."""
    found = {name: report.measured(link, cell, name) for name in report.contenders(link, cell)}
    return {name: each for name, each in found.items() if each.parts}


def _exposed(found: Measured) -> str:
    """Exposed traffic, and the bubble; only what bounds both where the profiler made the step longer."""
    traced = found.parts["bubble_ms"]
    bubble = bubble_ms(found.step_ms, found.parts["compute_ms"], traced)
    return f"{found.exposed_ms:.2f} ({traced:.1f})" if bubble == traced else f"at most {bubble:.1f}"


def _end_to_end(found: Found) -> str:
    world_size = 1 + max(each["rank"] for each in found["found"])
    measured = rows(found["found"], world_size)
    if world_size == 1:
        return _alone(measured)
    said = []
    for link, cell in dict.fromkeys((link, cell) for link, cell, _ in measured):
        at = {name: measured.get((link, cell, key)) for key, name in _SHORT.items()}
        shown = [
            f"{row.step:.1f} ({bubble_ms(row.step, row.compute, row.bubble):.1f}) {name}"
            for name, row in at.items()
            if row is not None and row.traced
        ]
        if len(shown) > 1 and not cell.even:
            said.append(f"{link}, {cell.title}: step (bubble) ms: {', '.join(shown)}")
    return f"{world_size} GPUs; " + "\n".join(said or ["nothing traced of two to compare"])


def _alone(measured: Mapping[Key, Row]) -> str:
    """What a step takes on one GPU, where nobody is waited for."""
    said = []
    for link, cell in dict.fromkeys((link, cell) for link, cell, _ in measured):
        ours, theirs = measured.get((link, cell, "freescale")), measured.get((link, cell, "sdd"))
        if ours is not None and theirs is not None:
            longer = 100 * (ours.step / theirs.step - 1)
            said.append(f"{cell.title}: step {theirs.step:.2f} ms (SDD), {ours.step:.2f} ms (ours, {longer:+.1f} %)")
    return "1 GPU, nobody to wait for; " + "\n".join(said or ["no two to compare"])


def _overall(found: Found) -> str:
    cluster = found["rows"][0]["cluster"]
    sizes = {row["world_size"] for row in found["rows"]}
    size = 256 if 256 in sizes else max(sizes)

    def bubble(technique: str) -> float:
        key = (cluster, size, technique)
        same = (r for r in found["rows"] if (r["cluster"], r["world_size"], r["technique"]) == key)
        return float(next(same)["simulated"]["bubble_ms"])

    base, ours = bubble("TorchRec"), bubble("FreeScale")
    less = 100 * (1 - ours / base)
    collide = 100 * min(row["collisions"] for row in found["rows"] if row["world_size"] == size)
    where = f"on {size} ranks of cluster {cluster!r} where {collide:.0f} % of the rows that ranks ask for collide"
    return f"bubble of {base:.1f} ms to {ours:.1f} ms, {less:.1f} % less, {where}"
