"""Fused optimizers: each row once a step, as FBGEMM's EXACT_SGD, EXACT_ROWWISE_ADAGRAD and ADAM (section 3.2).

Formulas are written as single operations, each rounded by itself: a product and a sum in one instruction would round
once, and whether a processor does that may depend on where in a tensor a row lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Stamp:
    """What an update needs from the iteration it belongs to, however late it is applied.

    Attributes:
        lr: Learning rate.
        step: Number of the iteration, from 1.
        divisor: What gradients are divided by: the number of ranks, or 1.
        scale: What the loss was multiplied with: a number, or a tensor of one element on the tables' device.
    """

    lr: float
    step: int
    divisor: int = 1
    scale: float | Tensor = 1.0


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent: `weight -= lr * gradient`.

    Args:
        lr: Learning rate; schedulers may change it later.

    Raises:
        ValueError: `lr` is negative or no finite number.

    Example:
        >>> Sgd(lr=0.1)
        Sgd(lr=0.1)
    """

    lr: float
    rule: ClassVar[Literal["sgd"]] = "sgd"
    states: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_number("lr", self.lr)

    def width(self, state: str, columns: int) -> int:
        """Columns of a state, for tables of so many columns; 0 means one number a row."""
        raise KeyError(f"no state '{state}' of {columns} columns")

    def apply(self, weights: Tensor, gradients: Tensor, states: list[Tensor], stamp: Stamp) -> tuple[Tensor, ...]:
        """New weights and states. Shapes [n, D], [n, D], none."""
        del states
        return (weights - gradients * stamp.lr,)

    def numbers(self, stamp: Stamp) -> list[float]:
        """What the kernel that updates rows takes besides the divisor."""
        return [stamp.lr, *[0.0] * 8]


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one sum of squares a row: the mean over its columns is added each step.

    Args:
        lr: Learning rate; schedulers may change it later.
        eps: Added to the root.

    Raises:
        ValueError: A number is negative or not finite.
    """

    lr: float
    eps: float = 1e-8
    rule: ClassVar[Literal["rowwise_adagrad"]] = "rowwise_adagrad"
    states: ClassVar[tuple[str, ...]] = ("momentum1",)

    def __post_init__(self) -> None:
        check_number("lr", self.lr)
        check_number("eps", self.eps)

    def width(self, state: str, columns: int) -> int:
        """See `Sgd.width`."""
        del state, columns
        return 0

    def apply(self, weights: Tensor, gradients: Tensor, states: list[Tensor], stamp: Stamp) -> tuple[Tensor, ...]:
        """New weights and states. Shapes [n, D], [n, D], [n]."""
        momentum = states[0] + sum_of_squares(gradients) / weights.shape[1]
        rate = stamp.lr / (momentum.sqrt() + self.eps)
        return weights - gradients * rate[:, None], momentum

    def numbers(self, stamp: Stamp) -> list[float]:
        """See `Sgd.numbers`."""
        return [stamp.lr, self.eps, *[0.0] * 7]


@dataclass(frozen=True)
class Adam:
    """Adam on the rows that a step touches, with the step count of all iterations.

    Args:
        lr: Learning rate; schedulers may change it later.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        eps: Added to the root.
        weight_decay: Times weight and learning rate, taken from the weight.

    Raises:
        ValueError: A number is negative or not finite, or a decay is 1 or more.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    rule: ClassVar[Literal["adam"]] = "adam"
    states: ClassVar[tuple[str, ...]] = ("momentum1", "momentum2")

    def __post_init__(self) -> None:
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
            check_number(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)}")

    def width(self, state: str, columns: int) -> int:
        """See `Sgd.width`."""
        del state
        return columns

    def apply(self, weights: Tensor, gradients: Tensor, states: list[Tensor], stamp: Stamp) -> tuple[Tensor, ...]:
        """New weights and states. Shapes [n, D], [n, D], twice [n, D]."""
        first = states[0] * self.beta1 + gradients * (1 - self.beta1)
        second = states[1] * self.beta2 + (gradients * gradients) * (1 - self.beta2)
        mean = first / (1 - self.beta1**stamp.step)
        root = (second / (1 - self.beta2**stamp.step)).sqrt()
        change = mean / (root + self.eps)
        if self.weight_decay:
            change = change + weights * self.weight_decay
        return weights - change * stamp.lr, first, second

    def numbers(self, stamp: Stamp) -> list[float]:
        """See `Sgd.numbers`."""
        decays = [self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2]
        corrections = [1 - self.beta1**stamp.step, 1 - self.beta2**stamp.step]
        return [stamp.lr, self.eps, *decays, *corrections, self.weight_decay]


Optimizer = Sgd | RowwiseAdagrad | Adam
GradScale = Callable[[], float | Tensor]


def sum_of_squares(rows: Tensor) -> Tensor:
    """Sum of squares of each row, by halves: a tree that only the number of columns decides.

    Args:
        rows: Shape [n, D], float32.

    Returns:
        Shape [n], float32.

    Example:
        >>> sum_of_squares(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
        [14.0]
    """
    squares = rows * rows
    while squares.shape[1] > 1:
        half = -(-squares.shape[1] // 2)
        rest = squares.shape[1] - half
        head = squares[:, :rest] + squares[:, half:]
        squares = head if rest == half else torch.cat([head, squares[:, rest:half]], dim=1)
    return squares[:, 0]


class FusedOptimizer(torch.optim.Optimizer):
    """The tables' optimizer as PyTorch knows optimizers: for schedulers and checkpoints.

    `step()` and `zero_grad()` do nothing, since updates happen in backward. What a scheduler writes into
    `param_groups[k]["lr"]` holds from the next backward on.

    Attributes:
        param_groups: One a group of tables; "params" are this rank's weights, "names" the tables' names.
    """

    def __init__(self, groups: list[dict[str, Any]], engine: Engine) -> None:
        self._engine = engine
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> Any:
        """Do nothing but call the closure: rows are updated in backward."""
        return None if closure is None else closure()

    def mark_stepped(self) -> None:
        """Tell schedulers that rows were updated: they warn when an optimizer has not stepped before them."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients of tables are never kept."""

    def state_dict(self) -> dict[str, Any]:
        """States and steps by table, hyperparameters by group of tables; applies deferred updates first."""
        from .checkpoint import export_optimizer

        return export_optimizer(self._engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, on any number of ranks where values are DTensors.

        Raises:
            ValueError: It is of other tables, or of another optimizer.
        """
        from .checkpoint import load_optimizer

        load_optimizer(self._engine, state_dict)


def check_number(name: str, value: float) -> None:
    """Refuse what cannot be a rate: negative, infinite, no number."""
    if not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be a finite number and not negative, got {value!r}")
