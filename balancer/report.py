"""What the balancer tells about each global batch, and the scale that makes losses right (paper, sections 2.2, 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Report:
    """One balanced global batch.

    Attributes:
        step: Number of the global batch, from 0.
        rank: This rank.
        world_size: Number of ranks.
        batch_size: Samples that this rank has after balancing.
        global_batch_size: Samples over all ranks.
        batch_sizes: Samples of each rank after balancing.
        global_items: Values of each column over all ranks.
        tokens_before: UIH length of each rank, as loaded.
        tokens_after: UIH length of each rank, balanced.
        imbalance_before: Largest over mean UIH length of a rank, minus 1, as loaded.
        imbalance_after: The same, balanced.
        straggler_before: Percentage of a step that ranks would wait if time were the UIH length, as loaded.
        straggler_after: The same, balanced.
        bytes_sent: Payload that left this rank.
        bytes_received: Payload that came to this rank.
        bytes_total: Payload of the global batch.
        bytes_moved: Payload of the global batch that changed ranks.
        dropped_samples: Samples dropped so far by `drop_small`.
        seconds: Wall seconds of "load", "gather_lengths", "gather_candidates", "plan" and "shuffle".
        exposed_seconds: How long the consumer waited for this batch.
    """

    step: int
    rank: int
    world_size: int
    batch_size: int
    global_batch_size: int
    batch_sizes: tuple[int, ...]
    global_items: Mapping[str, int]
    tokens_before: tuple[int, ...]
    tokens_after: tuple[int, ...]
    imbalance_before: float
    imbalance_after: float
    straggler_before: float
    straggler_after: float
    bytes_sent: int
    bytes_received: int
    bytes_total: int
    bytes_moved: int
    dropped_samples: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    exposed_seconds: float = 0.0
    scale_was_read: bool = field(default=False, repr=False)

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
