"""What objects of the user's batch hold beside their items: it does not move with samples (paper, section 4.1)."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ..batches.batch import JaggedBatch

PLAIN = (str, bytes, int, float, type(None))  # types whose values can be compared


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object that is a dict holds in attributes, without its items."""
    own = getattr(value, "__dict__", {})
    found = {} if own is value else dict(own)
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    if isinstance(value, UserDict):
        del found["data"]  # the items
    return found


def holds_samples(value: Any) -> bool:
    """Whether a value is a tensor, an array or a batch, or a container of such. Other objects are not looked into."""
    if isinstance(value, (Mapping, UserDict)):
        return any(map(holds_samples, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(holds_samples, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds_samples(getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return isinstance(value, (Tensor, np.ndarray, JaggedBatch)) or torchrec_type(value) is not None


def torchrec_type(value: Any) -> str | None:
    """Name TorchRec's type of the value; None when it is none of them, or TorchRec is not imported."""
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    for name in ("KeyedJaggedTensor", "JaggedTensor"):
        if module is not None and isinstance(value, getattr(module, name)):
            return name
    return None
