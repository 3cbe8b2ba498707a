"""Non-negative least squares for a handful of unknowns, in arithmetic whose order is fixed (for CostModel)."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from .workload import Floats


def non_negative_least_squares(squares: Floats, products: Floats) -> Floats:
    """Minimise `x @ squares @ x / 2 - products @ x` over x that are not negative.

    Tries every set of unknowns that may be positive: exact, and 15 small systems for 4 unknowns.

    Args:
        squares: Positive definite. Shape [n, n].
        products: Shape [n].

    Returns:
        x. Shape [n].

    Example:
        >>> non_negative_least_squares(np.eye(2), np.array([3.0, -1.0]))
        array([3., 0.])
    """
    n = len(products)
    best, best_value = np.zeros(n), 0.0
    for size in range(1, n + 1):
        for free in combinations(range(n), size):
            rows = [[float(squares[i, j]) for j in free] + [float(products[i])] for i in free]
            x = _solve(rows)
            if x is None or min(x) < 0:
                continue
            value = -sum(value * float(products[i]) for i, value in zip(free, x, strict=True)) / 2
            if value < best_value:
                best, best_value = np.zeros(n), value
                best[list(free)] = x
    return best


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Gaussian elimination with row pivots on an augmented matrix; None where it is singular."""
    n = len(rows)
    for column in range(n):
        pivot = max(range(column, n), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-300:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, n):
            factor = rows[row][column] / rows[column][column]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    x = [0.0] * n
    for row in reversed(range(n)):
        known = sum(rows[row][column] * x[column] for column in range(row + 1, n))
        x[row] = (rows[row][n] - known) / rows[row][row]
    return x
