"""What the balancer tells about each global batch, and the scale that makes losses right (paper, sections 2.2, 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from .metrics import imbalance, straggler_percentage
from .protocol.quiet import ones

Int64s = NDArray[np.int64]


@dataclass
class Traffic:
    """What moved in one step, summed over samples. Shape [world_size], int64, but for pairs of ranks.

    Attributes:
        tokens_before: UIH length of each rank, as loaded.
        tokens_after: UIH length of each rank, balanced.
        sent: Bytes that left each rank.
        received: Bytes that came.
        payload: Bytes that each rank loaded.
        pair_bytes: Bytes that this rank loaded, by their new rank, and bytes that it has now, by the rank that loaded
            them; what stayed is in both. Shape [2, world_size].
        batch_sizes: Samples of each rank after balancing.
        pair_samples: Samples, as `pair_bytes`.
    """

    tokens_before: Int64s
    tokens_after: Int64s
    sent: Int64s
    received: Int64s
    payload: Int64s
    pair_bytes: Int64s
    batch_sizes: Int64s
    pair_samples: Int64s

    @classmethod
    def of(
        cls, rank: int, world_size: int, origin: Int64s, owners: Int64s, lengths: Int64s, payload: Int64s, own: slice
    ) -> Traffic:
        """Add up a plan from what is known of each sample. Shapes [num_samples]; `own` are those that `rank` loaded."""
        moved = payload * (origin != owners)
        coming = (owners == rank).nonzero()[0]
        to, source = owners[own], origin[coming]
        # All in one call: beside a busy trainer a call of bincount, which lets go of the interpreter, costs the most.
        places = [origin, owners, origin, owners, origin, to, source, owners, to, source]
        amounts = [lengths, lengths, moved, moved, payload, payload[own], payload[coming]]
        amounts.append(ones(len(owners) + len(to) + len(source)))
        numbered = np.concatenate([place + row * world_size for row, place in enumerate(places)])
        sums = np.bincount(numbered, np.concatenate(amounts, dtype=np.float64), len(places) * world_size)
        rows = sums.astype(np.int64).reshape(-1, world_size)
        return cls(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5:7], rows[7], rows[8:])


@dataclass
class Report:
    """One balanced global batch.

    Attributes:
        step: Number of the global batch, from 0.
        rank: This rank.
        world_size: Number of ranks.
        traffic: What moved.
        global_items: Values of each column over all ranks.
        dropped_samples: Samples dropped so far by `drop_small`.
        seconds: Wall seconds of "load", "gather_lengths", "gather_candidates", "plan" and "shuffle".
        exposed_seconds: How long the consumer waited for this batch.
    """

    step: int
    rank: int
    world_size: int
    traffic: Traffic
    global_items: Mapping[str, int]
    dropped_samples: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    exposed_seconds: float = 0.0
    scale_was_read: bool = field(default=False, repr=False)

    @property
    def batch_size(self) -> int:
        """Samples that this rank has after balancing."""
        return int(self.traffic.batch_sizes[self.rank])

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank after balancing."""
        return tuple(self.traffic.batch_sizes.tolist())

    @property
    def global_batch_size(self) -> int:
        """Samples over all ranks."""
        return int(self.traffic.batch_sizes.sum())

    @property
    def tokens_before(self) -> tuple[int, ...]:
        """UIH length of each rank, as loaded."""
        return tuple(self.traffic.tokens_before.tolist())

    @property
    def tokens_after(self) -> tuple[int, ...]:
        """UIH length of each rank, balanced."""
        return tuple(self.traffic.tokens_after.tolist())

    @property
    def imbalance_before(self) -> float:
        """Largest over mean UIH length of a rank, minus 1, as loaded."""
        return imbalance(torch.from_numpy(self.traffic.tokens_before))

    @property
    def imbalance_after(self) -> float:
        """Largest over mean UIH length of a rank, minus 1, balanced."""
        return imbalance(torch.from_numpy(self.traffic.tokens_after))

    @property
    def straggler_before(self) -> float:
        """Percentage of a step that ranks would wait if time were the UIH length, as loaded."""
        return straggler_percentage(torch.from_numpy(self.traffic.tokens_before))

    @property
    def straggler_after(self) -> float:
        """Percentage of a step that ranks would wait if time were the UIH length, balanced."""
        return straggler_percentage(torch.from_numpy(self.traffic.tokens_after))

    @property
    def bytes_sent(self) -> int:
        """Payload that left this rank."""
        return int(self.traffic.sent[self.rank])

    @property
    def bytes_received(self) -> int:
        """Payload that came to this rank."""
        return int(self.traffic.received[self.rank])

    @property
    def bytes_total(self) -> int:
        """Payload of the global batch."""
        return int(self.traffic.payload.sum())

    @property
    def bytes_moved(self) -> int:
        """Payload of the global batch that changed ranks."""
        return int(self.traffic.sent.sum())

    def loss_scale(self, column: str | None = None) -> float:
        """Factor for a *sum* of losses, so that gradients averaged over ranks are those of the global mean.

        Balancing changes how many samples, candidates and tokens a rank has, and data parallelism averages gradients
        over ranks: a mean over the local items is then wrong. Write `loss = per_item_loss.sum() * scale`.

        Args:
            column: The loss has one item for each value of this column; for each sample without it.

        Returns:
            world_size / (items of the column in the global batch); 0 when there are none.

        Raises:
            ValueError: There is no such column.
        """
        self.scale_was_read = True
        if column is not None and column not in self.global_items:
            raise ValueError(f"column must be one of {sorted(self.global_items)}, got {column!r}")
        items = self.global_batch_size if column is None else self.global_items[column]
        return self.world_size / items if items else 0.0
