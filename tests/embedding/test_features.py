"""Ids are read from KeyedJaggedTensors, and rows given back, in few operations; see embedding/features.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from freescale.embedding.features import FeatureReader
from freescale.embedding.tables import Table

jagged_tensor = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")

READER = FeatureReader([Table("item", 50, 4, ["clicked", "shown"]), Table("user", 9, 4)])


class Counting(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own lacks types
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def keyed(keys: list[str], lengths: list[list[int]]) -> Any:
    """A KeyedJaggedTensor of ids from 0 on."""
    flat = [length for each in lengths for length in each]
    return jagged_tensor.KeyedJaggedTensor.from_lengths_sync(keys, torch.arange(sum(flat)), torch.tensor(flat))


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        (["clicked", "shown", "user"], [[2, 0, 1], [0, 0, 4], [1, 1, 1]]),
        (["user", "other", "shown", "clicked"], [[1, 1], [5, 5], [0, 0], [3, 1]]),
        (["shown", "clicked", "user"], [[0], [0], [0]]),
    ],
)
def test_ids_and_rows_are_those_that_torchrec_itself_tells(keys: list[str], lengths: list[list[int]]) -> None:
    features = keyed(keys, lengths)
    ids = READER.ids(features)
    wrapped = READER.wrap(features, [torch.ones(len(each), 4) * i for i, each in enumerate(ids)])
    theirs = keyed(keys, lengths).to_dict()
    assert list(wrapped) == ["clicked", "shown", "user"]
    for i, (name, found) in enumerate(zip(wrapped, ids, strict=True)):
        assert torch.equal(found, theirs[name].values())
        assert type(wrapped[name]) is jagged_tensor.JaggedTensor
        assert torch.equal(wrapped[name].values(), torch.ones(len(found), 4) * i)
        assert torch.equal(wrapped[name].lengths(), theirs[name].lengths())
        assert torch.equal(wrapped[name].offsets(), theirs[name].offsets())


def test_keys_with_samples_of_their_own_number_are_read_as_torchrec_does() -> None:
    features = jagged_tensor.KeyedJaggedTensor(
        keys=["clicked", "shown", "user"],
        values=torch.arange(6),
        lengths=torch.tensor([2, 1, 1, 2]),
        stride_per_key_per_rank=[[2], [1], [1]],
    ).sync()
    ids = READER.ids(features)
    assert [each.tolist() for each in ids] == [[0, 1, 2], [3], [4, 5]]
    wrapped = READER.wrap(features, [torch.ones(len(each), 4) for each in ids])
    assert [wrapped[name].lengths().tolist() for name in wrapped] == [[2, 1], [1], [2]]


def test_one_feature_takes_no_operation_of_torch_at_all() -> None:
    reader, features = FeatureReader([Table("item", 50, 4, ["clicked"])]), keyed(["clicked"], [[2, 0, 1]])
    rows = torch.ones(3, 4)
    with Counting() as counting:
        (ids,) = reader.ids(features)
        wrapped = reader.wrap(features, [rows])
    assert ids is features.values()
    assert wrapped["clicked"].values() is rows
    assert counting.names == []


def test_three_features_take_three_operations_whatever_their_length() -> None:
    features = keyed(["clicked", "shown", "user"], [[2, 0, 1], [0, 0, 4], [1, 1, 1]])
    with Counting() as counting:
        ids = READER.ids(features)
        READER.wrap(features, [torch.ones(0)] * len(ids))
    made_by_the_test = ["aten.ones.default"]
    operations = [name for name in counting.names if name not in made_by_the_test]
    assert operations == ["aten.split_with_sizes.default", "aten.view.default", "aten.unbind.int"]


def test_a_missing_feature_is_named_beside_those_that_there_are() -> None:
    with pytest.raises(KeyError, match=r"must have 'shown' to look up, got \['clicked', 'user'\]"):
        READER.ids(keyed(["clicked", "user"], [[1], [1]]))
