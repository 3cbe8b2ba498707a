"""Has many torch operations run in one call, so that a thread gives back the interpreter lock once (section 3.2).

A trainer that launches small operations holds the lock nearly always. A thread beside it that needs it back after each
of a hundred operations waits for it a hundred times, up to 5 ms each, and holds the trainer up as often. TorchScript
runs a whole function without it. Where it is missing, since torch means to give it up, the same function runs
operation by operation, with the same result.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_compiling = threading.Lock()


def one_call(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator; `function` is written in what TorchScript knows, and compiled when it is first called.

    Example:
        >>> @one_call
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return x + x
        >>> twice(torch.tensor([3])).tolist()
        [6]
    """
    made: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not made:
            with _compiling:
                if not made:
                    made.append(_compiled(function))
        return made[0](*args, **kwargs)

    return call


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            compiled: Callable[P, R] = torch.jit.script(function)
        except (RuntimeError, OSError, AttributeError):  # not on this Python, no source to read, or no such thing
            return function  # a test keeps it from happening unseen
    return compiled
