"""What every rank knows about a global batch, and what a partitioner makes of it (paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


def _no_items() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class WorldSamples:
    """The samples of one global batch, as every rank knows them after stages I and II.

    Samples are ordered by origin rank, then by position in that rank's batch; N is their number over all ranks.
    Algorithm 1 also hands the partitioner the local batch; a plan that every rank computes alike cannot depend on it,
    so it is left out.

    Attributes:
        world_size: Number of ranks.
        rank: Rank each sample was loaded by. Shape [N], int64.
        uih_lengths: Length of each sample's interaction history. Shape [N], int64.
        num_candidates: Candidates of each sample. Shape [N], int64. Zeros when there are none.
        candidate_lengths: Content length of each candidate, sample after sample. Shape [num_candidates.sum()], int64;
            empty when no column is nested.
        payload_bytes: Bytes that move when a sample moves. Shape [N], int64.
        seconds: Compute time each rank measured last, without waiting for peers. Shape [world_size], float64; NaN
            before the first measurement.
        seconds_step: Step that `seconds` belong to. Shape [world_size], int64; -1 before the first measurement.
        measured: The samples that produced `seconds`: for every rank those it trained on in its `seconds_step`, with
            `rank` the rank that trained on them. None before the first measurement.
        gathered: Dense columns asked for by `gather=`. Each of shape [N].
    """

    world_size: int
    rank: Tensor
    uih_lengths: Tensor
    num_candidates: Tensor = field(default_factory=_no_items)
    candidate_lengths: Tensor = field(default_factory=_no_items)
    payload_bytes: Tensor = field(default_factory=_no_items)
    seconds: Tensor = field(default_factory=_no_items)
    seconds_step: Tensor = field(default_factory=_no_items)
    measured: WorldSamples | None = None
    gathered: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.num_samples
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if len(self.rank) != n:
            raise ValueError(f"rank must have one entry a sample, got {len(self.rank)} for {n} samples")
        defaults = {
            "num_candidates": torch.zeros(n, dtype=torch.int64),
            "payload_bytes": self.uih_lengths * 8,
            "seconds": torch.full((self.world_size,), torch.nan, dtype=torch.float64),
            "seconds_step": torch.full((self.world_size,), -1, dtype=torch.int64),
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            if len(value) == 0:
                object.__setattr__(self, name, default)
            elif len(value) != len(default):
                raise ValueError(f"{name} must have {len(default)} entries, got {len(value)}")

    @property
    def num_samples(self) -> int:
        """Samples in the global batch, N."""
        return len(self.uih_lengths)


Partitioner = Callable[[WorldSamples], Tensor]
"""Gives the owner rank of every sample: shape [num_samples], int64, values in [0, world_size)."""

Cost = Callable[[WorldSamples], Tensor]
"""Gives the cost of every sample: shape [num_samples], float64, not negative."""
