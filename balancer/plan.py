"""What every rank knows about a global batch, and what a partitioner makes of it (paper, Algorithm 1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import permute_jagged
from .protocol.quiet import numbers_of

_OURS = __name__.partition(".")[0] + "."  # what names of this package's modules begin with
_OPTIONAL = ("num_candidates", "payload_bytes", "seconds", "seconds_step")


def _no_items() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


class _Gathered(dict[str, Tensor]):
    """The gathered columns; one that is not among them says how it gets there."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"column {name!r} was not gathered: pass gather=({name!r},) to balance; it has {list(self)}")


class _Lazily:
    """What `WorldSamples.measured` is: worked out when it is read, where a function was given."""

    def __get__(self, world: WorldSamples | None, kind: object = None) -> WorldSamples | None:
        found = None if world is None else world.__dict__.get("_measured")
        if world is not None and callable(found):
            found = world.__dict__["_measured"] = found()
        return found

    def __set__(self, world: WorldSamples, value: WorldSamples | Callable[[], WorldSamples] | None) -> None:
        world.__dict__["_measured"] = value


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
            where `candidates=` names a column that is not nested, those of the first nested one, however many;
            empty when no column is nested, and for partitioners that say that they do not read it (see `Partitioner`).
        payload_bytes: Bytes that move when a sample moves. Shape [N], int64.
        seconds: Compute time each rank measured last, without waiting for peers. Shape [world_size], float64; NaN
            before the first measurement, and for partitioners that say that they do not read it (see `Partitioner`).
        seconds_step: Step that `seconds` belong to. Shape [world_size], int64; -1 before the first measurement.
        measured: The samples that produced `seconds`: for every rank those it trained on in its `seconds_step`, with
            `rank` the rank that trained on them. None before the first measurement.
        gathered: Dense columns asked for by `gather=`. Each of shape [N].
        first_rank: Rank of the whole world that rank 0 of this world is; not 0 in the groups of `grouped`. What a
            partitioner remembers of rank r belongs to rank `first_rank + r`.
        cost: Cost of each sample, where it is settled already (`keep_together` sums the costs of the samples that it
            merges). Shape [N], float64. None: the partitioner's own cost decides.

    Raises:
        ValueError: `world_size` is below 1, or a tensor has another number of entries than it should.

    Example:
        A partitioner is any function that gives each sample its rank, here users to ranks by their id. Loaded with
        `balance(dataloader, transport, partitioner=by_user, gather=("user_id",), …)`:

        >>> def by_user(world):
        ...     return world.gathered["user_id"] % world.world_size
        >>> user_id = torch.tensor([4, 7, 4])
        >>> world = WorldSamples(2, torch.tensor([0, 0, 1]), torch.tensor([9, 5, 7]), gathered={"user_id": user_id})
        >>> by_user(world)
        tensor([0, 1, 0])
    """

    world_size: int
    rank: Tensor
    uih_lengths: Tensor
    num_candidates: Tensor = field(default_factory=_no_items)
    candidate_lengths: Tensor = field(default_factory=_no_items)
    payload_bytes: Tensor = field(default_factory=_no_items)
    seconds: Tensor = field(default_factory=_no_items)
    seconds_step: Tensor = field(default_factory=_no_items)
    measured: _Lazily = _Lazily()
    gathered: Mapping[str, Tensor] = field(default_factory=dict)
    first_rank: int = 0
    cost: Tensor | None = None

    def __post_init__(self) -> None:
        n = self.num_samples
        object.__setattr__(self, "gathered", _Gathered(self.gathered))
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.rank.shape[0] != n:
            raise ValueError(f"rank must have one entry a sample, got {len(self.rank)} for {n} samples")
        for name, entries in zip(_OPTIONAL, (n, n, self.world_size, self.world_size), strict=True):
            given = getattr(self, name).shape[0]
            if given == entries:
                continue
            if given:
                raise ValueError(f"{name} must have {entries} entries, got {given}")
            object.__setattr__(self, name, self._default(name))

    def _default(self, name: str) -> Tensor:
        if name == "num_candidates":
            return torch.zeros(self.num_samples, dtype=torch.int64)
        if name == "payload_bytes":
            return self.uih_lengths * 8
        if name == "seconds":
            return torch.full((self.world_size,), torch.nan, dtype=torch.float64)
        return torch.full((self.world_size,), -1, dtype=torch.int64)

    @property
    def num_samples(self) -> int:
        """Samples in the global batch, N."""
        return self.uih_lengths.shape[0]

    def restricted_to(self, samples: Tensor, ranks: range) -> WorldSamples:
        """Give the world that has only some samples and ranks; ranks are renumbered from 0.

        Args:
            samples: Samples to keep, in order, all loaded by one of `ranks`. Shape [n], int64.
            ranks: Consecutive ranks to keep.

        Returns:
            A world of `len(ranks)` ranks and n samples; what was measured is restricted to `ranks` as well.
        """
        measured = self.measured
        if measured is not None:
            inside = (measured.rank >= ranks.start) & (measured.rank < ranks.stop)
            measured = measured.restricted_to(inside.nonzero().flatten(), ranks)
        return WorldSamples(
            world_size=len(ranks),
            rank=self.rank[samples] - ranks.start,
            uih_lengths=self.uih_lengths[samples],
            num_candidates=self.num_candidates[samples],
            candidate_lengths=self.candidate_lengths_of(samples),
            payload_bytes=self.payload_bytes[samples],
            seconds=self.seconds[ranks.start : ranks.stop],
            seconds_step=self.seconds_step[ranks.start : ranks.stop],
            measured=measured,
            gathered={name: column[samples] for name, column in self.gathered.items()},
            first_rank=self.first_rank + ranks.start,
            cost=None if self.cost is None else self.cost[samples],
        )

    def candidate_lengths_of(self, samples: Tensor) -> Tensor:
        """Content lengths of the candidates of some samples, in their order.

        Empty when no column is nested, and when the lengths are not of the column that counts candidates: nobody knows
        then of which samples they are.
        """
        known = len(self.candidate_lengths)
        if not known or known != int(self.num_candidates.sum()):
            return self.candidate_lengths[:0]
        taken, _ = permute_jagged(self.candidate_lengths, self.num_candidates, samples)
        assert isinstance(taken, Tensor), "one tensor went in"
        return taken


Partitioner = Callable[[WorldSamples], Tensor]
"""Gives the owner rank of every sample: shape [num_samples], int64, values in [0, world_size).

One with an attribute `reads_candidate_lengths` that is false is not told the lengths of candidates, which saves the
ranks an exchange in each step. Those of this package that go by the UIH length or a `CostModel` have it; a cost may
have it too. One with an attribute `reads_measured` that is false is not told measured seconds, so that nobody takes
the time and the balancer need not remember samples; those of this package that go by the UIH length have it, but for
`VariableBatchSize(autotune=True)`.
"""

Cost = Callable[[WorldSamples], Tensor]
"""Gives the cost of every sample: shape [num_samples], float64, not negative."""


class PassesOn(ABC):
    """A partitioner that passes on the columns and the state of what it holds: a cost, or another partitioner."""

    @property
    @abstractmethod
    def held(self) -> object:
        """The cost or partitioner inside."""

    @property
    def gather(self) -> tuple[str, ...]:
        """Dense columns that `WorldSamples.gathered` has to hold."""
        return tuple(getattr(self.held, "gather", ()))

    @property
    def reads_candidate_lengths(self) -> bool:
        """Whether `WorldSamples.candidate_lengths` has to be there."""
        return reads_candidate_lengths(self.held)

    @property
    def reads_measured(self) -> bool:
        """Whether `WorldSamples.seconds` and what belongs to them have to be there."""
        return reads_measured(self.held)

    def state_dict(self) -> dict[str, Any]:
        """State to resume from: tensors and numbers. Empty when nothing inside learns."""
        return dict(self.held.state_dict()) if hasattr(self.held, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, which is not changed."""
        if hasattr(self.held, "load_state_dict"):
            self.held.load_state_dict(state)
        elif state:
            raise ValueError(f"state has {sorted(state)}, but {self!r} holds nothing that keeps a state")


def reads_candidate_lengths(part: object) -> bool:
    """Whether a partitioner or cost reads `WorldSamples.candidate_lengths`; true for those that do not say."""
    return bool(getattr(part, "reads_candidate_lengths", True))


def reads_measured(part: object) -> bool:
    """Whether a partitioner or cost reads measured seconds; true for those that do not say.

    A user's class with a call of its own has to say so itself, whatever it derives from or hands attributes on to: what
    a class of this package says is about its own call.
    """
    if "reads_measured" not in getattr(part, "__dict__", ()):
        for kind in type(part).__mro__:
            if "reads_measured" in vars(kind) or kind.__module__.startswith(_OURS):
                break
            if "__call__" in vars(kind):
                return True
    return bool(getattr(part, "reads_measured", True))


def validate_plan(owner: object, world: WorldSamples) -> Tensor:
    """Check what a partitioner returned; partitioners are user code.

    Args:
        owner: What the partitioner returned.
        world: What it was given.

    Returns:
        Owner rank of every sample. Shape [num_samples], int64, in host memory.

    Raises:
        TypeError: Not a tensor, or not of an integer dtype.
        ValueError: Another shape than [num_samples], or a value outside [0, world_size).

    Example:
        >>> world = WorldSamples(world_size=2, rank=torch.tensor([0, 1]), uih_lengths=torch.tensor([5, 7]))
        >>> validate_plan(torch.tensor([1, 2]), world)
        Traceback (most recent call last):
        ...
        ValueError: the partitioner must give owner ranks in [0, 2), got 2 for sample 1
    """
    return torch.from_numpy(check_plan(owner, world).copy())


def check_plan(owner: object, world: WorldSamples) -> NDArray[np.int64]:
    """As `validate_plan`, but gives an array, not to be written to. A copy: a partitioner may keep what it returns."""
    if not isinstance(owner, Tensor):
        raise TypeError(f"the partitioner must return a torch.Tensor, got {type(owner).__name__}")
    dtype = owner.dtype
    if dtype != torch.int64 and (dtype == torch.bool or dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"the partitioner must return integers (int64), got {dtype}")
    if owner.shape != (world.num_samples,):
        wanted = [world.num_samples]
        raise ValueError(f"the partitioner must return shape {wanted}, one owner a sample, got {list(owner.shape)}")
    numbers = numbers_of(owner if owner.is_cpu else owner.cpu())
    # Negative numbers are huge ones without a sign.
    if len(numbers) and np.maximum.reduce(numbers.view(np.uint64)) >= world.world_size:
        sample = int(((numbers < 0) | (numbers >= world.world_size)).argmax())
        raise ValueError(
            f"the partitioner must give owner ranks in [0, {world.world_size}), "
            f"got {int(owner[sample])} for sample {sample}"
        )
    return numbers
