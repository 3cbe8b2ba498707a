"""Lengths to plan with: a Parquet column, a text file, or a named distribution (paper, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .arguments import file_and_column, read_parameters

Lengths = NDArray[np.int64]

DISTRIBUTIONS: dict[str, dict[str, float]] = {
    "lognormal": {"median": 6000, "sigma": 0.9},
    "uniform": {"low": 0, "high": 21000},
    "constant": {"length": 6000},
    "zipf": {"exponent": 1.5},
}
"""Named distributions and their parameters."""


@dataclass(frozen=True, eq=False)
class LengthSource:
    """Where lengths come from.

    Attributes:
        title: What it is, for people.
        draw: Gives global batches of n lengths, at most so many, from a seed, and a remark on how they were taken.
            Shape [num_batches, n].
    """

    title: str
    draw: Callable[[int, int, int], tuple[Lengths, str]]


def length_source(text: str) -> LengthSource:
    """Find lengths by what a command line says.

    Args:
        text: `path.parquet:column` (the lengths of a list or string column, or the values of an integer one), a text
            file of integers, or a distribution: `lognormal`, `lognormal:median=6000,sigma=0.9`, `uniform:low=0,high=9`,
            `constant:length=9`, `zipf:exponent=1.5`.

    Returns:
        Where to draw from. A file's lengths are drawn at random, as many batches as it has samples for; where it has
        too few for one batch, with replacement.

    Raises:
        ValueError: Not readable, no such column or distribution, a value that is negative or no integer, or none.

    Example:
        >>> length_source("constant:length=3").draw(2, 1, 0)
        (array([[3, 3]]), 'drawn with seed 0')
    """
    name, _, rest = text.partition(":")
    if name in DISTRIBUTIONS:
        return _distribution(name, rest)
    if ".parquet" in text:
        path, column = file_and_column(text)
        if not column:
            raise ValueError(f"--lengths of a Parquet file needs a column, as in {text}:uih_page")
        lengths, what = _read_parquet(Path(path), column)
        return _listed(f"{Path(path).name}, {what}", lengths)
    if not Path(text).is_file():
        known = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"--lengths must be path.parquet:column, a text file or one of {known}; no file {text!r}")
    return _listed(Path(text).name, _read_text(Path(text)))


def _distribution(name: str, rest: str) -> LengthSource:
    values = read_parameters(name, rest, DISTRIBUTIONS[name])
    for key, value in values.items():
        if not 0 <= value < 2**53:
            raise ValueError(f"{name}: {key} must be finite and not negative, got {value:g}")
    if name == "uniform" and values["low"] > values["high"]:
        raise ValueError(f"uniform: low must not exceed high, got {values['low']:g} and {values['high']:g}")
    if name == "zipf" and values["exponent"] <= 1:
        raise ValueError(f"zipf: exponent must be greater than 1, got {values['exponent']:g}")
    if name == "lognormal" and values["median"] == 0:
        raise ValueError("lognormal: median must be positive, got 0")
    said = ", ".join(f"{key} {value:g}" for key, value in values.items())

    def draw(n: int, num_batches: int, seed: int) -> tuple[Lengths, str]:
        return _drawn(name, values, n * num_batches, seed).reshape(num_batches, n), f"drawn with seed {seed}"

    return LengthSource(f"{name} ({said})", draw)


def _drawn(name: str, values: dict[str, float], n: int, seed: int) -> Lengths:
    random = np.random.default_rng(seed)
    if name == "lognormal":
        drawn = random.lognormal(np.log(values["median"]), values["sigma"], n)
    elif name == "uniform":
        return random.integers(int(values["low"]), int(values["high"]), n, endpoint=True)
    elif name == "constant":
        return np.full(n, int(values["length"]), dtype=np.int64)
    else:
        drawn = random.zipf(values["exponent"], n).astype(np.float64)
    return np.minimum(drawn, 2.0**40).astype(np.int64)


def _listed(title: str, lengths: Lengths) -> LengthSource:
    if len(lengths) == 0:
        raise ValueError(f"{title} has no lengths")
    if lengths.min() < 0:
        raise ValueError(f"{title}: lengths must not be negative, got {lengths.min()} in row {int(lengths.argmin())}")

    def draw(n: int, num_batches: int, seed: int) -> tuple[Lengths, str]:
        random = np.random.default_rng(seed)
        if n <= len(lengths):
            num_batches = min(num_batches, len(lengths) // n)
            chosen, how = random.permutation(len(lengths))[: n * num_batches], "without replacement"
        else:
            chosen, how = random.integers(0, len(lengths), n * num_batches), "with replacement"
        return lengths[chosen].reshape(num_batches, n), f"drawn {how} from {len(lengths):,}, seed {seed}"

    return LengthSource(title, draw)


def _read_parquet(path: Path, column: str) -> tuple[Lengths, str]:
    """Read lengths from a column, and say what was taken for a length."""
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(names)}")
        values = file.read(columns=[column]).column(column)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values, what = pc.list_value_length(values), f"lists in column {column}"
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        values, what = pc.binary_length(values), f"bytes of the text in column {column}"
    elif pa.types.is_integer(kind):
        what = f"the numbers in column {column} taken for lengths"
    else:
        raise ValueError(f"{path}: column {column!r} must hold lists, strings or integer lengths, it holds {kind}")
    if values.null_count:
        raise ValueError(f"{path}: column {column!r} has {values.null_count} nulls; a length is needed in each row")
    try:
        return np.asarray(values.cast(pa.int64()).to_numpy()), what
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: column {column!r} has a length beyond 64 bits: {error}") from error


def _read_text(path: Path) -> Lengths:
    lengths = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in line.replace(",", " ").split():
                try:
                    lengths.append(int(word))
                except ValueError:
                    raise ValueError(f"{path}, line {number}: {word!r} is not an integer") from None
        return np.array(lengths, dtype=np.int64)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except OverflowError:
        raise ValueError(f"{path} has a length beyond 64 bits") from None
