"""CostModel: learns what samples cost and how fast ranks are from measured seconds (paper, section 4.1: AutoTune)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan import WorldSamples
from .least_squares import non_negative_least_squares
from .saved import refuse_other_states
from .speeds import RankSpeeds
from .workload import Floats

_ENOUGH = 8  # measurements before the first fit
_PRIOR = 0.01  # weight of "all of it is proportional to ΣL", in measurements
_TYPICAL_ERROR = 0.01  # relative; larger errors than three times the median one count less


class CostModel:
    """Fits `seconds = (a + b ΣL + c ΣL² + d samples) / speed[rank]` online, and serves as `cost=` of any partitioner.

    `WorldSamples.measured` says which samples took which seconds. The terms are fitted to all ranks at once by
    non-negative least squares on relative errors, where outliers count little and old measurements fade; each rank's
    speed is what remains. Before the first fit the cost is L. Cost and speed are functions of data that all ranks
    share, so all ranks agree.

    Source: in place of FreeScale's autotune (section 4.1), which corrects batch sizes by execution times and has no
    notion of why a rank is slow.

    Args:
        memory: After how many measurements (of one rank in one step) an old one counts a third. At least 8.

    Raises:
        ValueError: `memory` is less than 8.

    Example:
        >>> from freescale.balancer import greedy_batch_size
        >>> balanced_by_time = greedy_batch_size(cost=CostModel())
    """

    reads_candidate_lengths = False

    def __init__(self, memory: int = 4096) -> None:
        if memory < _ENOUGH:
            raise ValueError(f"memory must be at least {_ENOUGH} measurements, got {memory}")
        self.memory = memory
        self._speeds = RankSpeeds()
        self._scale = np.ones(4)
        self._moments = np.zeros((4, 5))  # of features with features and seconds, faded
        self._terms = np.zeros(4)
        self._num_measured = 0

    def __repr__(self) -> str:
        return f"CostModel(memory={self.memory})"

    def __call__(self, world: WorldSamples) -> Tensor:
        """Cost of each sample: its seconds on a rank of speed 1, or L before the first fit. Shape [N], float64."""
        self._learn(world)
        lengths = world.uih_lengths.double().numpy()
        _, per_item, per_square, per_sample = self._terms
        if per_item == per_square == per_sample == 0:
            return torch.from_numpy(lengths.copy())
        costs = per_item * lengths + per_square * lengths**2 + per_sample
        # Rounded to float32: the last bits of a fit may differ between kinds of CPU, and a plan must not.
        return torch.from_numpy(costs.astype(np.float32).astype(np.float64))

    def speeds(self, world: WorldSamples) -> Tensor:
        """Speed of each rank, 1 on average. Shape [world_size], float64."""
        self._learn(world)
        return torch.from_numpy(self._speeds.of(world))

    def overhead(self, world: WorldSamples) -> float:
        """Seconds of a step that do not depend on its samples, on a rank of speed 1; 0 before the first fit."""
        self._learn(world)
        return float(np.float32(self._terms[0]))

    @property
    def terms(self) -> dict[str, float]:
        """The fit, in seconds: "step" (a), "item" (b), "item_squared" (c), "sample" (d). Zeros before the first fit."""
        return dict(zip(("step", "item", "item_squared", "sample"), self._terms.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """State to resume from: tensors and numbers."""
        return {
            "cost_scale": torch.from_numpy(self._scale.copy()),
            "cost_moments": torch.from_numpy(self._moments.copy()),
            "cost_terms": torch.from_numpy(self._terms.copy()),
            "cost_num_measured": self._num_measured,
            **self._speeds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, which is not changed.

        Raises:
            ValueError, TypeError: It is no such state; nothing was loaded.
        """
        refuse_other_states(state, self.state_dict())
        self._scale = state["cost_scale"].numpy().copy()
        self._moments = state["cost_moments"].numpy().copy()
        self._terms = state["cost_terms"].numpy().copy()
        self._num_measured = int(state["cost_num_measured"])
        self._speeds.load_state_dict(state)

    def _learn(self, world: WorldSamples) -> None:
        """Take in measurements not seen before; seeing a world again changes nothing."""
        if world.measured is None:
            return
        fresh = self._speeds.fresh(world).numpy()
        features = _features(world.measured, world.world_size)
        fresh &= features[:, 3] > 0  # a rank without samples says nothing of their cost
        if not fresh.any():
            return
        seconds = world.seconds.numpy() * self._speeds.of(world)
        self._take_in(features[fresh], seconds[fresh])
        self._fit()
        loads = features @ self._terms if self._terms.any() else features[:, 1]
        self._speeds.observe(world, np.where(fresh, loads, 0.0))

    def _take_in(self, features: Floats, seconds: Floats) -> None:
        if self._num_measured == 0:
            self._scale = np.maximum(features.mean(axis=0), 1.0)
        scaled = features / self._scale
        if self._terms.any():
            expected = features @ self._terms
        else:
            expected = scaled[:, 1] * np.median(seconds / np.maximum(scaled[:, 1], 1e-9))
        expected = np.maximum(expected, 0.1 * np.median(seconds))
        error = np.abs(seconds - expected) / expected
        bound = 3 * max(_TYPICAL_ERROR, float(np.median(error)))
        weight = np.minimum(1.0, bound / np.maximum(error, 1e-12)) / expected**2
        products = scaled[:, :, None] * np.concatenate([scaled, seconds[:, None]], axis=1)[:, None, :]
        fade = np.exp(-len(seconds) / self.memory)
        self._moments = fade * self._moments + (products * weight[:, None, None]).sum(axis=0)
        self._num_measured += len(seconds)

    def _fit(self) -> None:
        if self._num_measured < _ENOUGH:
            return
        squares, products = self._moments[:, :4].copy(), self._moments[:, 4].copy()
        # Between balanced batches ΣL hardly varies, and a step's constant would explain it as well; the prior decides.
        prior = products[1] / squares[1, 1] if squares[1, 1] > 0 else 0.0
        strength = _PRIOR * float(squares.trace()) / 4 / min(self._num_measured, self.memory)
        squares += strength * np.eye(4)
        products[1] += strength * prior
        self._terms = non_negative_least_squares(squares, products) / self._scale


def _features(measured: WorldSamples, world_size: int) -> Floats:
    """1, ΣL, ΣL² and the number of samples of each rank. Shape [world_size, 4]."""
    owner, lengths = measured.rank.numpy(), measured.uih_lengths.double().numpy()
    sums = [np.bincount(owner, weights=weight, minlength=world_size) for weight in (lengths, lengths**2)]
    counts = np.bincount(owner, minlength=world_size)
    return np.stack([np.ones(world_size), *sums, counts.astype(np.float64)], axis=1)
