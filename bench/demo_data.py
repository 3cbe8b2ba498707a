"""Finds out what the demo can train on in a Parquet file, before any rank starts (data of the paper, section 2.1).

A file of a user may have columns that no batch can hold and that the model does not read: they are left out, and that
is said. What the model reads must be there in every row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..balancer import JaggedBatch
from .roles import Roles

COPY_NAME = "demo-row-groups.parquet"


def checked_metadata(path: Path, num_ranks: int) -> pq.FileMetaData:
    """Read the file's metadata.

    Raises:
        ValueError: There is no such file, it is not Parquet, or it has fewer rows than there are ranks.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    if metadata.num_rows < num_ranks:
        raise ValueError(f"{path} must have a row for each of {num_ranks} ranks, it has {metadata.num_rows}")
    return metadata


def choose_columns(
    path: Path, roles: Roles, asked: list[str] | None, say: Callable[[str], None]
) -> tuple[Roles, list[str]]:
    """Choose the columns to read: those asked for, or all that a batch can hold.

    Args:
        path: Parquet file.
        roles: Which column does what.
        asked: Columns that the user named; None for all.
        say: Called with a line for people about columns that are left out.

    Returns:
        The roles, without side columns that are left out, and the columns.

    Raises:
        ValueError: A column that the model needs, or the user named, is not there or cannot be read; says what to do.
    """
    schema = pq.read_schema(path)
    needed = [name for name in (roles.uih, roles.candidates, roles.label) if name is not None]
    if asked is not None:
        _check_asked(asked, schema.names, [roles.uih, *roles.uih_sides, *needed[1:], *roles.contents])
    names = list(schema.names) if asked is None else asked
    faults = _faults(path, schema, names)
    for name, fault in faults.items():
        if name in needed:
            raise ValueError(f"the model reads column {name!r}, and it {fault}: mend it, or name another (see --help)")
        if asked is not None:
            raise ValueError(f"--columns names {name!r}, and it {fault}: leave it out")
    if faults:
        say("left out, since the model can do without: " + "; ".join(f"{n} {fault}" for n, fault in faults.items()))
    sides, contents = (tuple(n for n in group if n not in faults) for group in (roles.uih_sides, roles.contents))
    return replace(roles, uih_sides=sides, contents=contents), [name for name in names if name not in faults]


def _check_asked(asked: list[str], there: list[str], used: list[str]) -> None:
    missing = [name for name in used if name not in asked]
    if missing:
        raise ValueError(f"--columns lacks {', '.join(missing)}, which the model reads")
    unknown = [name for name in asked if name not in there]
    if unknown:
        raise ValueError(f"--columns names {', '.join(unknown)}; the file has {', '.join(there)}")


def _faults(path: Path, schema: pa.Schema, names: list[str]) -> dict[str, str]:
    """Say of each column that batches cannot hold why."""
    faults = {}
    for name in names:
        field = schema.field(name)
        try:
            JaggedBatch.from_arrow(pa.schema([field]).empty_table())
        except ValueError:
            faults[name] = f"is of type {field.type}"
    with pq.ParquetFile(path) as file:
        doubtful = [name for name in names if name not in faults and not _surely_full(file, name)]
        row = 0
        for batch in file.iter_batches(columns=doubtful) if doubtful else ():
            for name in doubtful:
                if name not in faults and _has_null(batch.column(name)):
                    faults[name] = f"has nulls (the first one in rows {row:,} to {row + len(batch) - 1:,})"
            row += len(batch)
    return faults


def _surely_full(file: pq.ParquetFile, name: str) -> bool:
    """Tell whether the file's statistics rule nulls out; those of lists count empty lists too, so they may not."""
    metadata = file.metadata
    leaves = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] == name]
    chunks = [metadata.row_group(group).column(leaf) for group in range(metadata.num_row_groups) for leaf in leaves]
    counts = [chunk.statistics.null_count if chunk.is_stats_set else None for chunk in chunks]
    return all(count == 0 for count in counts)


def _has_null(array: pa.Array) -> bool:
    if array.null_count:
        return True
    nested = hasattr(array.type, "value_type") and not pa.types.is_dictionary(array.type)
    return nested and _has_null(array.flatten())


def in_row_groups(path: Path, columns: list[str], num_ranks: int, folder: Path, say: Callable[[str], None]) -> Path:
    """Give a file with a row group for each rank, since ranks read those: this one, or a copy in `folder`.

    The copy has the same name for every file, so that copies do not pile up.
    """
    metadata = pq.read_metadata(path)
    if metadata.num_row_groups >= num_ranks:
        return path
    copy, unfinished = folder / COPY_NAME, folder / f"{COPY_NAME}.{os.getpid()}.unfinished"
    size = metadata.num_rows // num_ranks
    schema = pa.schema([pq.read_schema(path).field(name) for name in columns])
    try:
        with pq.ParquetFile(path) as file, pq.ParquetWriter(unfinished, schema) as writer:
            for batch in file.iter_batches(batch_size=size, columns=columns):
                writer.write_batch(batch.select(columns), row_group_size=size)
        unfinished.replace(copy)
    finally:
        unfinished.unlink(missing_ok=True)
    say(f"{path} has {metadata.num_row_groups} row group(s), fewer than ranks; copied to {copy}")
    return copy
