"""JaggedBatch: named columns over the samples of one batch (paper, section 2.1: what varies in length)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .column import Column, ColumnSpec, as_bytes, checked_column, empty_column
from .convert import (
    WEIGHTS,
    jagged_tensor,
    keyed_columns,
    keyed_tensor,
    nested_column,
    nested_tensor,
    padded,
    padded_column,
)
from .select import concat_samples, split_samples, take_samples

if TYPE_CHECKING:
    import pyarrow as pa

    from .arrow import FillValue

__all__ = ["Column", "ColumnSpec", "JaggedBatch"]


class JaggedBatch:
    """Named columns over `batch_size` samples, all on one device.

    A column without levels is dense, with one it is a list a sample, with two a list of lists a sample.
    Lengths may come in any integer type and are kept as int64; values are kept contiguous (copied only when
    they are not). Batches can be pickled, sent by DataLoader workers, pinned by a DataLoader, and handed to
    TorchRec's pipelines. Treat values as read-only where they alias other memory (Arrow, a split batch).

    Args:
        columns: Values and lengths by name.
        batch_size: Number of samples. Needed only when there is no column to tell.

    Raises:
        ValueError: A rule is broken; names the column, the rule and the value.
        TypeError: Something is not a tensor or not a Column.

    Example:
        >>> batch = JaggedBatch({
        ...     "user": Column(torch.tensor([1, 2])),
        ...     "uih_page": Column(torch.tensor([7, 8, 9]), (torch.tensor([3, 0]),)),
        ... })
        >>> batch
        JaggedBatch(batch_size=2, user: dense int64 [*], uih_page: jagged int64 [*] with 3 rows)
        >>> batch.take([1, 0, 0])["uih_page"].to_list()
        [[], [7, 8, 9], [7, 8, 9]]
    """

    def __init__(self, columns: Mapping[str, Column], batch_size: int | None = None) -> None:
        checked: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(name, str):
                raise TypeError(f"column names must be strings, got {name!r}")
            if not isinstance(column, Column):
                raise TypeError(f"column {name!r} must be a Column(values, levels), got {type(column).__name__}")
            checked[name] = checked_column(name, column)
        if batch_size is None:
            if not checked:
                raise ValueError("batch_size must be given when there are no columns")
            batch_size = next(iter(checked.values())).batch_size
        _check_alike(checked, batch_size)
        self._columns = checked
        self.batch_size = batch_size
        _announce_to_torchrec()

    @classmethod
    def of_checked(cls, columns: dict[str, Column], batch_size: int) -> JaggedBatch:
        """Skip the checks, which would read lengths on the host, for columns made from checked ones."""
        batch = cls.__new__(cls)
        batch._columns = columns
        batch.batch_size = batch_size
        _announce_to_torchrec()
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        # values travel as bytes: torch 2.13 cannot unpickle tensors of the unsigned and the float8 types
        columns = [
            (name, as_bytes(c.values), c.values.dtype, tuple(c.values.shape), c.levels)
            for name, c in self._columns.items()
        ]
        return _unpickled, (columns, self.batch_size)

    @classmethod
    def empty(cls, schema: Mapping[str, ColumnSpec]) -> JaggedBatch:
        """Make a batch of no samples, in host memory, with the columns that `schema` names."""
        return cls({name: empty_column(spec) for name, spec in schema.items()}, batch_size=0)

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(self._columns)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in order; a new dict."""
        return dict(self._columns)

    @property
    def schema(self) -> dict[str, ColumnSpec]:
        """Dtype, trailing shape and depth of every column, in order."""
        return {name: column.spec for name, column in self._columns.items()}

    @property
    def device(self) -> torch.device:
        """Where the columns live; the host when there are none."""
        return next((column.device for column in self._columns.values()), torch.device("cpu"))

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; this batch has {', '.join(self._columns) or 'none'}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        parts = [f"batch_size={self.batch_size}"]
        for name, column in self._columns.items():
            rows = f" with {len(column.values)} rows" if column.levels else ""
            parts.append(f"{name}: {column.spec}{rows}")
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        return f"JaggedBatch({', '.join(parts)})"

    def equal(self, other: JaggedBatch) -> bool:
        """Whether both hold the same columns in the same order, bit for bit (NaN included). Synchronises."""
        return (
            self.names == other.names
            and self.batch_size == other.batch_size
            and all(column.equal(other[name]) for name, column in self._columns.items())
        )

    def take(self, indices: Tensor | Sequence[int]) -> JaggedBatch:
        """Copy the samples at `indices`, in that order. Synchronises.

        Args:
            indices: In [0, batch_size), any order, repeats allowed. Shape [n], integer.

        Raises:
            ValueError: An index is out of range, or indices are not integers in one dimension.
        """
        index = torch.as_tensor(indices, dtype=None if len(indices) else torch.int64)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype is torch.bool:
            raise ValueError(f"indices must be integers in one dimension, got {index.dtype} {list(index.shape)}")
        index = index.to(self.device, torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.batch_size:
            wrong = index[(index < 0) | (index >= self.batch_size)][0]
            raise ValueError(f"indices must be in [0, {self.batch_size}), got {int(wrong)}")
        return self._map(lambda column: take_samples(column, index), len(index))

    @classmethod
    def concat(cls, batches: Sequence[JaggedBatch]) -> JaggedBatch:
        """Join the samples of several batches, one batch after the other; a single batch comes back as it is.

        Raises:
            ValueError: There is no batch, or columns differ; names the column and both sides.
        """
        if not batches:
            raise ValueError("batches must not be empty: there would be no columns")
        schema = batches[0].schema
        for position, batch in enumerate(batches):
            _check_same_schema(f"batch {position}", batch.schema, schema)
            if batch.device != batches[0].device:
                raise ValueError(f"batch {position} is on {batch.device}, batch 0 on {batches[0].device}")
        columns = {name: concat_samples([batch[name] for batch in batches]) for name in schema}
        return cls.of_checked(columns, sum(map(len, batches)))

    def split(self, sizes: Sequence[int]) -> list[JaggedBatch]:
        """Cut into runs of `sizes` samples, which share this batch's memory. Synchronises.

        Raises:
            ValueError: A size is negative, or they do not add up to batch_size.
        """
        sizes = [int(size) for size in sizes]
        if min(sizes, default=0) < 0 or sum(sizes) != self.batch_size:
            raise ValueError(f"sizes must not be negative and add up to {self.batch_size}, got {sizes}")
        pieces = {name: split_samples(column, sizes) for name, column in self._columns.items()}
        return [
            self.of_checked({name: columns[i] for name, columns in pieces.items()}, size)
            for i, size in enumerate(sizes)
        ]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> JaggedBatch:
        """Copy to a device; columns that are there already are shared."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedBatch:
        """Copy to page-locked host memory, from where an asynchronous copy to the device is possible."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` is done with it (torch.Tensor.record_stream)."""
        if self.device.type != "cpu":
            for column in self._columns.values():
                for tensor in column.tensors():
                    tensor.record_stream(stream)

    @classmethod
    def from_arrow(
        cls,
        table: Any,
        columns: Sequence[str] | None = None,
        fill_value: FillValue | Mapping[str, FillValue] = None,
    ) -> JaggedBatch:
        """View an Arrow table as a batch; memory is shared where the layout allows, so treat it as read-only.

        Numbers keep their type, bool is expanded, dates and times become int64 in their own unit, text becomes lists
        of uint8, fixed_size_list a trailing dimension, dictionaries their values.

        Args:
            table: A pyarrow Table or RecordBatch, or anything that exports an Arrow stream (polars, pandas, duckdb).
            columns: Which columns, in which order; all by default.
            fill_value: What null numbers become, for all columns or by name; null lists become empty. Without it
                a null is an error.

        Raises:
            ValueError: A null (named by column and row), a column that is missing, or a type that is no column.
            TypeError: `table` holds no Arrow data.

        Example:
            >>> import pyarrow as pa
            >>> JaggedBatch.from_arrow(pa.table({"page": [[7, 8], []]}))
            JaggedBatch(batch_size=2, page: jagged int64 [*] with 2 rows)
        """
        from .arrow import table_columns  # here, since importing Arrow takes a tenth of a second

        made, num_rows = table_columns(table, None if columns is None else list(columns), fill_value)
        return cls(made, num_rows)

    def to_arrow(self, text: Sequence[str] = ()) -> pa.Table:
        """Make a pyarrow Table that shares this batch's memory (bool is packed); the columns `text` become strings.

        Raises:
            ValueError: A dtype that Arrow does not have, such as bfloat16.
        """
        import pyarrow as pa

        from .arrow import column_to_arrow

        columns = {n: column_to_arrow(n, c, n in text) for n, c in self.to("cpu")._columns.items()}
        return pa.table(columns)

    @classmethod
    def from_kjt(cls, keyed: Any) -> JaggedBatch:
        """View a TorchRec KeyedJaggedTensor as a batch: a column for each key, its weights as "<key>.weights".

        Raises:
            ValueError: Its keys have different batch sizes (VBE), or it has inverse indices.
        """
        columns, weights = keyed_columns(keyed, "the KeyedJaggedTensor")
        return cls(columns | {key + WEIGHTS: column for key, column in weights.items()}, keyed.stride())

    def to_kjt(self, names: Sequence[str], weighted: bool = False) -> Any:
        """Make a TorchRec KeyedJaggedTensor of jagged columns of one dtype. Copies the values.

        Args:
            names: The columns, which become its keys in this order.
            weighted: Take its weights from the columns "<name>.weights".

        Raises:
            ValueError: A column is not jagged or of another type than the first, or weights have other lengths.
        """
        weights = {name: self[name + WEIGHTS] for name in names if weighted}
        return keyed_tensor({name: self[name] for name in names}, weights, self.batch_size)

    def to_jagged_tensor(self, name: str, weighted: bool = False) -> Any:
        """View a jagged column as a TorchRec JaggedTensor, with weights from the column "<name>.weights"."""
        return jagged_tensor(self[name], self[name + WEIGHTS] if weighted else None)

    @classmethod
    def from_nested(cls, nested: Mapping[str, Tensor]) -> JaggedBatch:
        """View torch nested tensors of the jagged layout as the columns of a batch."""
        return cls({name: nested_column(tensor, f"column {name!r}") for name, tensor in nested.items()})

    def to_nested(self, name: str) -> Tensor:
        """View a jagged column as a torch nested tensor of the jagged layout. Shape [B, *, ...]."""
        return nested_tensor(self[name])

    @classmethod
    def from_padded(cls, values: Mapping[str, Tensor], mask: Tensor) -> JaggedBatch:
        """Make a batch of the real entries of padded tensors. Copies.

        Args:
            values: By column name, each of shape [B, T, ...].
            mask: True where an entry is real; real entries need not come first. Shape [B, T], bool.
        """
        return cls({name: padded_column(tensor, mask, f"column {name!r}") for name, tensor in values.items()})

    def to_padded(self, name: str, padding_value: float = 0, max_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Pad a jagged column to one length. Synchronises when no length is given.

        Returns:
            Padded values, shape [B, T, ...], and a mask that is true where they are real, shape [B, T], bool; T is
            `max_length`, or the longest sample's length.

        Raises:
            ValueError: The column is not jagged, or a sample is longer than `max_length`.
        """
        return padded(self[name], padding_value, max_length)

    def _map(self, function: Callable[[Column], Column], batch_size: int) -> JaggedBatch:
        return self.of_checked({name: function(column) for name, column in self._columns.items()}, batch_size)

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> JaggedBatch:
        def move(column: Column) -> Column:
            return Column(function(column.values), tuple(map(function, column.levels)))

        return self._map(move, self.batch_size)


def _unpickled(columns: list[tuple[Any, ...]], batch_size: int) -> JaggedBatch:
    made = {
        name: Column(rows.view(dtype).view(shape) if rows.numel() else rows.new_empty(shape, dtype=dtype), levels)
        for name, rows, dtype, shape, levels in columns
    }
    return JaggedBatch.of_checked(made, batch_size)


def _check_alike(columns: Mapping[str, Column], batch_size: int) -> None:
    device = next((column.device for column in columns.values()), None)
    for name, column in columns.items():
        if column.batch_size != batch_size:
            raise ValueError(f"column {name!r} has {column.batch_size} samples where the batch has {batch_size}")
        if column.device != device:
            raise ValueError(f"column {name!r} is on {column.device}, the columns before it on {device}")


def _check_same_schema(what: str, got: Mapping[str, ColumnSpec], expected: Mapping[str, ColumnSpec]) -> None:
    if set(got) != set(expected):
        raise ValueError(f"{what} has columns {sorted(got)}, expected {sorted(expected)}")
    for name, spec in expected.items():
        if got[name] != spec:
            raise ValueError(f"{what}: column {name!r} is {got[name]}, expected {spec}")


def _announce_to_torchrec() -> None:
    """Let `isinstance(batch, Pipelineable)` hold, which TorchRec asks, without importing torchrec."""
    streamable = sys.modules.get("torchrec.streamable")
    if streamable is not None and hasattr(streamable, "Pipelineable"):
        streamable.Pipelineable.register(JaggedBatch)
