"""Keyed tensors, nested tensors and padding: there and back."""

from __future__ import annotations

import pytest
import torch

from freescale.balancer.batches.batch import Column, JaggedBatch

torchrec = pytest.importorskip("torchrec")


def lengths(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes)


def batch() -> JaggedBatch:
    page, time = lengths(2, 0, 1), lengths(0, 1, 3)
    return JaggedBatch(
        {
            "page": Column(torch.tensor([1.0, 2, 3]), (page,)),
            "time": Column(torch.tensor([4.0, 5, 6, 7]), (time,)),
            "page.weights": Column(torch.tensor([0.1, 0.2, 0.3]), (page,)),
            "time.weights": Column(torch.tensor([0.4, 0.5, 0.6, 0.7]), (time,)),
            "user": Column(torch.tensor([1, 2, 3])),
        }
    )


def test_a_keyed_tensor_is_feature_major() -> None:
    keyed = batch().to_kjt(["time", "page"], weighted=True)
    assert keyed.keys() == ["time", "page"]
    assert keyed.lengths().tolist() == [0, 1, 3, 2, 0, 1]
    assert keyed.values().tolist() == [4, 5, 6, 7, 1, 2, 3]
    assert torch.equal(keyed.weights(), torch.tensor([0.4, 0.5, 0.6, 0.7, 0.1, 0.2, 0.3]))
    assert keyed.stride() == 3
    assert keyed["page"].values().tolist() == [1, 2, 3]


def test_a_keyed_tensor_goes_there_and_back() -> None:
    original = batch()
    back = JaggedBatch.from_kjt(original.to_kjt(["page", "time"], weighted=True))
    assert back.names == ("page", "time", "page.weights", "time.weights")
    assert all(back[name].equal(original[name]) for name in back.names)
    assert JaggedBatch.from_kjt(original.to_kjt(["page"])).names == ("page",)


def test_a_keyed_tensor_given_by_offsets_is_read() -> None:
    keyed = torchrec.KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(8).view(4, 2), offsets=torch.tensor([0, 1, 1, 3, 4], dtype=torch.int32)
    )
    made = JaggedBatch.from_kjt(keyed)
    assert made["a"].to_list() == [[[0, 1]], []]
    assert made["b"].to_list() == [[[2, 3], [4, 5]], [[6, 7]]]
    assert made["a"].values.data_ptr() == keyed.values().data_ptr()


def test_a_keyed_tensor_of_several_keys_and_no_samples_can_be_taken_apart() -> None:
    for weighted in (False, True):
        keyed = batch().take([]).to_kjt(["page", "time"], weighted=weighted)
        assert keyed.stride() == 0
        assert sorted(keyed.to_dict()) == ["page", "time"]
        assert keyed["time"].values().dtype is torch.float32
        assert keyed["page"].offsets().tolist() == [0]
        assert [len(part.keys()) for part in keyed.split([1, 1])] == [1, 1]
        back = JaggedBatch.from_kjt(keyed)
        assert back.batch_size == 0
        assert back["page"].spec == batch()["page"].spec


def test_a_keyed_tensor_of_no_keys_keeps_its_batch_size() -> None:
    keyed = batch().to_kjt([])
    assert keyed.stride() == 3
    assert JaggedBatch.from_kjt(keyed).batch_size == 3


def test_columns_that_do_not_fit_into_one_keyed_tensor_are_refused_by_name() -> None:
    page = batch()["page"]
    mixed = JaggedBatch({"page": page, "id": Column(page.values.long(), page.levels), "u": Column(torch.arange(3))})
    with pytest.raises(ValueError, match=r"column 'id' is jagged int64.*the first one jagged float32"):
        mixed.to_kjt(["page", "id"])
    with pytest.raises(ValueError, match=r"column 'u' is dense int64.*holds jagged columns only"):
        mixed.to_kjt(["page", "u"])
    other = JaggedBatch({"page": page, "page.weights": Column(torch.ones(3), (lengths(3, 0, 0),))})
    with pytest.raises(ValueError, match=r"column 'page\.weights' has other lengths than 'page'"):
        other.to_kjt(["page"], weighted=True)


def test_a_keyed_tensor_whose_batch_size_varies_is_refused() -> None:
    keyed = torchrec.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match=r"another batch size for each key \(VBE\)"):
        JaggedBatch.from_kjt(keyed)


def test_a_keyed_tensor_whose_values_and_lengths_disagree_is_refused() -> None:
    keyed = torchrec.KeyedJaggedTensor(keys=["a"], values=torch.arange(3), lengths=lengths(1, 1))
    with pytest.raises(ValueError, match="lengths add up to 2, but there are 3 rows"):
        JaggedBatch.from_kjt(keyed)
    crooked = torchrec.KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(3), lengths=lengths(1, 1, 1))
    with pytest.raises(ValueError, match="3 lengths for 2 keys"):
        JaggedBatch.from_kjt(crooked)


def test_a_jagged_tensor_shares_the_column() -> None:
    original = batch()
    jagged = original.to_jagged_tensor("page", weighted=True)
    assert jagged.values().data_ptr() == original["page"].values.data_ptr()
    assert jagged.lengths().tolist() == [2, 0, 1]
    assert jagged.offsets().tolist() == [0, 2, 2, 3]
    assert torch.equal(jagged.weights(), original["page.weights"].values)
    assert [part.tolist() for part in jagged.to_dense()] == [[1, 2], [], [3]]
    assert original.take([]).to_jagged_tensor("page").offsets().tolist() == [0]


def test_a_nested_tensor_goes_there_and_back() -> None:
    original = batch()
    nested = original.to_nested("page")
    assert nested.layout is torch.jagged
    assert [row.tolist() for row in nested.unbind()] == [[1, 2], [], [3]]
    assert JaggedBatch.from_nested({"page": nested})["page"].equal(original["page"])
    empty = original.take([]).to_nested("page")
    assert empty.shape[0] == 0
    assert JaggedBatch.from_nested({"page": empty})["page"].equal(original.take([])["page"])


def test_a_nested_tensor_with_holes_is_packed() -> None:
    rows = torch.arange(10).view(2, 5)
    holes = torch.nested.narrow(rows, 1, torch.tensor([1, 0]), torch.tensor([2, 3]), layout=torch.jagged)
    assert JaggedBatch.from_nested({"a": holes})["a"].to_list() == [[1, 2], [5, 6, 7]]


def test_other_nested_layouts_are_refused() -> None:
    strided = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged).to_padded_tensor(0)
    with pytest.raises(ValueError, match=r"column 'a' must be a nested tensor with layout=torch\.jagged"):
        JaggedBatch.from_nested({"a": strided})
    ragged_last = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="column 'a' must be ragged in the dimension after the batch"):
        JaggedBatch.from_nested({"a": ragged_last})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_padding_goes_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.ones(4, *shape).to(dtype)
    original = JaggedBatch({"a": Column(values, (lengths(3, 0, 1),))})
    padded, mask = original.to_padded("a")
    assert padded.shape == (3, 3, *shape)
    assert padded.dtype is dtype
    assert mask.tolist() == [[True, True, True], [False, False, False], [True, False, False]]
    assert padded.float().sum() == values.float().sum()
    assert JaggedBatch.from_padded({"a": padded}, mask)["a"].equal(original["a"])


def test_padding_value_and_length_are_kept() -> None:
    padded, mask = batch().to_padded("page", padding_value=-1, max_length=4)
    assert padded.tolist() == [[1, 2, -1, -1], [-1, -1, -1, -1], [3, -1, -1, -1]]
    assert mask.shape == (3, 4)
    nothing, mask = batch().take([1, 1]).to_padded("page")
    assert (nothing.shape, mask.shape) == ((2, 0), (2, 0))
    empty, _ = batch().take([]).to_padded("page", max_length=2)
    assert empty.shape == (0, 2)


def test_padding_that_would_cut_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length must be at least the longest sample, 2, got 1"):
        batch().to_padded("page", max_length=1)
    with pytest.raises(ValueError, match="only a jagged column can be padded, got a dense"):
        batch().to_padded("user")


def test_real_entries_may_come_anywhere_in_the_padding() -> None:
    left_padded = torch.tensor([[0, 1], [2, 3]])
    made = JaggedBatch.from_padded({"a": left_padded}, torch.tensor([[False, True], [True, True]]))
    assert made["a"].to_list() == [[1], [2, 3]]
    with pytest.raises(ValueError, match="column 'a': mask must be bool"):
        JaggedBatch.from_padded({"a": left_padded}, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"column 'a': mask must have the first two dimensions"):
        JaggedBatch.from_padded({"a": left_padded}, torch.ones(2, 3, dtype=torch.bool))


def test_nested_columns_do_not_become_keyed_nested_or_padded() -> None:
    deep = JaggedBatch({"c": Column(torch.arange(2), (lengths(1), lengths(2)))})
    for convert in (
        lambda: deep.to_kjt(["c"]),
        lambda: deep.to_jagged_tensor("c"),
        lambda: deep.to_nested("c"),
        lambda: deep.to_padded("c"),
    ):
        with pytest.raises(ValueError, match="nested jagged"):
            convert()
