"""VBS: segments of samples of similar length and equal total weight, tuned to measured seconds (paper, section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..metrics import rank_loads
from ..plan import Cost, PassesOn, WorldSamples
from .cut import exact_cut, prefix_cut
from .speeds import RankSpeeds
from .workload import RankCost, costliest_first, uih_length, workload


class VariableBatchSize(PassesOn):
    """Sort samples by length, longest first, and cut them into one segment a rank of about equal weight `L ** alpha`.

    Samples of a rank are of similar length, so little is padded; ranks get different numbers of samples, so scale the
    loss by what the report says. Sample counts differ, but no rank is empty unless there are fewer samples than ranks.
    A sample without history weighs as much as one of length 1.

    Source: FreeScale, section 4.1 (VBS). Deviations: the cut is the best contiguous one, not one by prefix sums; and
    autotune divides a step's own load by its own seconds, since a correction by the difference of stale execution times
    diverges when batches are prefetched.

    Args:
        alpha: Exponent of the weight, not negative. 1: proportional to length, 2: attention dominates, 0: equal counts.
        autotune: Learn each rank's speed from `WorldSamples.seconds` and give slower ranks less.
        cut: "exact" (the best contiguous cut) or "prefix" (where prefix sums come closest: 4 to 15 percent off).
        cost: Cost that stands for L; the UIH length by default. A `CostModel` knows speeds itself: alpha must be 1
            then, and autotune off.

    Raises:
        ValueError: An argument breaks a rule above, or the cost has a wrong shape or a negative or non-finite value.

    Example:
        >>> lengths = torch.tensor([9, 1, 2, 6])
        >>> world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 1, 1]), uih_lengths=lengths)
        >>> VariableBatchSize(alpha=1.0)(world)
        tensor([0, 1, 1, 1])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        autotune: bool = False,
        cut: Literal["exact", "prefix"] = "exact",
        cost: Cost = uih_length,
    ) -> None:
        if not 0 <= alpha < float("inf"):
            raise ValueError(f"alpha must be finite and not negative, got {alpha}")
        if cut not in ("exact", "prefix"):
            raise ValueError(f'cut must be "exact" or "prefix", got {cut!r}')
        if isinstance(cost, RankCost) and (autotune or alpha != 1):
            raise ValueError("with a cost that knows ranks, such as CostModel, alpha must be 1 and autotune False")
        self.alpha, self.autotune, self.cut, self.cost = alpha, autotune, cut, cost
        self._speeds = RankSpeeds()

    def __repr__(self) -> str:
        return f"VariableBatchSize({self.alpha}, autotune={self.autotune}, cut={self.cut!r}, cost={self.cost!r})"

    @property
    def held(self) -> object:
        """The cost."""
        return self.cost

    @property
    def reads_measured(self) -> bool:
        """See `PassesOn.reads_measured`."""
        return self.autotune or super().reads_measured

    def __call__(self, world: WorldSamples) -> Tensor:
        """Plan. Returns the owner rank of every sample, shape [num_samples], int64."""
        load = workload(self.weight, world)
        speeds = load.speeds
        if self.autotune:
            self._learn(world)
            speeds = self._speeds.of(world)
        order = costliest_first(load.costs)
        cuts = (exact_cut if self.cut == "exact" else prefix_cut)(load.costs[order], speeds)
        owner = np.empty(world.num_samples, dtype=np.int64)
        owner[order] = np.repeat(np.arange(world.world_size), np.diff(cuts))
        return torch.from_numpy(owner)

    @property
    def weight(self) -> Cost:
        """The weight of a sample, `L ** alpha`, as a cost."""
        return self.cost if isinstance(self.cost, RankCost) else self._power

    def state_dict(self) -> dict[str, Any]:
        """State to resume from: the speeds, and what the cost keeps."""
        return {**super().state_dict(), **(self._speeds.state_dict() if self.autotune else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, which is not changed."""
        ours = ("rank_step", "rank_rate", "rank_speed") if self.autotune else ()
        if self.autotune:
            self._speeds.load_state_dict(state)
        super().load_state_dict({name: value for name, value in state.items() if name not in ours})

    def _power(self, world: WorldSamples) -> Tensor:
        costs = self.cost(world).double().numpy()
        if self.cost is uih_length:
            costs = np.maximum(costs, 1)
        # Rounded to float32: the last bits of a power may differ between kinds of CPU, and a plan must not.
        return torch.from_numpy((costs**self.alpha).astype(np.float32).astype(np.float64))

    def _learn(self, world: WorldSamples) -> None:
        if world.measured is not None:
            loads = rank_loads(world.measured.rank, self.weight(world.measured), world.world_size)
            self._speeds.observe(world, loads.numpy())
