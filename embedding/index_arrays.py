"""Index arrays of one batch and group, from ids and collision bits, in three calls (section 3.2, Algorithm 2).

All tensors are in host memory; places and keys are int64, bits are bool. The functions are TorchScript, see `one_call`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .one_call import one_call


def sort_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending keys, int32 where they fit, and their places, equal ones in order. Large lists are sorted by radix."""
    narrow = keys.int() if int(keys.max()) < 2147483648 else keys
    ordered, order = torch.sort(narrow, stable=True)
    return ordered, order


@one_call
def occurrences(keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `forms.Occurrences` holds. Shapes [n], not empty -> [u], [u], [n], [n]."""
    ordered, order = sort_keys(keys)
    distinct, turn, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    inverse = torch.empty_like(turn).scatter_(0, order, turn)
    return distinct.long(), counts, order, inverse


def partition(bits: Tensor, sums: Tensor) -> tuple[Tensor, int]:
    """Where each of some things goes when those without the bit come first, in order; and how many those are.

    `sums` are running sums of `bits`. Selecting by a mask costs torch more, and both parts are wanted. Shape [n].
    """
    n = len(bits)
    without = n - (int(sums[-1]) if n > 0 else 0)
    return torch.where(bits, sums + (without - 1), torch.arange(n) - sums), without


def count_pieces(sums: Tensor, splits: Tensor) -> Tensor:
    """How many bits are set in each of consecutive pieces, from running sums of the bits. Shape of `splits`."""
    padded = torch.zeros(len(sums) + 1, dtype=torch.int64)
    padded[1:] = sums
    ends = splits.cumsum(0)
    return padded.index_select(0, ends) - padded.index_select(0, ends - splits)


def insert(values: Tensor, at: Tensor, inserted: Tensor) -> Tensor:
    """As numpy.insert does: numbers before the places `at`, which ascend. Shapes [n], [k], [k] -> [n + k]."""
    places = at + torch.arange(len(at))
    kept = torch.ones(len(values) + len(at), dtype=torch.bool)
    kept[places] = False
    result = values.index_select(0, (kept.cumsum(0) - 1).clamp_(0, len(values) - 1))
    result[places] = inserted
    return result


def tree_rounds(order: Tensor, counts: Tensor, rows: Tensor | None) -> tuple[list[Tensor], int]:
    """Rounds of `kernels.sum_tree.plan_tree`: summands, offsets and targets of each, one after the other.

    A single round without `rows` has no targets. Also the number of rows of scratch.
    """
    size, num_scratch = len(counts), 0
    rounds: list[Tensor] = []
    offsets = torch.zeros(size + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    while len(counts) > 0 and int(counts.max()) > 32:
        targets = torch.arange(size) if rows is None else rows
        hot = (counts > 32).nonzero().flatten()
        chunks = (counts.index_select(0, hot) + 31) // 32
        ends = chunks.cumsum(0)
        total = int(ends[-1])
        scratch = torch.arange(size + num_scratch, size + num_scratch + total)
        turn = torch.arange(total) - torch.repeat_interleave(ends - chunks, chunks)
        further = turn.nonzero().flatten()
        begin = torch.repeat_interleave(offsets.index_select(0, hot), chunks) + turn * 32
        at = torch.repeat_interleave(hot + 1, chunks - 1)
        hot_rows = targets.index_select(0, hot)
        targets = targets.index_copy(0, hot, scratch.index_select(0, ends - chunks))
        rounds.append(order)
        rounds.append(insert(offsets, at, begin.index_select(0, further)))
        rounds.append(insert(targets, at, scratch.index_select(0, further)))
        order, rows, counts = scratch, hot_rows, chunks
        num_scratch += total
        offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=offsets[1:])
    rounds.append(order)
    rounds.append(offsets)
    if rows is not None:
        rounds.append(rows)
    return rounds, num_scratch


@one_call
def parts(
    late: Tensor, late_rows: Tensor, rows: Tensor, sent: Tensor, received: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Parts the rows of a batch into early and late ones.

    Args:
        late: Of each key. Shape [u].
        late_rows: Of each row that this rank is asked for. Shape [r].
        rows: Which those are. Shape [r].
        sent: Keys by owner. Shape [world_size].
        received: Rows by asker. Shape [world_size].

    Returns:
        Where each key's row lies among the batch's rows, early ones first; early and late ones of `rows`; late ones of
        `sent` and of `received`.
    """
    sums, sums_of_rows = late.cumsum(0), late_rows.cumsum(0)
    place, _ = partition(late, sums)
    place_of_rows, num_early = partition(late_rows, sums_of_rows)
    parted = torch.empty_like(rows).scatter_(0, place_of_rows, rows)
    asked, served = count_pieces(sums, sent), count_pieces(sums_of_rows, received)
    return place, parted[:num_early], parted[num_early:], asked, served


@one_call
def call_arrays(
    keys: Tensor, place: Tensor | None, found: Tensor, counts: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, list[Tensor], int]:
    """How a call reads the batch's rows, and how its gradients are added up.

    Args:
        keys: The batch's, ascending. Shape [u].
        place: See `parts`; None: every key's row lies at its turn.
        found: The call's distinct ones; with `counts`, `order` and `inverse` as in `forms.Occurrences`.
        counts: See `found`.
        order: See `found`.
        inverse: See `found`.

    Returns:
        Row of the batch for each id, and the rounds of the tree and its scratch.
    """
    targets = place
    if len(found) < len(keys):
        at = torch.searchsorted(keys, found)
        counts = torch.zeros(len(keys), dtype=torch.int64).index_copy_(0, at, counts)
        place = at if place is None else place.index_select(0, at)
    if place is not None:
        inverse = place.index_select(0, inverse)
    rounds, num_scratch = tree_rounds(order, counts, targets)
    return inverse, rounds, num_scratch


def sum_rows(rows: Tensor) -> tuple[list[Tensor], int]:
    """The distinct ones of rows that gradients come for, and the rounds that add these up; and scratch."""
    if len(rows) == 0:
        distinct, order, counts = rows, rows, rows
    else:
        ordered, order = sort_keys(rows)
        distinct, counts = torch.unique_consecutive(ordered, return_inverse=False, return_counts=True)
    rounds, num_scratch = tree_rounds(order, counts, None)
    arrays = [distinct.long()]
    arrays.extend(rounds)
    return arrays, num_scratch


@one_call
def gradient_arrays(
    urgent: Tensor, urgent_rows: Tensor, rows: Tensor, sent: Tensor, received: Tensor, place: Tensor | None
) -> tuple[list[Tensor], int, list[Tensor], int]:
    """What urgent and then deferred gradients need. Arguments as in `parts`.

    Returns:
        For each: counts by owner and by asker, positions, distinct rows, rounds; and scratch.
    """
    sums, sums_of_rows = urgent.cumsum(0), urgent_rows.cumsum(0)
    key_place, num_keys = partition(urgent, sums)
    row_place, num_rows = partition(urgent_rows, sums_of_rows)
    positions = torch.arange(len(urgent)) if place is None else place
    positions = torch.empty_like(positions).scatter_(0, key_place, positions)
    parted = torch.empty_like(rows).scatter_(0, row_place, rows)
    now, num_now = sum_rows(parted[num_rows:])
    later, num_later = sum_rows(parted[:num_rows])
    asked, served = count_pieces(sums, sent), count_pieces(sums_of_rows, received)
    first = [asked, served, positions[num_keys:]]
    first.extend(now)
    second = [sent - asked, received - served, positions[:num_keys]]
    second.extend(later)
    return first, num_now, second, num_later
