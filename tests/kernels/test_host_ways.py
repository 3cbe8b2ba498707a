"""On the host, torch copies very few ranges and very short ones; FBGEMM and Arrow all others. None may differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from freescale.kernels import combine_ranges, dispatch_ranges, host_fbgemm, permute_jagged, reference, transpose_keyed


@pytest.fixture(params=[True, False], ids=["fbgemm", "without"])
def fbgemm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed")
    monkeypatch.setattr(host_fbgemm, "is_loaded", lambda: request.param)


def lengths_of(count: int, most: int) -> Tensor:
    return torch.randint(0, most + 1, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize(("count", "most"), [(1, 9), (4, 9), (5, 9), (6000, 1), (6000, 3)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.int64), ((), torch.float64), ((), torch.bool), ((), torch.complex64), ((3,), torch.float32)],
    ids=str,
)
def test_every_way_copies_the_same_rows(shape: tuple[int, ...], dtype: torch.dtype, count: int, most: int) -> None:
    lengths = lengths_of(count, most)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    values = torch.randint(0, 99, (int(lengths.sum()), *shape), generator=torch.Generator().manual_seed(2)).to(dtype)
    starts, sizes = (lengths.cumsum(0) - lengths)[order], lengths[order]
    right = reference.dispatch_ranges(values, starts, sizes)
    moved, moved_lengths = permute_jagged(values, lengths, order)
    sent = dispatch_ranges(values, starts, sizes)
    turned, turned_lengths = transpose_keyed(values, lengths.view(1, -1))
    assert torch.equal(moved, right)
    assert torch.equal(moved_lengths, sizes)
    assert torch.equal(sent, right)
    assert torch.equal(combine_ranges(sent, starts, sizes, len(values)), values)
    assert torch.equal(turned, values)
    assert torch.equal(turned_lengths, lengths.view(-1, 1))
    for result in (moved, sent, turned):
        assert result.data_ptr() != values.data_ptr() or not len(values)


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("count", [3, 40])
def test_ranges_overlap_and_go_back(count: int) -> None:
    """What FBGEMM leaves out between two ranges is then shorter than nothing."""
    generator = torch.Generator().manual_seed(count)
    starts, sizes = torch.randint(0, 50, (count,), generator=generator), lengths_of(count, 50)
    values = torch.arange(100)
    assert torch.equal(dispatch_ranges(values, starts, sizes), reference.dispatch_ranges(values, starts, sizes))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("rows", [[0, 7], [-1, 0], [6], [2**40]], ids=str)
def test_rows_that_are_not_there_are_named(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"rows must be from 0 to 5, got {min(rows)} to {max(rows)}"):
        permute_jagged(torch.arange(6), torch.ones(6, dtype=torch.int64), torch.tensor(rows))


@pytest.mark.usefixtures("fbgemm")
def test_memory_may_begin_anywhere() -> None:
    """Rows of 8 bytes at a multiple of 8, but not counted from where their storage begins."""
    memory = np.arange(84, dtype=np.float32)
    skipped = 1 + memory.ctypes.data % 8 // 4
    values = torch.from_numpy(memory[skipped:])[1:].view(-1, 2)[:40]
    lengths, order = torch.full((8,), 5), torch.arange(8).flip(0)
    right = reference.permute_jagged(values.clone(), lengths, order)[0]
    assert torch.equal(permute_jagged(values, lengths, order)[0], right)


@pytest.mark.usefixtures("fbgemm")
def test_lengths_of_32_bits_may_add_up_to_more(tmp_path: Path) -> None:
    size = 2**31 + 64  # rows of a file with a hole, which takes no memory
    values = torch.from_file(str(tmp_path / "rows"), shared=True, size=size, dtype=torch.float32)
    values[-32:] = torch.arange(32.0)
    lengths = torch.tensor([2**30, 2**30, 16, 16, 8, 8, 8, 8], dtype=torch.int32)
    moved, _ = permute_jagged(values, lengths, torch.tensor([7, 4, 0])[:2])
    assert moved.tolist() == [*range(24, 32), *range(8)]
