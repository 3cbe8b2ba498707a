"""Batches before and after their samples moved through an adapter, and how they are compared."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.balancer.adapters.adapt import adapter_for, adapter_from

ORDER = [2, 0, 0, 1]


def reordered(batch: Any, jagged: Any = None, order: list[int] = ORDER) -> Any:
    """The batch after its samples moved, through the adapter that a description makes where there is one."""
    adapter = adapter_for(batch, jagged=jagged)
    described = adapter.describe()
    out = adapter.restore(adapter.flatten(batch).take(order))
    if described is not None:
        there = adapter_from(described)
        assert there.schema == adapter.schema
        assert there.describe() == described
        assert_same(there.restore(there.flatten(batch).take(order)), out)
        assert there.flatten(there.restore(there.empty())).equal(adapter.empty())
    return out


def assert_same(a: Any, b: Any) -> None:
    """Types, dtypes, memory formats and values, for the types that these tests use."""
    assert type(a) is type(b)
    if isinstance(a, Tensor) and a.is_nested:
        assert_same([*a.unbind()], [*b.unbind()])
        assert a.offsets().dtype is b.offsets().dtype  # type: ignore[attr-defined]  # of nested tensors
    elif isinstance(a, Tensor):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()  # NaT is unlike itself
    elif isinstance(a, (dict, UserDict)):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif hasattr(a, "lengths") and hasattr(a, "weights_or_none"):
        parts = ("values", "lengths", "weights_or_none")
        assert_same([getattr(a, part)() for part in parts], [getattr(b, part)() for part in parts])
    else:
        assert a is b is None or a.equal(b)


def x() -> Tensor:
    return torch.arange(3)


def moved(tensor: Tensor) -> Tensor:
    return tensor[ORDER]
