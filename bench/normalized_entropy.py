"""Normalized entropy: how much better than the average click rate a model predicts clicks (paper, section 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log


def normalized_entropy(loss: float, clicks: float, count: float) -> float:
    """Mean log loss over that of always predicting the average click rate; 1 is no better than that.

    Args:
        loss: Sum of the log losses of all items, in nats.
        clicks: How many of them have label 1.
        count: How many items there are.

    Returns:
        NaN where all labels are alike, since there is nothing to predict.

    Example:
        >>> round(normalized_entropy(loss=4 * log(2), clicks=2, count=4), 6)
        1.0
        >>> normalized_entropy(loss=0.5, clicks=1, count=4) < 0.25
        True
    """
    rate = clicks / count if count else 0.0
    if not 0 < rate < 1:
        return float("nan")
    entropy = -(rate * log(rate) + (1 - rate) * log(1 - rate))
    return loss / count / entropy


def curve(losses: Sequence[float], clicks: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Normalized entropy of everything up to each step.

    Args:
        losses: Of each step, the sum of the log losses.
        clicks: Of each step, labels that are 1.
        counts: Of each step, items.
    """
    return list(map(normalized_entropy, accumulate(losses), accumulate(clicks), accumulate(counts)))
