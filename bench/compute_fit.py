"""What a rank's batch costs in seconds, fitted to measurements (paper, section 4.1: time estimated from UIH length)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..balancer.partitioners.least_squares import non_negative_least_squares

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESULTS = Path(__file__).parent / "results"
COMPUTE_PATTERN = "*-virtual_ranks*.json"
"""Where earlier results lie, and which of them hold a fit."""

_TERMS = ("step", "item", "item_squared", "sample")


@dataclass(frozen=True)
class ComputeFit:
    """`seconds = step + item ΣL + item_squared ΣL² + sample n` of a rank with n samples of lengths L.

    Attributes:
        step: Seconds of any step.
        item: Seconds an item of a history.
        item_squared: Seconds a squared length.
        sample: Seconds a sample.
        error: Root mean square of what the fit leaves over, as a share of the seconds.
        noise: Standard deviation of the seconds of one batch measured again and again, as a share of their mean.
    """

    step: float
    item: float
    item_squared: float
    sample: float
    error: float = 0.0
    noise: float = 0.0

    def seconds(self, loads: Floats) -> Floats:
        """Seconds of ranks by what `loads_of` gives. From shape [n, 3] to [n]."""
        seconds: Floats = self.step + loads @ np.array([self.item, self.item_squared, self.sample])
        return seconds

    def of_samples(self, lengths: Ints) -> Floats:
        """Seconds that each sample adds to its rank's step. From shape [N] to [N]."""
        items = lengths.astype(np.float64)
        return self.item * items + self.item_squared * items**2 + self.sample

    def to_dict(self) -> dict[str, float]:
        """For a JSON file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, float]) -> ComputeFit:
        """Read what `to_dict` gave.

        Raises:
            ValueError: A term is missing, is no number, or is negative.
        """
        try:
            fit = cls(**{name: float(value) for name, value in given.items()})
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"a fit of compute time has {', '.join(_TERMS)}, error and noise: {error}") from error
        if min(fit.to_dict().values()) < 0:
            raise ValueError(f"no term of a fit of compute time may be negative, got {fit}")
        return fit


def loads_of(owner: Ints, lengths: Ints, world_size: int) -> Floats:
    """ΣL, ΣL² and the number of samples of each rank.

    Args:
        owner: Rank of each sample. Shape [N].
        lengths: Length of each sample. Shape [N].
        world_size: Number of ranks.

    Returns:
        Shape [world_size, 3].

    Example:
        >>> loads_of(np.array([0, 1, 0]), np.array([3, 5, 1]), 2)
        array([[ 4., 10.,  2.],
               [ 5., 25.,  1.]])
    """
    items = lengths.astype(np.float64)
    sums = [np.bincount(owner, weights=w, minlength=world_size) for w in (items, items**2, np.ones(len(items)))]
    return np.stack(sums, axis=1)


def fit_compute(loads: Floats, seconds: Floats, noise: float = 0.0) -> ComputeFit:
    """Fit by non-negative least squares on relative errors.

    Args:
        loads: What `loads_of` gives, of all measurements. Shape [n, 3].
        seconds: What they took, over 0. Shape [n].
        noise: For the fit's `noise`.

    Raises:
        ValueError: Fewer than four measurements, or seconds that are not positive.

    Example:
        >>> fit = fit_compute(np.array([[1, 1, 1], [2, 4, 1], [4, 16, 2], [3, 5, 2.0]]), np.array([2, 3, 5, 4.0]))
        >>> round(fit.step, 3), round(fit.item, 3)
        (1.0, 1.0)
    """
    if len(seconds) < len(_TERMS):
        raise ValueError(f"a fit of compute time needs {len(_TERMS)} measurements, got {len(seconds)}")
    if not (seconds > 0).all():
        raise ValueError(f"seconds must be over 0, got {seconds.min()}")
    features = np.concatenate([np.ones((len(loads), 1)), loads], axis=1)
    scale = np.maximum(features.mean(axis=0), 1e-12)
    relative = features / scale / seconds[:, None]
    squares = relative.T @ relative
    squares += 1e-9 * np.trace(squares) * np.eye(len(_TERMS))  # terms that hardly vary must not blow each other up
    terms = non_negative_least_squares(squares, relative.sum(axis=0)) / scale
    left = features @ terms / seconds - 1
    step, item, item_squared, sample = terms.tolist()
    return ComputeFit(step, item, item_squared, sample, error=float(np.sqrt(np.mean(left**2))), noise=noise)
