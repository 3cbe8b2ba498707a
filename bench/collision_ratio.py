"""How much two consecutive batches collide: rows that some rank asks for in both (paper, section 2.3 and Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Collisions:
    """What of a batch is also in the batch after it, on any rank.

    Attributes:
        rows: Share of the distinct rows of the global batch: of `num_rows`.
        requests: Share of the requests, a request being one row that one rank asks for: of `num_requests`.
        occurrences: Share of the ids as they stand in the batch, repeats and all: of `num_occurrences`.
        num_rows: Distinct rows of the global batch.
        num_requests: Distinct rows of each rank, added up.
        num_occurrences: Ids of all ranks.
        remote_requests: Colliding requests for rows of another rank. Length world_size, by the rank that asks.
    """

    rows: float
    requests: float
    occurrences: float
    num_rows: int
    num_requests: int
    num_occurrences: int
    remote_requests: list[int]


def collisions(batch: Sequence[Tensor], upcoming: Sequence[Tensor], rows_per_rank: int | None = None) -> Collisions:
    """Compare a global batch with the one after it.

    Args:
        batch: Ids of one table that each rank looks up. int64, any shape, one tensor a rank.
        upcoming: The same of the batch after it.
        rows_per_rank: Rows of the table that a rank owns, one block after the other; None: count no remote requests.

    Example:
        >>> found = collisions([torch.tensor([1, 1, 2]), torch.tensor([1, 3])], [torch.tensor([3]), torch.tensor([1])])
        >>> round(found.rows, 3), found.requests, found.occurrences
        (0.667, 0.75, 0.8)
    """
    asked = [ids.flatten().unique() for ids in batch]
    rows, later = torch.cat(asked).unique(), torch.cat([ids.flatten() for ids in upcoming]).unique()
    colliding = rows[among(rows, later)]
    urgent = [each[among(each, colliding)] for each in asked]
    occurring = sum(int(among(ids.flatten(), colliding).sum()) for ids in batch)
    remote = [0] * len(batch)
    if rows_per_rank is not None:
        remote = [int((each // rows_per_rank != rank).sum()) for rank, each in enumerate(urgent)]
    num_requests, num_occurrences = sum(map(len, asked)), sum(ids.numel() for ids in batch)
    return Collisions(
        rows=len(colliding) / max(len(rows), 1),
        requests=sum(map(len, urgent)) / max(num_requests, 1),
        occurrences=occurring / max(num_occurrences, 1),
        num_rows=len(rows),
        num_requests=num_requests,
        num_occurrences=num_occurrences,
        remote_requests=remote,
    )


def among(ids: Tensor, ascending: Tensor) -> Tensor:
    """Tell which ids are found in a sorted list without repeats. bool, shape of `ids`.

    Example:
        >>> among(torch.tensor([5, 1, 9]), torch.tensor([1, 5]))
        tensor([ True,  True, False])
    """
    if len(ascending) == 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    at = torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)
    return ascending[at] == ids
