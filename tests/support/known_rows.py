"""Rows that every rank can make for every other, so that each knows what it must receive."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def make_rows(seed: int, rows: int, trailing: tuple[int, ...] = (), dtype: torch.dtype = torch.int64) -> Tensor:
    """Random bytes seen as a dtype; every rank can make those of every other. Shape [rows, *trailing]."""
    width = int(np.prod(trailing, dtype=np.int64))
    generator = torch.Generator().manual_seed(seed)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    highest = 2 if dtype == torch.bool else 256
    noise = torch.randint(0, highest, (rows * width * itemsize,), dtype=torch.uint8, generator=generator)
    return noise.view(dtype).reshape(rows, *trailing)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equality that holds for NaN too."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
        )
    )


def make_splits(seed: int, world_size: int, most: int = 5) -> list[list[int]]:
    """Rows from every rank to every rank: [source][destination]."""
    generator = torch.Generator().manual_seed(seed)
    return cast(list[list[int]], torch.randint(0, most + 1, (world_size, world_size), generator=generator).tolist())


def expected_rows(
    seed: int, splits: list[list[int]], rank: int, trailing: tuple[int, ...] = (), dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """What a rank sends, and what it must receive."""
    sources = [make_rows(seed + r, sum(row), trailing, dtype) for r, row in enumerate(splits)]
    pieces = [source.split(row)[rank] for source, row in zip(sources, splits, strict=True)]
    return sources[rank], torch.cat(pieces)


def column(splits: list[list[int]], rank: int) -> list[int]:
    return [row[rank] for row in splits]
