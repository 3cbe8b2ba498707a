"""Moves the user's own batch to a device, asynchronously, and keeps its type (paper, section 4.3)."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

BatchT = TypeVar("BatchT")


def pinned(batch: BatchT) -> BatchT:
    """Copy to page-locked host memory, from where a copy to the device does not stop the host. Alike if it is there.

    Whatever has no `pin_memory` (numbers, text, NumPy arrays, batches on a device) stays as it is.
    """
    made: BatchT = _mapped(batch, _pin)
    return made


def moved(batch: BatchT, device: torch.device) -> BatchT:
    """Copy to a device on the current stream; asynchronous from page-locked memory.

    Args:
        batch: Any nest of dicts, lists, tuples, NamedTuples and dataclasses of tensors or of objects with a `to` of
            their own (KeyedJaggedTensor, JaggedTensor, JaggedBatch, TorchRec's Pipelineable).
        device: Where to.

    Returns:
        A batch of the same type; what cannot be on a device (NumPy arrays, numbers, text, None) is passed on.
    """

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if hasattr(value, "to") else value

    made: BatchT = _mapped(batch, move)
    return made


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Keep a batch's device memory until `stream` is done with it, though another stream allocated it."""

    def record(value: Any) -> Any:
        if hasattr(value, "record_stream") and not (isinstance(value, torch.Tensor) and value.device.type == "cpu"):
            value.record_stream(stream)
        return value

    _mapped(batch, record)


def _pin(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything in a batch that is no container; containers with a `to` are none."""
    kind = type(value)
    if hasattr(value, "to") or value is None:
        return value if value is None else function(value)
    if isinstance(value, (dict, UserDict)):
        return _mapped_dict(value, function)
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return kind._make(_mapped(child, function) for child in value)
    if kind in (list, tuple):
        return kind(_mapped(child, function) for child in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for f in dataclasses.fields(value):
            object.__setattr__(made, f.name, _mapped(getattr(value, f.name), function))  # frozen classes too
        return made
    return function(value)


def _mapped_dict(value: Any, function: Callable[[Any], Any]) -> Any:
    """A dict of the same class. Attributes that are items (classes with `batch.field`) follow them."""
    made = copy.copy(value)
    own = getattr(value, "__dict__", {})
    if own is value:
        made.__dict__ = made
    for key, child in value.items():
        made[key] = new = _mapped(child, function)
        if own is not value and key in own and own[key] is child:
            object.__setattr__(made, key, new)
    return made
