"""Rows of 4 and 8 bytes in many ranges, which have a kernel of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.kernels import dispatch_ranges, reference

DTYPES = [(torch.int32,), (torch.int64,), (torch.float64, torch.float32)]


@pytest.fixture(params=["32 bits", "64 bits"])
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What numbers the rows; few ranges count as many, and few rows fill several pieces of several programs."""
    copy_narrow = pytest.importorskip("freescale.kernels.copy_narrow", reason="triton is not installed")
    monkeypatch.setattr("freescale.kernels.copy_ranges.SCANNED_SIZES", (0,))
    monkeypatch.setattr("freescale.kernels.copy_ranges.SHORTEST", 0)
    monkeypatch.setattr(copy_narrow, "layout_of", lambda *_, gather: copy_narrow.Layout(128, 2 + gather, 2, 8))
    if request.param == "64 bits":
        monkeypatch.setattr(copy_narrow, "_REACH", 0)


def lengths_of(kind: str) -> Tensor:
    lengths = torch.randint(0, 40, (42,), generator=torch.Generator().manual_seed(3))
    if kind == "giant":
        lengths[20] = 700
    if kind == "empty ones":
        lengths[:15], lengths[-7:] = 0, 0
    return lengths


def ids(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(1, 2**20, (count,), generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize("kind", ["giant", "empty ones"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: " and ".join(str(dtype) for dtype in dtypes))
def test_ids_of_many_ranges_move(launched: Any, dtypes: tuple[torch.dtype, ...], kind: str) -> None:
    lengths = lengths_of(kind)
    order = torch.randperm(42, generator=torch.Generator().manual_seed(4))
    total = int(lengths.sum())
    tensors = [ids(total, dtype) for dtype in dtypes]
    starts, sizes = (lengths.cumsum(0) - lengths)[order], lengths[order]
    right = [reference.dispatch_ranges(tensor, starts, sizes) for tensor in tensors]
    moved, moved_lengths = launched.run("permute_jagged", tensors, lengths, order, total)
    assert torch.equal(moved_lengths, sizes)
    sent = launched.run("dispatch_ranges", tensors, starts.int(), sizes, total)
    back = launched.run("combine_ranges", sent, starts, sizes, total)
    for i, tensor in enumerate(tensors):
        assert torch.equal(moved[i], right[i])
        assert torch.equal(sent[i], right[i])
        assert torch.equal(back[i], tensor)
    turned, _ = launched.run("transpose_keyed", tensors, lengths.view(6, 7))
    assert torch.equal(turned[0], reference.transpose_keyed(tensors[0], lengths.view(6, 7))[0])


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize("wild", [-7, -(2**33), 2**32, 2**62])
def test_places_outside_harm_nothing(launched: Any, wild: int) -> None:
    """Also those that are inside again when their upper half is forgotten."""
    lengths = lengths_of("giant")
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    values = ids(total, torch.int32)
    lost = torch.arange(42) % 7 == 4
    assert int(lengths[lost].sum())
    (combined,) = launched.run("combine_ranges", [values], torch.where(lost, starts + wild, starts), lengths, 2 * total)
    kept = torch.repeat_interleave(~lost, lengths)
    inside = int((starts[lost] + wild >= 0).sum()) if wild < 0 else 0
    if not inside:  # no lost piece reaches into the result
        assert torch.equal(combined[:total], torch.where(kept, values, 0))
        assert not combined[total:].any()
    (gathered,) = launched.run("dispatch_ranges", [values], torch.where(lost, starts + wild, starts), lengths, total)
    assert torch.equal(gathered[kept], values[kept])


@pytest.mark.gpu
def test_ids_beyond_two_to_the_31_rows_are_addressed() -> None:
    size = 2**31 + 65536
    values = torch.empty(size, dtype=torch.int32, device="cuda")
    values[-65536:] = torch.arange(65536, device="cuda")
    starts = torch.arange(size - 65536, size, 64, device="cuda").flip(0)
    moved = dispatch_ranges(values, starts, torch.full_like(starts, 64), 65536)
    assert torch.equal(moved.view(-1, 64).flip(0).reshape(-1), values[-65536:])
