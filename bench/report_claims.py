"""What the paper says, and what the files of this report say of the same (paper, section 5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .virtual_study import AS_LOADED, COST_MODEL, FLOOR

Found = dict[str, Any]
NOT_HERE = "not measured on this machine"


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
        files: Of each part by name; None where there is none.
    """
    rows: list[tuple[str, str, str, Callable[[Found], str]]] = [
        ("Figure 2", "over 20 % straggler percentage from 8,000 items on", "virtual_ranks", _stragglers),
        ("Figure 8", "FBS: more than nine times less at 21,000 / 128 / 64", "virtual_ranks", _reduction),
        ("Figure 8", "(not in the paper) partitioned by measured cost", "virtual_ranks", _cost_model),
        ("Figure 3", "collisions stay modest", "collisions", _collisions),
        ("Figure 11", "90.3 % less exposed than TorchRec on 256 GPUs", "simulate", _overall),
    ]
    return [_claim(figure, paper, files.get(part), read, part == "simulate") for figure, paper, part, read in rows]


def _claim(figure: str, paper: str, path: Path | None, read: Callable[[Found], str], simulated: bool) -> Claim:
    if path is None:
        return Claim(figure, paper, NOT_HERE)
    try:
        return Claim(figure, paper, read(json.loads(path.read_text())), simulated)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        return Claim(figure, paper, f"not to be read from {path.name}: {type(error).__name__} {error}")


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
    (before, where), (after, _) = _at(found, AS_LOADED), _at(found, "FBS")
    return f"{before:.1f} % to {after:.2f} %, {before / max(after, 1e-9):.1f} times less, at {where}"


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
    return f"bubble of {base:.1f} ms to {ours:.1f} ms, {less:.1f} % less, on {size} ranks of cluster {cluster!r}"
