"""Samples, and the embedding rows their ids ask for: real sets where they fit, expectations beyond (section 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .arguments import read_parameters
from .collision_ratio import among
from .embedding_workload import power_law
from .histories import read_histories

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ZIPF = {"exponent": 1.05, "rows": 10_000_000.0, "median": 6000.0, "sigma": 0.9}
_MOST_ROWS, _MOST_IDS = 1 << 20, 64_000_000
_BINS = 4096


@dataclass(frozen=True, eq=False)
class Samples:
    """Where samples come from.

    Attributes:
        title: What they are, for people.
        lengths: Lengths of n samples from a given one on: `lengths(first, n)`. Any number can be had.
        ids: Ids of samples by their number and lengths, one array a sample: `ids(numbers, lengths)`.
        popularity: Probability of a row, and how many rows have it. Two arrays of shape [num_bins].
    """

    title: str
    lengths: Callable[[int, int], Ints]
    ids: Callable[[Ints, Ints], list[Ints]]
    popularity: tuple[Floats, Floats]


def samples_of(text: str, seed: int = 0) -> Samples:
    """Find samples by what a command line says.

    Args:
        text: `zipf`, `zipf:exponent=1.05,rows=10000000,median=6000,sigma=0.9` (lengths are log-normal), or
            `path.parquet:column`, whose rows are used in order, and again from the first where there are too few.
        seed: Of what is drawn.

    Raises:
        ValueError: Not readable, a column without ids, or no such parameter.
    """
    name, _, rest = text.partition(":")
    return _zipf(rest, seed) if name == "zipf" else _parquet(text)


def _zipf(rest: str, seed: int) -> Samples:
    values = read_parameters("zipf", rest, _ZIPF)
    exponent, rows = values["exponent"], int(values["rows"])
    if rows < 1 or values["median"] <= 0 or exponent < 0:
        raise ValueError(f"zipf: rows must be at least 1, median positive, exponent not negative, got {values}")

    def lengths(first: int, n: int) -> Ints:
        random = np.random.default_rng([seed, first])
        return random.lognormal(np.log(values["median"]), values["sigma"], n).astype(np.int64)

    def ids(numbers: Ints, lengths: Ints) -> list[Ints]:
        return [_draw(int(number), int(n)) for number, n in zip(numbers, lengths, strict=True)]

    def _draw(number: int, n: int) -> Ints:
        uniform = torch.from_numpy(np.random.default_rng([seed, 1, number]).random(n))
        return np.asarray(power_law(uniform, rows, exponent).numpy())

    said = ", ".join(f"{key} {value:,g}" for key, value in values.items())
    return Samples(f"ids by a power law ({said})", lengths, ids, power_law_bins(rows, exponent))


def power_law_bins(rows: int, exponent: float, num_bins: int = _BINS) -> tuple[Floats, Floats]:
    """Probabilities of the rows that `power_law` draws, in bins of rows of similar probability.

    Example:
        >>> probability, count = power_law_bins(1000, 1.05)
        >>> int(count.sum()), round(float((probability * count).sum()), 6)
        (1000, 1.0)
    """
    edges = np.unique(np.geomspace(1, rows + 1, num_bins).round())
    if exponent == 1:
        below = np.log(edges) / np.log(rows + 1)
    else:
        below = (edges ** (1 - exponent) - 1) / ((rows + 1.0) ** (1 - exponent) - 1)
    count = np.diff(edges)
    return np.diff(below) / count, count


def _parquet(text: str) -> Samples:
    histories = read_histories(text, _MOST_ROWS, _MOST_IDS)
    if not histories.num_rows_with_ids:
        raise ValueError(f"{histories.title} holds no ids to look for collisions in")
    n = histories.num_rows_with_ids

    def lengths(first: int, count: int) -> Ints:
        return histories.lengths[np.arange(first, first + count) % n]

    def ids(numbers: Ints, cut: Ints) -> list[Ints]:
        return [histories.ids_of(np.array([i % n]), int(c)) for i, c in zip(numbers, cut, strict=True)]

    counts = torch.from_numpy(histories.ids).unique(return_counts=True)[1].numpy()
    repeats, count = np.unique(counts, return_counts=True)
    popularity = repeats / counts.sum(), count.astype(np.float64)
    return Samples(f"{Path(histories.title).name}, {n:,} rows", lengths, ids, popularity)


@dataclass(frozen=True)
class Traffic:
    """Rows that ranks ask for in a step. All arrays have shape [world_size].

    Attributes:
        occurrences: Ids of each rank, repeats and all.
        asked: Different rows that each rank asks for.
        served: Requests that each rank answers: the rows it owns.
        late: Of `asked`, those that were in the batch before, on any rank: their values come late.
        late_served: Of `served`, the same.
        urgent: Of `asked`, those that are in the next batch, on any rank: their gradients are urgent.
        urgent_served: Of `served`, the same.
        real: Whether these were counted in real sets, or are expectations.
    """

    occurrences: Floats
    asked: Floats
    served: Floats
    late: Floats
    late_served: Floats
    urgent: Floats
    urgent_served: Floats
    real: bool

    @property
    def collisions(self) -> float:
        """Share of the rows asked for whose gradients are urgent."""
        return float(self.urgent.sum() / max(1.0, self.asked.sum()))


def real_traffic(before: Sequence[Ints], batch: Sequence[Ints], after: Sequence[Ints]) -> Traffic:
    """Count rows of real batches. Row i is owned by rank i modulo the number of ranks.

    Args:
        before: Ids of the previous batch, one array a rank.
        batch: Ids of this batch.
        after: Ids of the next one.

    Example:
        >>> ids = [np.array([1, 1, 2]), np.array([4])]
        >>> found = real_traffic([np.array([2]), np.array([9])], ids, [np.array([4]), np.array([4])])
        >>> found.asked.tolist(), found.served.tolist(), found.late.tolist(), found.urgent.tolist()
        ([2.0, 1.0], [2.0, 1.0], [1.0, 0.0], [0.0, 1.0])
    """
    world_size = len(batch)
    asked = [torch.from_numpy(ids).unique() for ids in batch]
    late, urgent = ([among(rows, _rows_of(other)) for rows in asked] for other in (before, after))

    def owners(chosen: list[Tensor]) -> Floats:
        owned = torch.cat([rows[keep] % world_size for rows, keep in zip(asked, chosen, strict=True)])
        return torch.bincount(owned, minlength=world_size).double().numpy()

    everything = [torch.ones_like(rows, dtype=torch.bool) for rows in asked]
    return Traffic(
        occurrences=np.array([float(len(ids)) for ids in batch]),
        asked=np.array([float(len(rows)) for rows in asked]),
        served=owners(everything),
        late=np.array([float(each.sum()) for each in late]),
        late_served=owners(late),
        urgent=np.array([float(each.sum()) for each in urgent]),
        urgent_served=owners(urgent),
        real=True,
    )


def _rows_of(batch: Sequence[Ints]) -> Tensor:
    """The different rows of all ranks, ascending."""
    rows: Tensor = torch.from_numpy(np.concatenate(list(batch))).unique()
    return rows


def expected_traffic(items: Floats, before: float, after: float, popularity: tuple[Floats, Floats]) -> Traffic:
    """Expect rows of batches whose ids are drawn independently by popularity; owners share evenly.

    Args:
        items: Ids of each rank. Shape [world_size].
        before: Ids of the whole previous batch.
        after: Ids of the whole next one.
        popularity: Probability of a row, and how many rows have it.
    """
    probability, count = popularity
    grid = np.unique(np.geomspace(max(1.0, items.min()), max(2.0, items.max()), 24))
    there = -np.expm1(-np.outer(grid, probability)) * count  # [grid, bins]: rows that a rank asks for

    def of(share: Floats) -> Floats:
        found: Floats = np.where(items > 0, np.interp(items, grid, there @ share), 0.0)
        return found

    asked = of(np.ones_like(probability))
    late, urgent = (of(-np.expm1(-total * probability)) for total in (before, after))
    served, late_served, urgent_served = (np.full(len(items), each.mean()) for each in (asked, late, urgent))
    return Traffic(items, asked, served, late, late_served, urgent, urgent_served, real=False)


def with_collisions(traffic: Traffic, share: float) -> Traffic:
    """The same rows, of which another share collides with both neighbours."""
    asked, served = share * traffic.asked, share * traffic.served
    return replace(traffic, late=asked, late_served=served, urgent=asked, urgent_served=served)
