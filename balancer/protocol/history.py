"""Remembers recent plans, so that measured seconds meet the samples that caused them (paper, section 4.1, AutoTune)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..plan import WorldSamples
from .header import WorldStep

_KEPT_STEPS = 32  # more than any sensible prefetch; seconds of older steps are ignored


class History:
    """The samples and owners of the latest steps."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._no_steps, self._no_seconds = np.full(world_size, -1), np.full(world_size, np.nan)
        self._plans: OrderedDict[int, tuple[WorldSamples, NDArray[np.int64]]] = OrderedDict()

    def add(self, step: int, samples: WorldSamples, owners: NDArray[np.int64]) -> None:
        """Remember a step."""
        self._plans[step] = (samples, owners)
        while len(self._plans) > _KEPT_STEPS:
            self._plans.popitem(last=False)

    def measured(self, world: WorldStep) -> tuple[Tensor, Tensor, WorldSamples | None]:
        """Match what ranks say that they measured last with what they trained on.

        Returns:
            Steps and seconds, -1 and NaN where the step is not known any more, and the samples behind them.
        """
        if not self._plans:
            return torch.from_numpy(self._no_steps.copy()), torch.from_numpy(self._no_seconds.copy()), None
        known = np.array([int(step) in self._plans for step in world.seconds_step])
        steps = np.where(known, world.seconds_step, -1)
        seconds = np.where(known, world.seconds, np.nan)
        measured = self._select(steps) if known.any() else None
        return torch.from_numpy(steps), torch.from_numpy(seconds), measured

    def _select(self, steps: NDArray[np.int64]) -> WorldSamples:
        """For each rank, the samples it trained on at its step."""
        parts: dict[str, list[NDArray[np.int64]]] = {
            "rank": [],
            "uih": [],
            "count": [],
            "bytes": [],
            "content": [],
        }
        for step in np.unique(steps[steps >= 0]):
            samples, owners = self._plans[int(step)]
            chosen = steps[owners] == step
            parts["rank"].append(owners[chosen])
            parts["uih"].append(samples.uih_lengths.numpy()[chosen])
            parts["count"].append(samples.num_candidates.numpy()[chosen])
            parts["bytes"].append(samples.payload_bytes.numpy()[chosen])
            if len(samples.candidate_lengths) == int(samples.num_candidates.sum()):
                contents = np.repeat(chosen, samples.num_candidates.numpy())
                parts["content"].append(samples.candidate_lengths.numpy()[contents])
        joined = {
            name: torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0, dtype=torch.int64)
            for name, arrays in parts.items()
        }
        return WorldSamples(
            world_size=self._world_size,
            rank=joined["rank"],
            uih_lengths=joined["uih"],
            num_candidates=joined["count"],
            candidate_lengths=joined["content"],
            payload_bytes=joined["bytes"],
        )
