"""A heavy-tailed, learnable training set in a Parquet file (shape of its lengths: paper, Figure 2).

`python -m freescale.bench.synthetic FILE` writes one, to try the other commands with.
Lengths are lognormal with median 6,000 and sigma 0.9, cut at 21,000: with them sparsity rises with the cut
up to about 16,000 and then flattens, as the paper measured. `length_scale` shrinks median and cut alike, so a
CPU can train on the same shape: sparsity and imbalance do not change with it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.console import Console

from .arguments import at_least_one, output_file, over_zero, status_of
from .progress import progress

MEDIAN_LENGTH = 6000
SIGMA = 0.9
CUT_LENGTH = 21000
NUM_PAGES = 1000
NUM_TOPICS = 8
_LOYALTY = 0.9  # share of a user's history, and of the next page, that comes from the user's own topic
_MAX_EDITORS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _write(options, Console(emoji=False, highlight=False, soft_wrap=True)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.synthetic",
        description="Write a Parquet file of users with long and short histories, to try the other commands with.",
        epilog="example: python -m freescale.bench.synthetic data.parquet",
    )
    add = parser.add_argument
    add("file", type=output_file, metavar="FILE", help="to write; one that is there stays as it is")
    add("--replace", action="store_true", help="write it also where there is one")
    add("--rows", type=at_least_one, default=4096, metavar="N", help="users, one a row (default 4096)")
    add("--row-groups", type=at_least_one, default=16, metavar="N", help="what one rank reads at once (default 16)")
    add("--length-scale", type=over_zero, default=1 / 16, metavar="X", help="times the paper's lengths (default 1/16)")
    add("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    return parser


def _write(options: argparse.Namespace, console: Console) -> None:
    if options.row_groups > options.rows:
        raise ValueError(f"--row-groups must be at most --rows, got {options.row_groups} and {options.rows}")
    if options.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {options.seed}")
    if options.file.exists() and not options.replace:
        console.print(f"{options.file} is there already and stays as it is; --replace writes another", markup=False)
        return
    with progress(console, "drawing histories", options.row_groups) as advance:
        write_synthetic(
            options.file, options.rows, options.row_groups, options.seed, options.length_scale, lambda _: advance()
        )
    console.print(f"written: {options.file}, {options.rows:,} rows; histories in column uih_page", markup=False)


def lognormal_lengths(
    num_samples: int,
    random: np.random.Generator,
    cut: int = CUT_LENGTH,
    length_scale: float = 1.0,
) -> NDArray[np.int64]:
    """Draw history lengths.

    Args:
        num_samples: How many.
        random: Source of randomness.
        cut: Longest history kept, before scaling.
        length_scale: Factor on every length, over 0.

    Returns:
        Lengths. Shape [num_samples], int64, from 0 to cut * length_scale.

    Example:
        >>> lognormal_lengths(3, np.random.default_rng(0), length_scale=1 / 16).tolist()
        [419, 332, 667]
    """
    if not length_scale > 0:
        raise ValueError(f"length_scale must be over 0, got {length_scale}")
    lengths = random.lognormal(math.log(MEDIAN_LENGTH), SIGMA, num_samples)
    return (np.minimum(lengths, cut) * length_scale).astype(np.int64)


def write_synthetic(
    path: Path,
    num_samples: int,
    num_row_groups: int,
    seed: int = 0,
    length_scale: float = 1 / 16,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the set: user_id, uih_page, uih_time, candidate_page, candidate_editors (nested) and label.

    A user's history and next page come mostly from one topic; the other candidates come from anywhere. A
    model that compares candidates with the history therefore learns. The file appears whole or not at all.

    Args:
        path: Parquet file to write.
        num_samples: Rows, at least num_row_groups.
        num_row_groups: Row groups, of equal size up to one row.
        seed: Seed of everything drawn.
        length_scale: Factor on the history lengths.
        advance: Called with the number of rows after each row group, for a progress bar.
    """
    if not 1 <= num_row_groups <= num_samples:
        raise ValueError(f"num_row_groups must be from 1 to {num_samples} rows, got {num_row_groups}")
    random = np.random.default_rng(seed)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    sizes = np.diff(np.arange(num_row_groups + 1) * num_samples // num_row_groups).tolist()
    try:
        with pq.ParquetWriter(unfinished, _SCHEMA) as writer:
            for size in sizes:
                writer.write_table(_samples(size, random, length_scale))
                advance(size)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


_SCHEMA = pa.schema(
    {
        "user_id": pa.int64(),
        "uih_page": pa.list_(pa.int64()),
        "uih_time": pa.list_(pa.int32()),
        "candidate_page": pa.list_(pa.int64()),
        "candidate_editors": pa.list_(pa.list_(pa.int64())),
        "label": pa.list_(pa.int8()),
    }
)


def _samples(num_samples: int, random: np.random.Generator, length_scale: float) -> pa.Table:
    topics = random.integers(NUM_TOPICS, size=num_samples)
    lengths = lognormal_lengths(num_samples, random, length_scale=length_scale)
    history = _pages(np.repeat(topics, lengths), random)
    times = np.arange(len(history)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # 0, 1, … in each history
    counts = random.integers(2, 9, size=num_samples)
    first = np.cumsum(counts) - counts
    positive = first + random.integers(counts)
    label = np.zeros(counts.sum(), dtype=np.int8)
    label[positive] = 1
    candidates = random.integers(NUM_PAGES, size=len(label))
    candidates[positive] = _pages(topics, random)
    return pa.table(
        {
            "user_id": topics + NUM_TOPICS * random.integers(1000, size=num_samples),
            "uih_page": _lists(lengths, history),
            "uih_time": _lists(lengths, times.astype(np.int32)),
            "candidate_page": _lists(counts, candidates),
            "candidate_editors": _lists(counts, _editors(candidates, random)),
            "label": _lists(counts, label),
        },
        schema=_SCHEMA,
    )


def _pages(topics: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """Draw a page for each topic; page p belongs to topic p % NUM_TOPICS, and few pages are popular."""
    own = random.random(len(topics)) < _LOYALTY
    popular = random.random(len(topics)) ** 2 * (NUM_PAGES // NUM_TOPICS)
    return np.where(
        own,
        popular.astype(np.int64) * NUM_TOPICS + topics,
        random.integers(NUM_PAGES, size=len(topics)),
    )


def _editors(candidates: NDArray[np.int64], random: np.random.Generator) -> pa.Array:
    """Draw the latest editors of each candidate: users of the candidate's topic, sometimes none."""
    counts = random.integers(_MAX_EDITORS + 1, size=len(candidates))
    topics = np.repeat(candidates % NUM_TOPICS, counts)
    return _lists(counts, topics + NUM_TOPICS * random.integers(1000, size=len(topics)))


def _lists(lengths: NDArray[np.int64], values: NDArray[np.generic] | pa.Array) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values if isinstance(values, pa.Array) else pa.array(values))


if __name__ == "__main__":
    sys.exit(main())
