"""Remembers how fast each rank is, from loads and the seconds they took (paper, section 4.1: AutoTune)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan import WorldSamples
from .saved import refuse_other_states
from .workload import Floats

_SMOOTHING = 0.3
_LARGEST_CHANGE = 1.1


class RankSpeeds:
    """Relative speed of each rank, 1 for a usual one.

    Seconds arrive late when batches are prefetched. So each step's own load is divided by that step's own seconds,
    whatever the plan has become since. The speed moves a part of the way to what was measured, at most a tenth a step.
    A missing measurement keeps the last estimate, and one that is seen twice counts once.
    """

    def __init__(self) -> None:
        self._step = torch.zeros(0, dtype=torch.int64)
        self._rate = torch.zeros(0, dtype=torch.float64)
        self._speed = torch.zeros(0, dtype=torch.float64)

    def fresh(self, world: WorldSamples) -> Tensor:
        """Which ranks have a measurement not seen before. Shape [world_size], bool."""
        self._grow(world)
        ranks = slice(world.first_rank, world.first_rank + world.world_size)
        usable = world.seconds.isfinite() & (world.seconds > 0)
        return usable & (world.seconds_step != self._step[ranks])

    def observe(self, world: WorldSamples, loads: Floats) -> None:
        """Learn from measurements not seen before.

        Args:
            world: Has `seconds` and `seconds_step`.
            loads: Load that took those seconds, on each rank. Shape [world_size].
        """
        fresh = (self.fresh(world) & (torch.from_numpy(loads) > 0)).numpy()
        if not fresh.any():
            return
        ranks = slice(world.first_rank, world.first_rank + world.world_size)
        rate, speed = self._rate[ranks].numpy(), self._speed[ranks].numpy()
        rate[fresh] = loads[fresh] / world.seconds.numpy()[fresh]
        self._step[ranks][fresh] = world.seconds_step[fresh]
        relative = rate[fresh] / np.median(rate[np.isfinite(rate)])
        change = (relative / speed[fresh]) ** _SMOOTHING
        speed[fresh] *= np.clip(change, 1 / _LARGEST_CHANGE, _LARGEST_CHANGE)

    def of(self, world: WorldSamples) -> Floats:
        """Speeds of the ranks of a world, 1 on average. Shape [world_size]."""
        self._grow(world)
        speed: Floats = self._speed[world.first_rank : world.first_rank + world.world_size].numpy()
        # Rounded to float32: the last bits of a power may differ between kinds of CPU, and a plan must not.
        return np.asarray((speed / speed.mean()).astype(np.float32), dtype=np.float64)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to resume from."""
        return {
            "rank_step": self._step.clone(),
            "rank_rate": self._rate.clone(),
            "rank_speed": self._speed.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, which is not changed.

        Raises:
            ValueError, TypeError: It is no such state; nothing was loaded.
        """
        refuse_other_states(state, self.state_dict())
        if not len(state["rank_step"]) == len(state["rank_rate"]) == len(state["rank_speed"]):
            raise ValueError("state must hold tensors rank_step, rank_rate and rank_speed of one length")
        self._step, self._rate, self._speed = (state[name].clone() for name in ("rank_step", "rank_rate", "rank_speed"))

    def _grow(self, world: WorldSamples) -> None:
        missing = world.first_rank + world.world_size - len(self._speed)
        if missing > 0:
            self._step = torch.cat([self._step, torch.full((missing,), -1)])
            self._rate = torch.cat([self._rate, torch.full((missing,), torch.nan, dtype=torch.float64)])
            self._speed = torch.cat([self._speed, torch.ones(missing, dtype=torch.float64)])


def forget_speeds(state: Any) -> Any:
    """Take the speeds out of a partitioner's state, for another number of ranks: nobody knows who became whom.

    What was learned of samples stays.

    Example:
        >>> forget_speeds({"rank_step": torch.ones(2), "rank_rate": torch.ones(2), "rank_speed": torch.ones(2)})
        {'rank_step': tensor([]), 'rank_rate': tensor([]), 'rank_speed': tensor([])}
    """
    names = RankSpeeds().state_dict().keys()
    if not isinstance(state, dict) or not names <= state.keys():
        return state
    return {name: value[:0] if name in names and isinstance(value, Tensor) else value for name, value in state.items()}
