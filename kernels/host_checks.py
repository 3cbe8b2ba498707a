"""Checks of what jagged operations are told in host memory: lengths, rows, places (paper, section 4.2).

A call that copies little costs what its checks cost, and each costs what it calls. So integers are looked at as
NumPy's, in as few calls as tell right from wrong, and only a failure looks at what failed. Seen as unsigned numbers,
negative ones are the largest: the largest tells of both ends of what is allowed.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
_UNSIGNED = np.dtype(np.uint64)
_accumulate = np.add.accumulate  # without the method's Python wrapper


def integers(tensor: Tensor) -> Integers:
    """The numbers of a tensor of int64 or int32, shared if they are of 64 bits."""
    numbers: Integers = tensor.numpy()
    return numbers if tensor.dtype is torch.int64 else numbers.astype(np.int64)


def are_within(numbers: Integers, limit: int) -> bool:
    """Whether all are from 0 to `limit`."""
    return not numbers.size or 0 <= numbers.item(numbers.view(_UNSIGNED).argmax()) <= limit


def ends_of(lengths: Integers, rows: int) -> Integers:
    """Where each row of a jagged tensor ends, which has that many rows of values.

    Args:
        lengths: Shape [B].
        rows: Rows of its values.

    Returns:
        Shape [B].

    Raises:
        ValueError: A length is negative, or they do not add up to `rows`.
    """
    ends: Integers = _accumulate(lengths)
    # None is over `rows`, so their sum does not begin anew at 2^64.
    if not are_within(lengths, rows) or (ends.item(-1) if ends.size else 0) != rows:
        if lengths.min(initial=0) < 0:
            _refuse_negative(lengths)
        raise ValueError(f"lengths must add up to the rows of values ({rows}), got {sum(lengths.tolist())}")
    return ends


def taken_lengths(lengths: Integers, rows: Tensor) -> tuple[Integers, Integers]:
    """Lengths of rows.

    Args:
        lengths: Shape [B].
        rows: From 0 to B - 1. Shape [R], int64 or int32.

    Returns:
        The rows' lengths and their numbers. Each of shape [R].

    Raises:
        ValueError: A row is not there.
    """
    numbers: Integers = rows.numpy()
    try:
        taken = lengths.take(numbers)
    except IndexError:
        _refuse_rows(lengths, numbers)
    if numbers.size and numbers.item(numbers.argmin()) < 0:  # which NumPy takes for counted from the end
        _refuse_rows(lengths, numbers)
    return taken, numbers


def ends_of_ranges(
    starts: Integers, lengths: Integers, limit: int, limit_name: str, *, known: bool = False
) -> Integers:
    """Where ranges end, all of which lie from 0 to a limit.

    Args:
        starts: Shape [n].
        lengths: Shape [n].
        limit: What no range may pass.
        limit_name: What the limit is.
        known: Whether lengths are known not to be negative, nor over what memory holds.

    Returns:
        Shape [n].

    Raises:
        ValueError: A length is negative, or a range leaves what there is.
    """
    ends: Integers = starts + lengths  # negative beyond 2^63
    if not ends.size or (
        are_within(ends, limit) and (known or are_within(lengths, limit)) and starts.item(starts.argmin()) >= 0
    ):
        return ends
    if lengths.min() < 0:
        _refuse_negative(lengths)
    i = int(((starts < 0) | (starts > limit - lengths)).argmax())
    raise ValueError(
        f"starts and lengths must stay within {limit_name} ({limit}), "
        f"got [{starts[i]}, {int(starts[i]) + int(lengths[i])}) at {i}"
    )


def total_of(lengths: Integers, total: int | None) -> int:
    """The sum of lengths that are not negative, which has to be `total` where that is given."""
    found: int = _accumulate(lengths).item(-1) if lengths.size else 0
    if total is not None and total != found:
        raise ValueError(f"total must be the sum of the lengths ({found}), got {total}")
    return found


def _refuse_negative(lengths: Integers) -> NoReturn:
    raise ValueError(f"lengths must not be negative, got {lengths.min()}")


def _refuse_rows(lengths: Integers, rows: Integers) -> NoReturn:
    raise ValueError(f"rows must be from 0 to {len(lengths) - 1}, got {rows.min()} to {rows.max()}") from None
