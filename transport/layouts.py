"""Where the pieces of an exchange lie, from the rows that each rank gets and gives (paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Operation = Literal["all_gather", "all_to_all"]
Splits = Sequence[int] | NDArray[np.integer] | Tensor
"""Rows for or from each rank: ints, a numpy integer array, or an integer tensor of one dimension. Length world_size."""

_MOST_KNOWN = 8


class Layout:
    """An exchange in bytes, without its memory. Several exchanges may have it, so nothing of it changes.

    Args:
        operation: What the caller asked for.
        rank: This rank.
        splits: Rows for each rank, and rows from each. Shape [2, world_size].
        row_bytes: Bytes of a row.

    Attributes:
        num_received: Rows from all ranks together.
        lists: What a backend makes of it, once it has.

    The others are those of `Exchange`.
    """

    def __init__(self, operation: Operation, rank: int, splits: NDArray[np.int64], row_bytes: int) -> None:
        self.operation, self.rank, self.row_bytes = operation, rank, row_bytes
        ends = np.add.accumulate(splits, axis=1)
        # Both rows at once: what NumPy takes for so few numbers is for the call.
        sizes, starts = splits * row_bytes, (ends - splits) * row_bytes
        if operation == "all_gather":
            starts[0] = 0
        self.num_received, self.kept_bytes = int(ends[1, -1]), int(sizes[0, rank])
        sizes[:, rank] = 0
        self.sent_rows, self.received_rows = splits[0], splits[1]
        self.sent_bytes, self.received_bytes = sizes[0], sizes[1]
        self.sent_at, self.received_at = starts[0], starts[1]
        self.lists: tuple[list[int], ...] | None = None


def lay_out_all_gather(rank: int, world_size: int, num_rows: int, row_bytes: int, sizes: Splits | None) -> Layout:
    """Check the sizes of an all_gather and lay it out.

    Raises:
        ValueError: See `Transport.all_gather`.
    """
    splits = np.full((2, world_size), num_rows)
    if sizes is not None:
        splits[1] = _read_splits("sizes", sizes, world_size)
        _refuse_negative(splits, ("rows", "sizes"))
        if splits[1, rank] != num_rows:
            raise ValueError(f"sizes[{rank}] must be the rows of this rank's block, {num_rows}, got {splits[1, rank]}")
    return Layout("all_gather", rank, splits, row_bytes)


def lay_out_all_to_all(
    rank: int, world_size: int, num_rows: int, row_bytes: int, sent_splits: Splits, received_splits: Splits
) -> Layout:
    """Check the splits of an all_to_all and lay it out.

    Raises:
        ValueError: See `Transport.all_to_all`.
    """
    splits = np.empty((2, world_size), dtype=np.int64)
    splits[0] = _read_splits("sent_splits", sent_splits, world_size)
    splits[1] = _read_splits("received_splits", received_splits, world_size)
    _refuse_negative(splits, ("sent_splits", "received_splits"))
    if (total := np.add.reduce(splits[0])) != num_rows:
        raise ValueError(f"sent_splits must add up to the {num_rows} rows given, got {total}")
    if splits[0, rank] != splits[1, rank]:
        raise ValueError(
            f"sent_splits[{rank}] and received_splits[{rank}] are both what this rank keeps and must be equal, "
            f"got {splits[0, rank]} and {splits[1, rank]}"
        )
    return Layout("all_to_all", rank, splits, row_bytes)


class Layouts:
    """Remembers the layouts of splits that come again, as those of an embedding do that has as many rows each step.

    Of splits that are lists or tuples of ints alone: arrays and tensors may change.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._place = rank, world_size
        self._known: dict[tuple[object, ...], Layout] = {}

    def all_gather(self, num_rows: int, row_bytes: int, sizes: Splits | None) -> Layout:
        """As `lay_out_all_gather`."""
        key = _key(num_rows, row_bytes, sizes)
        layout = self._known.get(key)
        return layout or self._keep(key, lay_out_all_gather(*self._place, num_rows, row_bytes, sizes))

    def all_to_all(self, num_rows: int, row_bytes: int, sent_splits: Splits, received_splits: Splits) -> Layout:
        """As `lay_out_all_to_all`."""
        key = _key(num_rows, row_bytes, sent_splits, received_splits)
        layout = self._known.get(key)
        if layout is not None:
            return layout
        return self._keep(key, lay_out_all_to_all(*self._place, num_rows, row_bytes, sent_splits, received_splits))

    def _keep(self, key: tuple[object, ...], layout: Layout) -> Layout:
        if key:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = layout
        return layout


def _key(num_rows: int, row_bytes: int, *splits: Splits | None) -> tuple[object, ...]:
    """Nothing for what may change, or is to be refused."""
    key: list[object] = [num_rows, row_bytes]
    for each in splits:
        if each is not None:
            if type(each) not in _PLAIN or not _INTS.issuperset(map(type, each)):
                return ()
            each = tuple(each)
        key.append(each)
    return tuple(key)


_PLAIN = (list, tuple)
_INTS = frozenset({int})


def _read_splits(name: str, splits: Splits, world_size: int) -> NDArray[np.integer]:
    if isinstance(splits, Tensor):
        if splits.device.type != "cpu":
            raise ValueError(f"{name} must be in host memory, got a tensor on {splits.device}")
        splits = splits.detach().numpy()
    array = np.asarray(splits)
    if array.shape != (world_size,):
        raise ValueError(f"{name} must have one entry for each of the {world_size} ranks, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    return array


def _refuse_negative(splits: NDArray[np.int64], names: tuple[str, str]) -> None:
    if np.minimum.reduce(splits, axis=None) < 0:
        row = int(splits[0].min() >= 0)
        raise ValueError(f"{names[row]} must not be negative, got {splits[row].min()} for rank {splits[row].argmin()}")
