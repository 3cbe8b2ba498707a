"""Batches on their way to a device keep their type, and what hangs on them (section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.balancer.adapters.device import moved

from staged_training import batch_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Nest:
    dense: Tensor
    keyed: Any
    more: dict[str, Any]
    pair: Pair


def test_a_batch_keeps_its_type_on_the_way_to_a_device() -> None:
    keyed = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    array = np.arange(2)
    batch = Nest(torch.ones(2), keyed, {"batch": batch_of(0), "array": array, "none": None}, Pair([torch.ones(1)], "x"))
    there = moved(batch, torch.device("meta"))
    assert type(there) is Nest
    assert type(there.pair) is Pair
    assert there.dense.device.type == there.keyed.values().device.type == there.pair.first[0].device.type == "meta"
    assert there.more["batch"].device.type == "meta"
    assert there.more["array"] is array
    assert there.pair.second == "x"
    assert batch.dense.device.type == batch.keyed.values().device.type == "cpu"


class Attributed(dict[str, Any]):
    """Items are attributes too."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.__dict__ = self


def test_items_that_are_attributes_move_with_them() -> None:
    there: Any = moved(Attributed({"x": torch.ones(2)}), torch.device("meta"))
    assert there.x is there["x"]
    assert there.x.device.type == "meta"
