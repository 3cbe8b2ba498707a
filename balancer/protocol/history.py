"""Remembers recent plans, so that measured seconds meet the samples that caused them (paper, section 4.1, AutoTune)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..plan import WorldSamples
from .header import CANDIDATES, PAYLOAD, UIH, WorldStep

_KEPT_STEPS = 32  # more than any sensible prefetch; seconds of older steps are ignored
Int64s = NDArray[np.int64]


@dataclass  # not frozen: that would be a call a field
class _Planned:
    """One step.

    Attributes:
        told: What stage I told of each sample. Shape [N, 3 or more].
        candidate_lengths: See `WorldSamples`. Int64.
        owners: Rank that trained on each sample. Shape [N].
    """

    told: Int64s
    candidate_lengths: Int64s
    owners: Int64s


class History:
    """The samples and owners of the latest steps."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._no_steps, self._no_seconds = np.full(world_size, -1), np.full(world_size, np.nan)
        self._plans: OrderedDict[int, _Planned] = OrderedDict()

    def add(self, step: int, told: Int64s, candidate_lengths: Int64s, owners: Int64s) -> None:
        """Remember a step; nobody may write to the arrays any more. See `_Planned`."""
        self._plans[step] = _Planned(told, candidate_lengths, owners)
        while len(self._plans) > _KEPT_STEPS:
            self._plans.popitem(last=False)

    def measured(self, world: WorldStep) -> tuple[Tensor, Tensor, Callable[[], WorldSamples] | None]:
        """Match what ranks say that they measured last with what they trained on.

        Returns:
            Steps and seconds, -1 and NaN where the step is not known any more, and what gives the samples behind them:
            most partitioners do not ask.
        """
        if not self._plans:
            return torch.from_numpy(self._no_steps.copy()), torch.from_numpy(self._no_seconds.copy()), None
        steps = [step if step in self._plans else -1 for step in world.seconds_step.tolist()]
        known = np.array(steps)
        seconds = np.where(known >= 0, world.seconds, np.nan)
        plans = {step: self._plans[step] for step in sorted(set(steps)) if step >= 0}
        measured = partial(_select, plans, known, self._world_size) if plans else None
        return torch.from_numpy(known), torch.from_numpy(seconds), measured


def _select(plans: Mapping[int, _Planned], steps: Int64s, world_size: int) -> WorldSamples:
    """For each rank, the samples it trained on at its step. `plans` are in order."""
    owners, told, contents = [], [], []
    for step, planned in plans.items():
        chosen = steps[planned.owners] == step
        owners.append(planned.owners[chosen])
        told.append(planned.told[chosen])
        counts = planned.told[:, CANDIDATES]
        if len(planned.candidate_lengths) == counts.sum():
            contents.append(planned.candidate_lengths[np.repeat(chosen, counts)])
    columns = np.array(np.concatenate(told).T, order="C")
    return WorldSamples(
        world_size=world_size,
        rank=torch.from_numpy(np.concatenate(owners)),
        uih_lengths=torch.from_numpy(columns[UIH]),
        num_candidates=torch.from_numpy(columns[CANDIDATES]),
        candidate_lengths=torch.from_numpy(np.concatenate(contents or [np.zeros(0, np.int64)])),
        payload_bytes=torch.from_numpy(columns[PAYLOAD]),
    )
