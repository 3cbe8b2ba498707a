"""Every path of every operation moves the very rows that plain Python moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.kernels import reference

# Shapes and dtypes of one row: 1 byte to several KiB, words of every width, widths that are no power of two.
ROWS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((), torch.uint8),
    ((), torch.bool),
    ((), torch.int64),
    ((3,), torch.int8),
    ((), torch.float16),
    ((5,), torch.bfloat16),
    ((3,), torch.float32),
    ((2, 2), torch.complex64),
    ((2,), torch.int64),
    ((128,), torch.float16),
    ((1100,), torch.float32),
    ((0,), torch.int32),
]
LENGTHS: dict[str, list[int]] = {
    "none": [],
    "one": [5],
    "all empty": [0, 0, 0],
    "empty at both ends": [0, 0, 4, 0, 0, 3, 0],
    "all of one row": [1] * 40,
    "one giant": [1, 2, 700, 0, 3],
    "many short": [i % 4 for i in range(300)],
}


def rows_of(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.randint(0, 120, (count, *shape), generator=torch.Generator().manual_seed(count))
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def shuffled(count: int, seed: int = 1) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def by_hand(values: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    pieces = [values[start : start + length] for start, length in ranges]
    return torch.cat([values[:0], *pieces])


def starts_of(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(result, expected)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("integers", [torch.int64, torch.int32], ids=str)
def test_permute_takes_rows_in_the_given_order(path: Any, lengths: list[int], integers: torch.dtype) -> None:
    sizes = torch.tensor(lengths, dtype=integers)
    order = torch.cat([shuffled(len(lengths)), shuffled(len(lengths), 2)[: len(lengths) // 2]])
    values = rows_of(sum(lengths), (), torch.int64)
    (moved,), moved_lengths = path.run("permute_jagged", [values], sizes, order.to(integers), None)
    begins = starts_of(sizes).tolist()
    assert_same(moved, by_hand(values, [(begins[row], lengths[row]) for row in order.tolist()]))
    assert_same(moved_lengths, torch.tensor([lengths[row] for row in order.tolist()], dtype=integers))


@pytest.mark.parametrize(("shape", "dtype"), ROWS, ids=str)
def test_rows_of_any_width_move(path: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    lengths = torch.tensor([2, 0, 9, 1, 30])
    values = rows_of(42, shape, dtype)
    order = torch.tensor([4, 0, 3, 1, 2])
    total = 42
    (moved,), _ = path.run("permute_jagged", [values], lengths, order, total)
    assert_same(moved, reference.permute_jagged(values, lengths, order)[0])
    (moved,) = path.run("dispatch_ranges", [values], torch.tensor([40, 3, 3]), torch.tensor([2, 5, 20]), 27)
    assert_same(moved, by_hand(values, [(40, 2), (3, 5), (3, 20)]))
    (moved,) = path.run("combine_ranges", [values], torch.tensor([60, 0, 1, 50, 20]), lengths, 62)
    assert_same(moved, reference.combine_ranges(values, torch.tensor([60, 0, 1, 50, 20]), lengths, 62))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("gap", [0, 3])
def test_combine_puts_pieces_in_their_places_and_zeros_between(path: Any, lengths: list[int], gap: int) -> None:
    sizes, order = torch.tensor(lengths, dtype=torch.int64), shuffled(len(lengths))
    starts = torch.zeros_like(sizes)
    starts[order] = starts_of(sizes[order] + gap) + gap
    size = sum(lengths) + gap * len(lengths)
    values = rows_of(sum(lengths), (2,), torch.int32) + 1
    (combined,) = path.run("combine_ranges", [values], starts, sizes, size)
    expected = torch.zeros(size, 2, dtype=torch.int32)
    for start, length, begin in zip(starts.tolist(), lengths, starts_of(sizes).tolist(), strict=True):
        expected[start : start + length] = values[begin : begin + length]
    assert_same(combined, expected)


@pytest.mark.parametrize("count", [1025, 9000, 40000])
def test_many_ranges_are_found(launched: Any, count: int) -> None:
    """Offsets of one block, of several, and from torch; searches of two steps and of three."""
    lengths = torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(count))
    order = shuffled(count)
    values = rows_of(int(lengths.sum()), (), torch.int32)
    (moved,), moved_lengths = launched.run("permute_jagged", [values], lengths, order, len(values))
    assert_same(moved, reference.permute_jagged(values, lengths, order)[0])
    assert_same(moved_lengths, lengths[order])
    few = order[:2000]
    total = int(lengths[few].sum())
    (moved,), _ = launched.run("permute_jagged", [values], lengths.int(), few.int(), total)
    assert_same(moved, reference.permute_jagged(values, lengths, few)[0])


@pytest.mark.parametrize(("count", "mean"), [(1, 5000), (3, 3000), (130, 90), (340, 40)])
@pytest.mark.parametrize("latent", [0, 2**40], ids=["by range", "by row"])
def test_few_ranges_are_scanned_inside_the_copy(
    launched: Any, count: int, mean: int, latent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freescale.kernels import copy_ranges

    monkeypatch.setattr(copy_ranges, "LATENT_BYTES", {4: latent, 8: latent})
    lengths = torch.randint(0, 2 * mean, (count,), generator=torch.Generator().manual_seed(count))
    order = torch.cat([shuffled(count), shuffled(count)[: count // 2]])
    tensors = [rows_of(int(lengths.sum()), (), dtype) for dtype in (torch.int32, torch.uint8)]
    moved, moved_lengths = launched.run("permute_jagged", tensors, lengths, order, int(lengths[order].sum()))
    for tensor, result in zip(tensors, moved, strict=True):
        assert_same(result, reference.permute_jagged(tensor, lengths, order)[0])
    assert_same(moved_lengths, lengths[order])


def test_many_short_ranges_beside_a_giant_one_are_walked(launched: Any) -> None:
    lengths = torch.cat([torch.arange(120) % 4, torch.tensor([9000])])
    order = torch.cat([shuffled(120), torch.tensor([120])])
    tensors = [rows_of(int(lengths.sum()), (), dtype) for dtype in (torch.int64, torch.int32)]
    moved, _ = launched.run("permute_jagged", tensors, lengths, order, len(tensors[0]))
    for tensor, result in zip(tensors, moved, strict=True):
        assert_same(result, reference.permute_jagged(tensor, lengths, order)[0])


@pytest.mark.parametrize("tile_bytes", [8192, 1024])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_many_bytes_move_range_by_range(
    launched: Any, dtype: torch.dtype, offsets: tuple[int, int], tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever runs begin and end between whole words, also beside the buffer's ends, and in several pieces."""
    from freescale.kernels import copy_ranges

    monkeypatch.setattr(copy_ranges, "LATENT_BYTES", {})
    monkeypatch.setattr(copy_ranges, "TILE_BYTES", tile_bytes)
    if tile_bytes < 8192:  # 700 rows are then several pieces of a program that copies as for many bytes
        monkeypatch.setattr(copy_ranges, "LARGE_BYTES", 0)
    lengths = torch.tensor([1, 2, 0, 3, 700, 1, 5, 8])
    order = torch.tensor([3, 7, 0, 4, 5, 1, 6, 2])
    whole = rows_of(offsets[0] + 720, (), dtype)
    values = (whole.cuda() if launched.device == "cuda" else whole)[offsets[0] :]
    (moved,), _ = launched.run("permute_jagged", [values], lengths, order, 720)
    assert_same(moved, reference.permute_jagged(whole[offsets[0] :], lengths, order)[0])
    starts = starts_of(lengths)[order] + offsets[1]
    (back,) = launched.run("combine_ranges", [moved], starts, lengths[order], 720 + offsets[1])
    assert_same(back[offsets[1] :], whole[offsets[0] :])


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 3), (4, 0), (0, 4), (1, 60), (60, 1)], ids=str)
def test_transpose_is_sample_major_and_undoes_itself(path: Any, shape: tuple[int, int]) -> None:
    lengths = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(3))
    values = rows_of(int(lengths.sum()), (3,), torch.int16)
    (moved,), turned = path.run("transpose_keyed", [values], lengths)
    begins = starts_of(lengths.flatten()).view(shape)
    cells = [(k, b) for b in range(shape[1]) for k in range(shape[0])]
    assert_same(moved, by_hand(values, [(int(begins[cell]), int(lengths[cell])) for cell in cells]))
    assert_same(turned, lengths.t().contiguous())
    (back,), lengths_back = path.run("transpose_keyed", [moved], turned)
    assert_same(back, values)
    assert_same(lengths_back, lengths)


def test_several_tensors_move_together(path: Any) -> None:
    lengths, order = torch.tensor([3, 0, 8, 1]), torch.tensor([2, 3, 0])
    tensors = [rows_of(12, shape, dtype) for shape, dtype in ROWS]
    moved, _ = path.run("permute_jagged", tensors, lengths, order, 12)
    for tensor, result in zip(tensors, moved, strict=True):
        assert_same(result, reference.permute_jagged(tensor, lengths, order)[0])


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 7, 8, 12])
def test_unaligned_tensors_move(path: Any, offset: int) -> None:
    lengths, order = torch.tensor([5, 9, 2]), torch.tensor([1, 2, 0])
    for shape, dtype in (((), torch.int8), ((), torch.int32), ((8,), torch.float16), ((6,), torch.float64)):
        whole = rows_of(offset + 16, shape, dtype)
        on_device = (whole.cuda() if path.device == "cuda" else whole)[offset:]
        (moved,), _ = path.run("permute_jagged", [on_device], lengths, order, 16)
        assert_same(moved, reference.permute_jagged(whole[offset:], lengths, order)[0])


def test_strided_tensors_move(path: Any) -> None:
    values = rows_of(12, (6,), torch.float32).t().contiguous().t()[:, ::2]
    starts = torch.tensor([9, 99, 0, 99, 2, 99])[::2]
    lengths = torch.tensor([[3, 1], [2, 1], [4, 1]])[:, 0]
    (moved,) = path.run("dispatch_ranges", [values], starts, lengths, None)
    assert_same(moved, by_hand(values, [(9, 3), (0, 2), (2, 4)]))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_gathers_and_scatters_equal_the_reference(path: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 90))
    start = st.integers(0, size)
    ranges = data.draw(st.lists(start.flatmap(lambda s: st.tuples(st.just(s), st.integers(0, size - s))), max_size=40))
    shape, dtype = data.draw(st.sampled_from(ROWS[:9]))
    starts = torch.tensor([s for s, _ in ranges], dtype=torch.int64)
    lengths = torch.tensor([n for _, n in ranges], dtype=torch.int64)
    values = rows_of(size, shape, dtype)
    (moved,) = path.run("dispatch_ranges", [values], starts, lengths, None)
    assert_same(moved, by_hand(values, ranges))
    assert_same(moved, reference.dispatch_ranges(values, starts, lengths))
    pieces = torch.randn(int(lengths.sum()), 3, generator=torch.Generator().manual_seed(size))
    (sums,) = path.run("sum_ranges", [pieces], starts, lengths, size)
    assert_same(sums, reference.sum_ranges(pieces, starts, lengths, size))


def test_the_reference_sums_in_the_order_of_starts() -> None:
    pieces = torch.tensor([1.0, 2.0, 9.0, 1e8, -1e8])  # row 1 gets 1, 1e8 and -1e8
    sums = reference.sum_ranges(pieces, torch.tensor([1, 0, 1]), torch.tensor([2, 2, 1]), 4)
    assert sums.tolist() == [9.0, (1e8 + 0.0) - 1e8, 2.0, 0.0]  # 1e8 + 1 is 1e8 in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64], ids=str)
def test_overlapping_pieces_are_summed_in_one_fixed_order(path: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 50, (60,), generator=generator)
    lengths = torch.randint(0, 30, (60,), generator=generator)
    pieces = torch.randn(int(lengths.sum()), 2, dtype=dtype, generator=generator)
    (sums,) = path.run("sum_ranges", [pieces], starts, lengths, 100)
    assert_same(sums, reference.sum_ranges(pieces, starts, lengths, 100))
    exact = torch.zeros(100, 2, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    exact.index_add_(0, reference.row_indices(starts, lengths), pieces.to(exact.dtype))
    torch.testing.assert_close(sums.to(exact.dtype), exact, rtol=1e-2 if dtype == torch.float16 else 1e-4, atol=1e-2)


def test_empty_pieces_at_one_start_do_not_hide_the_one_that_covers(path: Any) -> None:
    starts = torch.tensor([0, 2, 2, 2, 2, 0])
    lengths = torch.tensor([4, 0, 0, 0, 3, 0])
    (sums,) = path.run("sum_ranges", [torch.ones(7)], starts, lengths, 6)
    assert sums.tolist() == [1, 1, 2, 2, 1, 0]


def test_unwritten_results_would_show(path: Any) -> None:
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    try:
        values = torch.ones(900)
        (moved,) = path.run("dispatch_ranges", [values], torch.tensor([0, 5]), torch.tensor([895, 895]), 1790)
        (combined,) = path.run("combine_ranges", [values], torch.tensor([400, 0]), torch.tensor([500, 400]), 1000)
        (sums,) = path.run("sum_ranges", [values], torch.tensor([400, 0]), torch.tensor([500, 400]), 1000)
    finally:
        torch.use_deterministic_algorithms(False)
    assert moved.eq(1).all()
    assert combined.tolist() == [1.0] * 900 + [0.0] * 100
    assert sums.tolist() == combined.tolist()
