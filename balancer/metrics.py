"""How uneven a batch is: padding, waiting, imbalance and what evening it out moves (paper, sections 2.2 and 5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import WorldSamples


def sparsity(lengths: Tensor) -> float:
    """Share of padding when every sample of a batch is padded to the longest one.

    Source: FreeScale, section 2.2, Eq. 1.

    Args:
        lengths: UIH length of each sample of one local batch. Shape [batch_size], any integer dtype.

    Returns:
        A value in [0, 1); 0 for an empty batch and for a batch of empty samples.

    Raises:
        ValueError: `lengths` is not one-dimensional or has a negative value.

    Example:
        >>> sparsity(torch.tensor([4, 2, 2, 0]))
        0.5
    """
    if lengths.dim() != 1:
        raise ValueError(f"lengths must have shape [batch_size], got {list(lengths.shape)}")
    if len(lengths) == 0:
        return 0.0
    if int(lengths.min()) < 0:
        raise ValueError(f"lengths must not be negative, got {int(lengths.min())}")
    longest = int(lengths.max())
    return 1 - int(lengths.sum()) / (longest * len(lengths)) if longest else 0.0


def straggler_percentage(seconds: Tensor) -> float:
    """Mean idle time of the ranks as a percentage of the step: every rank waits for the slowest.

    Source: FreeScale, section 2.2.

    Args:
        seconds: Compute time of each rank, without waiting, or any load that stands for it. Shape [world_size], or
            [steps, world_size] for idle time over several steps as a percentage of their time.

    Returns:
        A value in [0, 100); 0 when no rank has anything to do.

    Raises:
        ValueError: Another shape, no rank, or a negative or non-finite value.

    Example:
        >>> straggler_percentage(torch.tensor([4.0, 2.0, 3.0, 3.0]))
        25.0
    """
    seconds = _checked(seconds)
    step_seconds = seconds.amax(-1).sum().item()
    return 100 * (1 - seconds.mean(-1).sum().item() / step_seconds) if step_seconds else 0.0


def imbalance(loads: Tensor) -> float:
    """How far the heaviest rank lies over the mean: max / mean - 1.

    Args:
        loads: Load or seconds of each rank. Shape [world_size].

    Returns:
        A value in [0, world_size - 1]; 0 when all loads are 0.

    Raises:
        ValueError: Another shape, no rank, or a negative or non-finite value.

    Example:
        >>> imbalance(torch.tensor([4, 2, 3, 3]))  # doctest: +ELLIPSIS
        0.333...
    """
    loads = _checked(loads)
    if loads.dim() != 1:
        raise ValueError(f"loads must have shape [world_size], got {list(loads.shape)}")
    mean = loads.mean().item()
    return loads.max().item() / mean - 1 if mean else 0.0


def bytes_moved(world: WorldSamples, owner: Tensor) -> int:
    """Bytes of the samples that leave the rank that loaded them.

    Args:
        world: The global batch.
        owner: A plan for it. Shape [num_samples], int64.

    Returns:
        Bytes, of `world.payload_bytes.sum()` in all.
    """
    return int(world.payload_bytes[owner != world.rank].sum())


def rank_loads(owner: Tensor, costs: Tensor, world_size: int) -> Tensor:
    """Sum of costs on each rank.

    Args:
        owner: Owner rank of each sample. Shape [N], int64.
        costs: Cost of each sample. Shape [N], integer or float.
        world_size: Number of ranks.

    Returns:
        Shape [world_size], float64.
    """
    return torch.zeros(world_size, dtype=torch.float64).index_add_(0, owner, costs.double())


def _checked(seconds: Tensor) -> Tensor:
    seconds = seconds.double()
    if seconds.dim() not in (1, 2) or seconds.shape[-1] == 0:
        raise ValueError(f"one value a rank is needed, shape [world_size], got {list(seconds.shape)}")
    if not bool((seconds >= 0).all() & seconds.isfinite().all()):
        raise ValueError("values must be finite and not negative")
    return seconds
