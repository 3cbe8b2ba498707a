"""Parquet files whose rows are numbered, of several sizes and row groups, one of them empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FILES = {"a.parquet": (23, 7), "b.parquet": (5, 5), "c.parquet": (0, 1), "d.parquet": (17, 3)}  # rows, rows in a group
NUM_ROWS = sum(rows for rows, _ in FILES.values())


def table(start: int, rows: int) -> pa.Table:
    ids = range(start, start + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "page": pa.array([list(range(i % 4)) for i in ids], pa.list_(pa.int32())),
            "deep": pa.array([[[i], []] * (i % 3) for i in ids], pa.list_(pa.list_(pa.int64()))),
        }
    )


def write_files(folder: Path) -> Path:
    start = 0
    for name, (rows, group) in FILES.items():
        pq.write_table(table(start, rows), folder / name, row_group_size=group)
        start += rows
    return folder


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["id"].to_list()]
