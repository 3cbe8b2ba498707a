"""Finds a partitioner by the name that a command line gives (paper, section 4.1: the partitioner is the user's)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..balancer import Partitioner, VariableBatchSize, fixed_batch_size, greedy_batch_size, home_batch_size

BUILT_IN: dict[str, Partitioner | type[VariableBatchSize]] = {
    "fixed_batch_size": fixed_batch_size,
    "greedy_batch_size": greedy_batch_size,
    "home_batch_size": home_batch_size,
    "VariableBatchSize": VariableBatchSize,
}


def load_partitioner(name: str) -> Partitioner:
    """Find a partitioner.

    Args:
        name: One of `BUILT_IN`, or module:name of a partitioner; the current directory is searched too.

    Returns:
        The partitioner; of a class, an instance made without arguments.

    Raises:
        ValueError: There is no such partitioner, or it cannot be called.

    Example:
        >>> load_partitioner("greedy_batch_size") is load_partitioner("freescale.balancer:greedy_batch_size")
        True
    """
    found = BUILT_IN[name] if name in BUILT_IN else _imported(name)
    partitioner: Partitioner = found() if isinstance(found, type) else found
    if not callable(partitioner):
        raise ValueError(f"partitioner {name!r} must be callable, it is a {type(found).__name__}")
    return partitioner


def _imported(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"partitioner must be one of {', '.join(BUILT_IN)} or module:function, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"partitioner {name!r} cannot be imported: {error}") from error
