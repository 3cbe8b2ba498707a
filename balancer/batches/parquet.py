"""Streams Parquet files as batches: each row group is read by one rank, and never a whole file (paper, section 4.1)."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .arrow import FillValue, check_names
from .batch import JaggedBatch
from .row_groups import STATE_VERSION, Place, RowGroup, checked_count, checked_dealt, left_over

PathLike = str | os.PathLike[str]


class ParquetSource(IterableDataset[JaggedBatch]):
    """Batches of the row groups that fall to one rank. Made by `read_parquet`.

    Each `iter()` is a new epoch. One iterator is live at a time: the newest. Inside a DataLoader
    (`DataLoader(source, batch_size=None, num_workers=...)`) the row groups are divided among the workers.

    Attributes:
        paths: The files, in order.
        batch_size: Samples in a batch; the last one may be smaller.
        rank: This process.
        world_size: Number of processes that share the files.
        names: Columns that are read.
        shuffles: Whether row groups are dealt anew each epoch, so that another epoch has another order.
    """

    def __init__(
        self,
        path: PathLike | Sequence[PathLike],
        batch_size: int,
        columns: Sequence[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        fill_value: FillValue | Mapping[str, FillValue] = None,
        use_threads: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got {rank} of {world_size}")
        self.paths = _found(path)
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffles = shuffle
        self._drop_last, self._seed = drop_last, seed
        self._fill_value, self._use_threads = fill_value, use_threads
        self._groups: list[RowGroup] = []
        self._files: list[list[Any]] = []
        self.names: tuple[str, ...] = () if columns is None else tuple(columns)
        schemas = [self._add_file(file, read_all=columns is None) for file in self.paths]
        for file, schema in zip(self.paths, schemas, strict=True):
            _check_same_types(file, schema, self.paths[0], schemas[0])
        JaggedBatch.from_arrow(schemas[0].empty_table())  # types that are no column are refused before anything is read
        self._epoch, self._group, self._row, self._rows_read = 0, 0, 0, 0
        self._dealt: list[list[Place]] = []  # where ranks stood when the epoch was dealt anew to another number of them
        self._under_way = False
        self._newest: object = None

    def _add_file(self, path: str, read_all: bool) -> pa.Schema:
        with _opened(path) as file, _naming(f"cannot read {path} as Parquet"):
            schema, num_rows = file.schema_arrow.remove_metadata(), file.metadata.num_rows
            names = list(schema.names)
            groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            if min(groups, default=0) < 0 or sum(groups) != num_rows:
                raise ValueError(f"its row groups have {groups[:10]} rows, in all it says {num_rows}")
        if read_all and not self._files:
            self.names = tuple(names)
        check_names(list(self.names), names, path)
        self._files.append([os.path.basename(path), num_rows, len(groups)])
        # an empty row group would take a rank's turn
        self._groups += [RowGroup(path, index, size) for index, size in enumerate(groups) if size]
        return pa.schema([schema.field(name) for name in self.names])

    def _share(self, epoch: int, dealt: Sequence[Sequence[Place]]) -> list[RowGroup]:
        """Row groups of this rank (and DataLoader worker) in an epoch, in order, since it was dealt last."""
        order = list(range(len(self._groups)))
        if self.shuffles:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        groups = [self._groups[i] for i in order]
        for places in dealt:
            groups = left_over(groups, places)
        worker = get_worker_info()
        share = groups[self.rank :: self.world_size]
        return share if worker is None else share[worker.id :: worker.num_workers]

    @property
    def epoch(self) -> int:
        """Number of the epoch under way, or of the next one, from 0."""
        return self._epoch

    @property
    def num_rows(self) -> int:
        """Rows of this rank in the epoch; after a resume on another number of ranks, in what was left of it."""
        return sum(group.num_rows for group in self._share(self._epoch, self._dealt))

    @property
    def rows_read(self) -> int:
        """Rows of this rank's share that are behind it in the epoch."""
        return self._rows_read

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        extra = 0 if self._drop_last else self.batch_size - 1
        return (self.num_rows + extra) // self.batch_size

    def __iter__(self) -> Iterator[JaggedBatch]:
        if self._under_way:  # the epoch before was left in the middle
            self._start_epoch(self._epoch + 1)
        self._under_way = True
        self._newest = token = object()
        return self._batches(token)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._group, self._row, self._rows_read = epoch, 0, 0, 0
        self._dealt, self._under_way = [], False

    def _batches(self, token: object) -> Iterator[JaggedBatch]:
        waiting: list[pa.RecordBatch] = []
        num_waiting = 0
        share = self._share(self._epoch, self._dealt)
        for group, row, piece in self._pieces(share, self._group, self._row):
            used = 0
            while num_waiting + len(piece) - used >= self.batch_size:
                cut = self.batch_size - num_waiting
                table = pa.Table.from_batches([*waiting, piece.slice(used, cut)])
                waiting, num_waiting, used = [], 0, used + cut
                self._advance(token, group, row + used, self.batch_size)
                yield self._batch(table)
            if used < len(piece):
                waiting.append(piece.slice(used))
                num_waiting += len(piece) - used
        last = pa.Table.from_batches(waiting) if num_waiting and not self._drop_last else None
        self._advance(token, len(share), 0, num_waiting)
        if last is not None:
            yield self._batch(last)
        if token is self._newest:
            self._start_epoch(self._epoch + 1)

    def _batch(self, table: pa.Table) -> JaggedBatch:
        return JaggedBatch.from_arrow(table, self.names, self._fill_value)

    def _advance(self, token: object, group: int, row: int, num_rows: int) -> None:
        if token is not self._newest:
            raise RuntimeError("a newer iterator of this Parquet source was made; only the newest can go on")
        self._group, self._row = group, row
        self._rows_read += num_rows

    def _pieces(self, share: list[RowGroup], first: int, skip: int) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Read what is left: position of the row group, first row of the piece in it (among its own), and the piece."""
        file: pq.ParquetFile | None = None
        path = None
        try:
            for position in range(first, len(share)):
                group = share[position]
                if group.path != path:
                    if file is not None:
                        file.close()
                    file, path = _opened(group.path), group.path
                row = -group.first_row
                for piece in self._read(file, group):
                    start, row = row, row + len(piece)
                    passed = min(max((skip if position == first else 0) - start, 0), len(piece))
                    if passed < len(piece):
                        yield position, start + passed, piece.slice(passed)
        finally:
            if file is not None:
                file.close()

    def _read(self, file: Any, group: RowGroup) -> Iterator[pa.RecordBatch]:
        num_rows = 0
        with _naming(f"cannot read row group {group.index} of {group.path}"):
            for piece in file.iter_batches(
                self.batch_size, row_groups=[group.index], columns=list(self.names), use_threads=self._use_threads
            ):
                num_rows += len(piece)
                yield piece
            if num_rows != group.first_row + group.num_rows:
                raise ValueError(f"it has {num_rows} rows where the file says {group.first_row + group.num_rows}")

    def state_dict(self) -> dict[str, Any]:
        """Say where the next batch starts. After the end of an epoch that is the start of the next one."""
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "group": self._group,
            "row": self._row,
            "rows_read": self._rows_read,
            "dealt": self._dealt,
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "files": self._files,
            "rank": self.rank,
            "world_size": self.world_size,
            "shuffle": self.shuffles,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next `iter()` starts with the next batch. `state` is not changed.

        Batch size and columns may differ from those it was taken with.

        Raises:
            ValueError: The state is of other files, another rank, world size or order of row groups, or names a place
                that is not in them; says which. Nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
        if repr(state.get("version")) != repr(STATE_VERSION):
            raise ValueError(f"state version must be {STATE_VERSION}, got {state.get('version')!r}")
        for key, here in self._identity().items():
            there = state.get(key)
            if repr(there) != repr(here):  # whatever it is: tensors, say, do not compare
                detail = _first_difference(there, here) if key == "files" else f"{there!r}, here it is {here!r}"
                raise ValueError(f"the state was taken with another {key}: {detail}")
        dealt = checked_dealt(state.get("dealt"))
        epoch, group, row, rows_read = self._checked_position(state, dealt)
        self._start_epoch(epoch)
        self._group, self._row, self._rows_read, self._dealt = group, row, rows_read, dealt
        self._newest = None

    def _checked_position(
        self, state: Mapping[str, Any], dealt: Sequence[Sequence[Place]]
    ) -> tuple[int, int, int, int]:
        epoch, group, row, rows_read = (checked_count(state, key) for key in ("epoch", "group", "row", "rows_read"))
        share = self._share(epoch, dealt)
        if group > len(share):
            raise ValueError(
                f"group of the state must be at most {len(share)}, the row groups of this rank, got {group}"
            )
        most = share[group].num_rows if group < len(share) else 0
        if row > most:
            raise ValueError(f"row of the state must be at most {most}, the rows of row group {group}, got {row}")
        behind = sum(one.num_rows for one in share[:group]) + row
        if rows_read != behind:
            raise ValueError(f"rows_read of the state must be {behind}, the rows before group and row, got {rows_read}")
        return epoch, group, row, rows_read


def _check_same_types(path: str, schema: pa.Schema, first_path: str, first: pa.Schema) -> None:
    for here, there in zip(schema, first, strict=True):
        if here.type != there.type:
            raise ValueError(f"column {here.name!r} is {here.type} in {path}, {there.type} in {first_path}")


def _first_difference(there: Any, here: list[list[Any]]) -> str:
    """Say the first file, or number of files, that differs: [name, rows, row groups]."""
    if not isinstance(there, list) or not all(isinstance(one, list) and len(one) == 3 for one in there):
        return f"{there!r} is no list of files"
    for old, new in zip(there, here, strict=False):
        if repr(old) != repr(new):
            return f"{old[0]} ({old[1]} rows, {old[2]} row groups), here {new[0]} ({new[1]} rows, {new[2]} row groups)"
    return f"{len(there)} files, here {len(here)}"


def _found(path: PathLike | Sequence[PathLike]) -> list[str]:
    """Find the files that a path, list, directory or pattern means, in an order that is the same on every rank."""
    given = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    files: list[str] = []
    for one in given:
        text = os.fspath(one)
        if os.path.isdir(text):
            matches = sorted(map(str, Path(text).rglob("*.parquet")))
        elif os.path.exists(text):
            matches = [text]
        else:
            matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else []
        if not matches:
            raise FileNotFoundError(f"no Parquet file at {text!r}")
        files += matches
    if not files:
        raise FileNotFoundError("no Parquet file: the list of paths is empty")
    return files


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn all that Arrow raises on a damaged file, which need not be its own errors, into one that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError, pa.ArrowException) as error:
        raise ValueError(f"{what}: {error}") from error


def _opened(path: str) -> Any:
    try:
        with _naming(f"cannot read {path} as Parquet"):
            return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no Parquet file at {path!r}") from error


def read_parquet(
    path: PathLike | Sequence[PathLike],
    batch_size: int,
    columns: Sequence[str] | None = None,
    rank: int = 0,
    world_size: int = 1,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    fill_value: FillValue | Mapping[str, FillValue] = None,
    use_threads: bool = False,
) -> ParquetSource:
    """Stream Parquet files as batches.

    Row groups are dealt to the ranks in turn, over all files; each is read by one rank, a batch's worth of rows at
    a time. Batches of a rank may span its row groups. A rank for which no row group is left has no batch.

    Args:
        path: A file, a directory, a pattern such as "day-*.parquet", or a list of these.
        batch_size: Samples in a batch.
        columns: Names, in the order wanted; all by default.
        rank: This process.
        world_size: Number of processes that share the files.
        drop_last: Leave out a last batch that is smaller.
        shuffle: Deal the row groups in another order each epoch. Samples keep their order inside a row group.
        seed: Of the order; the same on all ranks.
        fill_value: What nulls become, see `JaggedBatch.from_arrow`. Without it a null is an error.
        use_threads: Let Arrow decode columns in parallel; leave it off where ranks share cores.

    Returns:
        An iterable of JaggedBatch that can be iterated many times, with `len()` in batches, `num_rows`, `rows_read`,
        `state_dict()` and `load_state_dict()`.

    Raises:
        FileNotFoundError: Nothing is at a path; names it.
        ValueError: A file is not Parquet, lacks a column or has it in another type, or a column cannot be read.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> pq.write_table(pa.table({"page": [[7], [], [8, 9]]}), f"{folder.name}/day-1.parquet")
        >>> source = read_parquet(f"{folder.name}/day-*.parquet", batch_size=2)
        >>> [batch["page"].to_list() for batch in source]
        [[[7], []], [[8, 9]]]
        >>> iterator = iter(source)
        >>> first = next(iterator)
        >>> state = source.state_dict()
        >>> resumed = read_parquet(f"{folder.name}/day-*.parquet", batch_size=2)
        >>> resumed.load_state_dict(state)
        >>> next(iter(resumed))["page"].to_list()
        [[8, 9]]
        >>> folder.cleanup()
    """
    return ParquetSource(
        path,
        batch_size,
        columns,
        rank,
        world_size,
        drop_last=drop_last,
        shuffle=shuffle,
        seed=seed,
        fill_value=fill_value,
        use_threads=use_threads,
    )
