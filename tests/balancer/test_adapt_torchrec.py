"""Adapters of TorchRec's own types."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freescale.balancer.adapters.adapt import adapter_for

from adapted_batches import assert_same, reordered, x


class TestTorchrec:
    """TorchRec's own types."""

    @pytest.fixture(autouse=True)
    def _torchrec(self) -> None:
        self.rec = pytest.importorskip("torchrec")

    def keyed(self, dtype: torch.dtype = torch.int32, **changes: Any) -> Any:
        parts: dict[str, Any] = {
            "keys": ["page", "time"],
            "values": torch.arange(6),
            "lengths": torch.tensor([1, 0, 2, 0, 3, 0], dtype=dtype),
            "weights": torch.arange(6).half(),
        }
        return self.rec.KeyedJaggedTensor(**parts | changes)

    def moved_by_hand(self, dtype: torch.dtype, weighted: bool) -> Any:
        values = [1, 2, 0, 0, 3, 4, 5]
        return self.rec.KeyedJaggedTensor(
            keys=["page", "time"],
            values=torch.tensor(values),
            lengths=torch.tensor([2, 1, 1, 0, 0, 0, 0, 3], dtype=dtype),
            weights=torch.tensor(values).half() if weighted else None,
        )

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("weighted", [True, False])
    def test_a_keyed_tensor_comes_back(self, dtype: torch.dtype, weighted: bool) -> None:
        keyed = self.keyed(dtype) if weighted else self.keyed(dtype, weights=None)
        assert_same(reordered(keyed), self.moved_by_hand(dtype, weighted))
        out = reordered({"k": keyed, "y": x()})
        assert_same(out["k"], self.moved_by_hand(dtype, weighted))
        assert out["k"].keys() == ["page", "time"]
        names = adapter_for(keyed).flatten(keyed).names
        assert names == ("page", "time", "page.weights", "time.weights")[: 4 if weighted else 2]

    def test_what_a_keyed_tensor_has_cached_stays_behind(self) -> None:
        keyed = self.keyed()
        keyed.sync()
        keyed.to_dict()
        keyed.offsets()
        out = reordered(keyed)
        assert out.length_per_key() == [4, 3]
        assert out.offset_per_key() == [0, 4, 7]
        assert out.offsets().tolist() == [0, 2, 3, 4, 4, 4, 4, 4, 7]
        assert out["time"].values().tolist() == [3, 4, 5]
        assert keyed["time"].values().tolist() == [3, 4, 5]

    def test_a_keyed_tensor_given_by_offsets_or_with_wide_values_comes_back(self) -> None:
        offsets = torch.tensor([0, 1, 1, 3, 3, 6, 6])
        by_offsets = self.rec.KeyedJaggedTensor(keys=["page", "time"], values=torch.arange(6), offsets=offsets)
        assert_same(reordered(by_offsets), self.moved_by_hand(torch.int64, weighted=False))
        wide = self.keyed(values=torch.arange(12).view(6, 2), weights=None)
        assert reordered(wide)["time"].values().tolist() == [[6, 7], [8, 9], [10, 11]]

    def test_a_keyed_tensor_of_no_samples_comes_back(self) -> None:
        out = reordered(self.keyed(), order=[])
        assert out.stride() == 0
        assert sorted(out.to_dict()) == ["page", "time"]
        adapter = adapter_for(self.keyed())
        assert adapter.flatten(out).equal(adapter.empty())

    def test_a_keyed_tensor_whose_lists_are_all_empty_takes_the_first_types(self) -> None:
        adapter = adapter_for(self.keyed(weights=None))
        empty = self.keyed(values=torch.tensor([]), lengths=torch.zeros(4, dtype=torch.int64), weights=None)
        out = adapter.restore(adapter.flatten(empty))
        assert out.values().dtype is torch.int64
        assert out.lengths().dtype is torch.int32

    def test_what_a_keyed_tensor_may_not_be_is_refused(self) -> None:
        varying: dict[str, Any] = {"lengths": torch.tensor([1, 2, 3]), "stride_per_key_per_rank": [[2], [1]]}
        with pytest.raises(ValueError, match=r"field 'k' has another batch size for each key \(VBE\)"):
            adapter_for({"k": self.keyed(**varying)})
        adapter = adapter_for({"k": self.keyed()})
        with pytest.raises(ValueError, match="field 'k' has no weights, in the first batch it had some"):
            adapter.flatten({"k": self.keyed(weights=None)})
        with pytest.raises(ValueError, match=r"field 'k' has keys \['page', 'item'\]"):
            adapter.flatten({"k": self.keyed(keys=["page", "item"])})
        with pytest.raises(ValueError, match="field 'k' is of type Tensor, in the first batch it was KeyedJagged"):
            adapter.flatten({"k": x()})
        with pytest.raises(ValueError, match=r"field 'y' has 2 rows.*field 'k' has 3 samples"):
            adapter_for({"y": torch.arange(2), "k": self.keyed()})
        none: dict[str, Any] = {"keys": [], "values": x()[:0], "lengths": x()[:0], "weights": None}
        with pytest.raises(ValueError, match=r"field 'k' is a KeyedJaggedTensor without keys.*leave it out"):
            adapter_for({"k": self.keyed(**none), "y": x()})
        with pytest.raises(ValueError, match=r"field 'k' has keys \[\], in the first batch"):
            adapter.flatten({"k": self.keyed(**none)})
        with pytest.raises(ValueError, match="require grad"):
            adapter_for(self.keyed(values=torch.ones(6, requires_grad=True)))

    @pytest.mark.parametrize("weighted", [True, False])
    def test_a_jagged_tensor_comes_back(self, weighted: bool) -> None:
        weights = torch.arange(3.0) if weighted else None
        lengths = torch.tensor([2, 0, 1], dtype=torch.int32)
        jagged = self.rec.JaggedTensor(values=torch.arange(3), weights=weights, lengths=lengths)
        jagged.offsets()
        out = reordered({"j": jagged})["j"]
        assert type(out) is self.rec.JaggedTensor
        assert out.values().tolist() == [2, 0, 1, 0, 1]
        assert_same(out.lengths(), torch.tensor([1, 2, 2, 0], dtype=torch.int32))
        assert out.offsets().tolist() == [0, 1, 3, 5, 5]
        assert_same(out.weights_or_none(), torch.tensor([2.0, 0, 1, 0, 1]) if weighted else None)
        with pytest.raises(ValueError, match="field 'j' has"):
            adapter_for({"j": jagged}).flatten(
                {"j": self.rec.JaggedTensor(torch.arange(3), None if weighted else torch.ones(3), lengths)}
            )
