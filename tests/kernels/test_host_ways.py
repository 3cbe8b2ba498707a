"""On the host, torch copies very few ranges, NumPy few rows; FBGEMM and Arrow all others. None may differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from freescale.kernels import (
    combine_ranges,
    dispatch_ranges,
    host_fbgemm,
    host_jagged,
    ops,
    permute_jagged,
    reference,
    transpose_keyed,
)
from freescale.kernels.host_checks import Integers


@pytest.fixture(params=[True, False], ids=["fbgemm", "without"])
def fbgemm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed")
        monkeypatch.setattr(host_jagged, "_UNWOVEN", 0)
    monkeypatch.setattr(host_fbgemm, "is_loaded", lambda: request.param)


def lengths_of(count: int, most: int) -> Tensor:
    return torch.randint(0, most + 1, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize(("count", "most"), [(1, 9), (4, 9), (5, 9), (6000, 1), (6000, 3), (40, 900)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.int64),
        ((), torch.float64),
        ((), torch.bool),
        ((), torch.complex64),
        ((), torch.bfloat16),
        ((3,), torch.float32),
        ((4,), torch.int64),
        ((0,), torch.int32),
        ((), torch.complex128),
    ],
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
        assert result.data_ptr() != values.data_ptr() or not values.numel()


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("count", "most"), [(4, 9), (40, 9), (5000, 1), (40, 900)])
def test_types_that_torch_does_not_index_move_too(dtype: torch.dtype, count: int, most: int) -> None:
    lengths = lengths_of(count, most)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(int(lengths.sum()) * dtype.itemsize).to(torch.uint8)
    moved, _ = permute_jagged(numbers.view(dtype), lengths, order)
    right, _ = reference.permute_jagged(numbers.view(-1, dtype.itemsize), lengths, order)
    assert moved.dtype == dtype
    assert torch.equal(moved.view(torch.uint8), right.view(-1))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("most", [9, 900])
def test_values_that_could_have_gradients_move_where_none_are_asked_for(most: int) -> None:
    lengths = lengths_of(40, most)
    values = torch.nn.Parameter(torch.randn(int(lengths.sum()), 2))
    with torch.no_grad():
        moved, _ = permute_jagged(values, lengths, torch.arange(40).flip(0))
    assert not moved.requires_grad
    assert torch.equal(moved, reference.permute_jagged(values.detach(), lengths, torch.arange(40).flip(0))[0])
    again, _ = permute_jagged(values, lengths, torch.arange(40).flip(0))
    assert again.requires_grad
    assert torch.equal(again, moved)
    (plain,), _ = torch.ops.freescale.permute_jagged.plain([values], lengths, torch.arange(40).flip(0), None)
    assert torch.equal(plain, moved)


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("count", [3, 40])
def test_values_may_be_resized_afterwards(count: int, dtype: torch.dtype) -> None:
    """A trainer that shards parameters frees their memory so, between steps."""
    values = torch.zeros(10 * count, 3, dtype=dtype)
    permute_jagged(values, torch.full((count,), 10), torch.arange(count).flip(0))
    values.untyped_storage().resize_(0)
    assert values.untyped_storage().nbytes() == 0


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("count", [3, 40])
def test_ranges_overlap_and_go_back(count: int) -> None:
    """What FBGEMM leaves out between two ranges is then shorter than nothing."""
    generator = torch.Generator().manual_seed(count)
    starts, sizes = torch.randint(0, 50, (count,), generator=generator), lengths_of(count, 50)
    values = torch.arange(100)
    assert torch.equal(dispatch_ranges(values, starts, sizes), reference.dispatch_ranges(values, starts, sizes))


@pytest.mark.parametrize("count", [4000, 4100])
def test_few_rows_are_not_woven_for_fbgemm(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed")
    monkeypatch.setattr(host_fbgemm, "is_loaded", lambda: True)
    woven: list[int] = []
    genuine = host_fbgemm.stretches

    def counted(*arguments: Integers) -> Tensor:
        woven.append(len(arguments[0]))
        return genuine(*arguments)

    monkeypatch.setattr(host_fbgemm, "stretches", counted)
    starts, sizes, values = torch.arange(10).flip(0) * 9, torch.full((10,), count // 10), torch.arange(9 * 9 + count)
    assert torch.equal(dispatch_ranges(values, starts, sizes), reference.dispatch_ranges(values, starts, sizes))
    assert woven == [10] * (count > 4096)


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("rows", [[0, 7], [-1, 0], [6], [2**40], [-9, 3], [-(2**63)]], ids=str)
def test_rows_that_are_not_there_are_named(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"rows must be from 0 to 5, got {min(rows)} to {max(rows)}"):
        permute_jagged(torch.arange(6), torch.ones(6, dtype=torch.int64), torch.tensor(rows))


@pytest.mark.usefixtures("fbgemm")
def test_lengths_that_are_told_are_right_whatever_tells_them() -> None:
    """FBGEMM tells them for rows of its own types, not for wider ones, whose lengths it is given in words."""
    lengths, order = lengths_of(40, 9).int(), torch.arange(40).flip(0)[1:].int()
    total = int(lengths.sum())
    for values in ([torch.arange(total)], [torch.ones(total, 3)], [torch.ones(total, 3), torch.arange(total)]):
        told = permute_jagged(values, lengths, order)[1]
        assert told.dtype == torch.int32
        assert torch.equal(told, lengths[order])
        turned = transpose_keyed(values, lengths.view(4, 10))[1]
        assert torch.equal(turned, lengths.view(4, 10).t())
        assert turned.is_contiguous()


@pytest.mark.usefixtures("fbgemm")
def test_integers_may_lie_apart() -> None:
    """Every other one of more; also the rows of a transposed matrix."""
    values = torch.arange(90)
    lengths, order = torch.full((18,), 10)[::2], torch.arange(18).flip(0)[1::2] // 2
    assert torch.equal(permute_jagged(values, lengths, order)[0], values.view(9, 10)[order].view(-1))
    apart = lengths_of(12, 9).view(3, 4).t()
    values = torch.arange(int(apart.sum()))
    assert torch.equal(transpose_keyed(values, apart)[0], reference.transpose_keyed(values, apart)[0])


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
    moved, told = permute_jagged(values, lengths, torch.tensor([7, 4, 0])[:2])
    assert moved.tolist() == [*range(24, 32), *range(8)]
    assert told.dtype == torch.int32
    assert told.tolist() == [8, 8]


@pytest.mark.parametrize("shape", [(1, 50), (50, 1)], ids=str)
@pytest.mark.parametrize("values", [torch.zeros(50, 2), torch.zeros(50, dtype=torch.float64), torch.zeros(50).long()])
def test_transposed_lengths_are_not_those_that_were_given(shape: tuple[int, int], values: torch.Tensor) -> None:
    lengths = torch.ones(shape, dtype=torch.int64)
    transpose_keyed(values, lengths)[1].add_(1)
    assert torch.equal(lengths, torch.ones(shape, dtype=torch.int64))


def test_sums_of_pieces_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths must add up to the rows of values \(6\), got 50000000"):
        ops.sum_ranges([torch.arange(6)], torch.tensor([0]), torch.tensor([50_000_000]), 6)
    with pytest.raises(ValueError, match=r"within size \(6\), got \[3, 9\)"):
        ops.sum_ranges([torch.arange(6)], torch.tensor([3]), torch.tensor([6]), 6)


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("total", [0, 14, 16, 2**40])
def test_a_wrong_total_is_refused_whatever_copies(total: int) -> None:
    with pytest.raises(ValueError, match=rf"total must be the sum of the lengths \(15\), got {total}"):
        permute_jagged(torch.arange(15), torch.arange(6), torch.arange(6).flip(0), total)


@pytest.mark.usefixtures("fbgemm")
def test_every_second_number_is_a_number_too() -> None:
    lengths, order, values = lengths_of(80, 9)[::2], torch.arange(80).flip(0)[1::2] // 2, torch.arange(1000)
    ids = values[: 2 * int(lengths.sum()) : 2]
    right = reference.permute_jagged(ids, lengths, order)
    for ints in (torch.int32, torch.int64):
        moved, moved_lengths = permute_jagged(ids, lengths.to(ints), order.to(ints))
        assert torch.equal(moved, right[0])
        assert torch.equal(moved_lengths, right[1].to(ints))
        turned, turned_lengths = transpose_keyed(ids, lengths.to(ints).view(5, 8).t())
        assert torch.equal(turned, reference.transpose_keyed(ids, lengths.view(5, 8).t())[0])
        assert torch.equal(turned_lengths, lengths.view(5, 8).to(ints))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("seed", range(6))
def test_empty_pieces_lie_anywhere_among_those_that_cover_everything(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (30,), generator=generator)
    starts, order = lengths.cumsum(0) - lengths, torch.randperm(30, generator=generator)
    size = int(lengths.sum())
    if seed % 2:  # some at places of others, in their midst as well
        starts[lengths == 0] = torch.randint(0, size + 1, (int((lengths == 0).sum()),), generator=generator)
    values = torch.arange(size)
    combined = combine_ranges(values, starts[order], lengths[order], size)
    assert torch.equal(combined, reference.combine_ranges(values, starts[order], lengths[order], size))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("starts", [[0, 3, 3], [0, 2, 5], [1, 4, 0], [0, 3, 2**63 - 2], [-(2**63), 3, 6]], ids=str)
def test_pieces_that_do_not_fit_together_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must not overlap|must stay within size \(9\)"):
        combine_ranges(torch.arange(9), torch.tensor(starts), torch.tensor([3, 3, 3]), 9)


@pytest.mark.usefixtures("fbgemm")
def test_what_inference_leaves_behind_serves_training() -> None:
    lengths, order = torch.full((23,), 2), torch.arange(23).flip(0)
    with torch.inference_mode():
        permute_jagged(torch.arange(46), lengths, order)
    values = torch.randn(46, requires_grad=True)
    moved, _ = permute_jagged(values, lengths, order)
    moved.backward(torch.arange(46.0))
    assert torch.equal(values.grad, torch.arange(46.0).view(23, 2).flip(0).reshape(-1))  # type: ignore[arg-type]
