"""What one embedding table is, told by our own dataclass, by torchrec's configuration or by a module (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Table:
    """One embedding table; the names are those of torchrec's `EmbeddingConfig`, which serves as well.

    Args:
        name: Unique within a collection.
        num_embeddings: Rows of the table, over all ranks.
        embedding_dim: Columns.
        feature_names: Keys that look this table up; the table's own name when empty.
        init_fn: Fills a tensor of shape [any rows, embedding_dim] in place; None: uniform as torchrec does it.
        padding_idx: Id whose row gets no gradient.
        dtype: Of the weights: float32, bfloat16 or float16.

    Raises:
        ValueError: A size below one, an unknown dtype, a padding_idx outside of the table.

    Example:
        >>> Table("item", num_embeddings=1000, embedding_dim=8).features
        ('item',)
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str] = ()
    init_fn: Callable[[Tensor], Any] | None = None
    padding_idx: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in ("num_embeddings", "embedding_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} of table '{self.name}' must be at least 1, got {getattr(self, field)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype of table '{self.name}' must be one of {DTYPES}, got {self.dtype}")
        if self.padding_idx is not None and not 0 <= self.padding_idx < self.num_embeddings:
            rows = self.num_embeddings
            raise ValueError(f"padding_idx of table '{self.name}' must be from 0 to {rows - 1}, got {self.padding_idx}")

    @property
    def features(self) -> tuple[str, ...]:
        """The keys that look this table up."""
        return tuple(self.feature_names) or (self.name,)


def read_config(config: Any) -> Table:
    """Take our own `Table` as it is and read torchrec's `EmbeddingConfig`, which need not be importable.

    Raises:
        TypeError: It is neither.
        ValueError: The data type is none of float32, float16, bfloat16.
    """
    if isinstance(config, Table):
        return config
    try:
        return Table(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            tuple(config.feature_names),
            config.init_fn,
            dtype=_dtype_of(config.name, config.data_type),
        )
    except AttributeError as error:
        raise TypeError(f"configs must be Table or torchrec's EmbeddingConfig, got {type(config).__name__}") from error


def _dtype_of(name: str, data_type: Any) -> torch.dtype:
    dtypes = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    known = getattr(data_type, "value", data_type)
    if known not in dtypes:
        raise ValueError(f"data_type of table '{name}' must be one of {', '.join(dtypes)}, got {known}")
    return dtypes[known]
