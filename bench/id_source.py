"""Ids to look for collisions in: columns of a Parquet file, or ids drawn by a power law (paper, section 2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from .arguments import file_and_column, read_parameters
from .embedding_workload import power_law

_ZIPF: dict[str, float] = {"exponent": 1.05, "rows": 10_000_000, "median": 3500, "sigma": 1.0}


@dataclass(frozen=True, eq=False)
class IdSource:
    """Where samples of ids come from.

    Attributes:
        title: What it is, for people.
        num_samples: How many there are; None where any number can be drawn.
        draw: Gives the ids of n samples, each at most so long, one tensor a sample, and where in the order of samples
            they start: `draw(first, n, cut)`.
    """

    title: str
    num_samples: int | None
    draw: Callable[[int, int, int], list[Tensor]]


def id_source(text: str, seed: int | None = None) -> IdSource:
    """Find ids by what a command line says.

    Args:
        text: `path.parquet:column` (lists of integers, lists of such lists, or one integer a row) or
            `path.parquet:column,column` when one table serves several; or `zipf`, or
            `zipf:exponent=1.05,rows=10000000,median=3500,sigma=1`, where lengths are log-normal.
        seed: Of the order of a file's samples, and of what is drawn; None: in the order of the file.

    Raises:
        ValueError: Not readable, no such column or parameter, or a column that holds no integers.

    Example:
        >>> source = id_source("zipf:rows=100,median=5")
        >>> [len(ids) <= 4 for ids in source.draw(0, 3, 4)]
        [True, True, True]
    """
    name, _, rest = text.partition(":")
    if name == "zipf":
        return _zipf(rest, seed or 0)
    path, columns = file_and_column(text)
    if not columns or not path.endswith(".parquet"):
        raise ValueError(f"--ids must be path.parquet:column or zipf, got {text!r}")
    return _parquet(Path(path), columns.split(","), seed)


def _zipf(rest: str, seed: int) -> IdSource:
    values = read_parameters("zipf", rest, _ZIPF)
    if values["rows"] < 1 or values["median"] <= 0:
        raise ValueError(f"zipf: rows must be at least 1 and median positive, got {rest}")

    def draw(first: int, count: int, cut: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed * 1_000_003 + first)
        normal = torch.randn(count, generator=random, dtype=torch.float64)
        lengths = torch.exp(normal * values["sigma"] + math.log(values["median"])).clamp(1, cut).long()
        uniform = torch.rand(int(lengths.sum()), generator=random, dtype=torch.float64)
        return list(power_law(uniform, int(values["rows"]), values["exponent"]).split(lengths.tolist()))

    said = ", ".join(f"{key} {value:,.10g}" for key, value in values.items())
    return IdSource(f"ids by a power law, {said}", None, draw)


def _parquet(path: Path, names: list[str], seed: int | None) -> IdSource:
    columns = [_column(path, name) for name in names]
    num_samples = len(columns[0][1]) - 1
    order, how = list(range(num_samples)), "in the order of the file"
    if seed is not None:
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
        how = f"shuffled with seed {seed}"

    def sample(row: int, cut: int) -> Tensor:
        ids = [
            values[max(int(starts[row]), int(starts[row + 1]) - cut) : starts[row + 1]] for values, starts in columns
        ]
        return torch.cat(ids) if len(ids) > 1 else ids[0]

    def draw(first: int, count: int, cut: int) -> list[Tensor]:
        return [sample(row, cut) for row in order[first : first + count]]

    distinct = len(torch.cat([values for values, _ in columns]).unique())
    title = f"{path.name}, {' and '.join(names)}: {num_samples:,} samples {how}, {distinct:,} distinct ids in all"
    return IdSource(title, num_samples, draw)


def _column(path: Path, name: str) -> tuple[Tensor, Tensor]:
    """Read a column as ids, one sample after the other, and where each starts."""
    try:
        file = pq.ParquetFile(path)
        if name not in file.schema_arrow.names:
            raise ValueError(f"{path} has no column {name!r}; it has {', '.join(file.schema_arrow.names)}")
        column = file.read(columns=[name]).column(name).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    starts = torch.arange(len(column) + 1)
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = torch.tensor(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False))
        inner = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        inner[1:] = lengths.cumsum(0)
        starts, column = inner[starts], pc.list_flatten(column)
    if not pa.types.is_integer(column.type):
        raise ValueError(f"{path}: column {name!r} must hold integers or lists of them, it holds {column.type}")
    return torch.tensor(pc.fill_null(column, 0).to_numpy(zero_copy_only=False)).long(), starts
