"""Which rows two batches share, compared with sets; masks of any lengths arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.embedding import collision, forms
from freescale.embedding.collision import Stamps, num_bytes, pack_masks, unpack_masks
from freescale.embedding.forms import count_up, find_occurrences, merge_pieces


def test_collisions_are_those_of_sets_also_when_generations_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collision, "_LAST_GENERATION", 4)
    rng = np.random.default_rng(3)
    stamps = Stamps(30)
    before = np.empty(0, dtype=np.int64)
    for _ in range(20):
        rows = rng.integers(0, 30, 8)
        assert stamps.mark(rows).tolist() == [row in before for row in rows]
        assert stamps.is_latest(before).tolist() == [row in rows for row in before]
        before = rows


def test_masks_of_several_ranks_arrive_as_they_were() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        splits = [rng.integers(0, 20, 3) for _ in range(4)]
        masks = [rng.random(int(split.sum())) < 0.5 for split in splits]
        packed = pack_masks(masks, splits)
        assert len(packed) == num_bytes(splits).sum()
        for mask, found in zip(masks, unpack_masks(packed, splits), strict=True):
            assert np.array_equal(mask, found)


@pytest.mark.parametrize("offset", [0, 2**33, 2**61], ids=["narrow", "wide", "too wide to pack"])
@pytest.mark.parametrize("sizes", [(0, 3, 30), (30, 0, 0), (0, 0, 20), (0, 0, 0)])
def test_merging_ascending_pieces_finds_what_sorting_finds(offset: int, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    pieces = [np.unique(rng.integers(0, 40, size)) + offset for size in sizes]
    keys = np.concatenate([*pieces, *reversed(pieces)])
    first = sum(map(len, pieces))
    for part, merged in zip((keys[:first], keys[first:]), merge_pieces(keys, offset + 40, first), strict=True):
        found = find_occurrences(part, offset + 40)
        assert np.array_equal(found.keys[found.inverse], part)
        for name in ("keys", "offsets", "order"):
            assert np.array_equal(getattr(found, name), getattr(merged, name)), name


def test_numbers_that_all_share_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        count_up(5)[0] = 1


def test_numbers_that_all_share_are_enough_whatever_another_thread_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(np.ndarray):  # by a thread that needs fewer, once its length is known
        def __len__(self) -> int:
            forms._counted = np.arange(2)
            return super().__len__()

    monkeypatch.setattr(forms, "_counted", np.arange(100).view(Replaced))
    assert count_up(50).tolist() == list(range(50))
