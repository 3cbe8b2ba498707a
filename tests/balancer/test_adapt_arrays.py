"""Adapters of NumPy arrays and of tensors with a memory format: what goes in comes out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freescale.balancer import SchemaMismatch, balance
from freescale.balancer.adapters.adapt import adapter_for
from freescale.balancer.protocol.schema import Schema, describe_difference
from freescale.transport import Transport

from adapted_batches import ORDER, assert_same, moved, reordered, x
from rank_threads import run_in_threads

NUMPY = ["bool", "int8", "uint16", "uint64", "float16", "float64", "complex64", "datetime64[s]", "timedelta64[ns]"]


@pytest.mark.parametrize("dtype", NUMPY)
def test_arrays_come_back_as_arrays(dtype: str) -> None:
    array = np.arange(6).reshape(3, 2).astype(dtype)
    out = reordered({"a": array})["a"]
    assert_same(out, array[ORDER])


TIMES = ["datetime64[s]", "datetime64[ms]", "datetime64[25s]", "timedelta64[s]", "timedelta64[D]", "int64"]


@pytest.mark.parametrize("later", TIMES)
@pytest.mark.parametrize("first", TIMES)
@pytest.mark.parametrize("jagged", [{}, {"t": "n"}], ids=["dense", "jagged"])
def test_another_unit_of_time_is_refused_at_a_later_batch_and_on_another_rank(
    first: str, later: str, jagged: dict[str, str]
) -> None:
    def batch(dtype: str) -> dict[str, Any]:
        return {"t": np.arange(3).astype(dtype), "n": np.array([1, 0, 2])}

    adapter, peer = adapter_for(batch(first), jagged), adapter_for(batch(later), jagged)
    ours = Schema.of(adapter.flatten(batch(first)), adapter.describe())
    theirs = Schema.of(peer.flatten(batch(later)), peer.describe())
    assert (ours.digest == theirs.digest) == (first == later)
    if first == later:
        assert_same(adapter.restore(adapter.flatten(batch(later))), batch(later))
        return
    with pytest.raises(
        ValueError, match=re.escape(f"'t' is an array of {later}, in the first batch it was of {first}")
    ):
        adapter.flatten(batch(later))
    assert re.search(r"column 't: (date|time).*missing", describe_difference(0, ours, 1, theirs))
    none = {"t": np.array([], dtype=later), "n": np.array([], dtype=np.int64)}
    assert adapter.restore(adapter.flatten(none))["t"].dtype == np.dtype(first)


def test_ranks_with_two_units_of_time_say_so() -> None:
    def run(transport: Transport) -> list[Any]:
        unit = ["datetime64[s]", "datetime64[ms]"][transport.rank]
        return list(balance([{"t": np.arange(3).astype(unit), "n": x()}], transport, lengths="n"))

    with pytest.raises(SchemaMismatch, match=r"column 't: datetime64\[m?s\]' is"):
        run_in_threads(2, run)


def test_dates_go_to_ranks_and_to_one_that_never_had_a_batch() -> None:
    dates = np.array(["2020-01-01", "2021-02-03", "NaT", "1969-07-20"], dtype="datetime64[s]")

    def run(transport: Transport) -> list[Any]:
        mine = [] if transport.rank else [{"t": dates, "v": dates[:3], "n": torch.tensor([1, 0, 2, 0])}]
        loader = balance(mine, transport, "v", lambda world: torch.tensor([1, 0, 1, 0]), jagged={"v": "n"})
        return [[batch["t"], batch["v"]] for batch in loader]

    there, here = run_in_threads(2, run)
    assert_same([there, here], [[[dates[[1, 3]], dates[:0]]], [[dates[[0, 2]], dates[:3]]]])


@pytest.mark.parametrize("dtype", ["U1", "object", ">i8", "longdouble"])
def test_an_array_of_a_later_batch_that_is_no_plain_numbers_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(TypeError, match="field 'a' is an array of"):
        adapter_for({"a": np.arange(3)}).flatten({"a": np.arange(3).astype(dtype)})


def test_arrays_that_are_read_only_or_strided_are_taken() -> None:
    array = np.arange(6).reshape(2, 3).T
    array.flags.writeable = False
    assert_same(reordered(array), np.ascontiguousarray(array[ORDER]))


def images(batch_size: int, memory_format: torch.memory_format) -> Tensor:
    """Square, so that axes could be mistaken for each other."""
    return torch.arange(batch_size * 64).view(batch_size, 4, 4, 4).contiguous(memory_format=memory_format)


def test_memory_formats_are_kept() -> None:
    image = images(3, torch.channels_last)
    video = torch.arange(3 * 2 * 2 * 4 * 5).view(3, 2, 2, 4, 5).to(memory_format=torch.channels_last_3d)
    adapter = adapter_for([image, video])
    assert [adapter.schema[name].shape for name in "01"] == [(4, 4, 4), (2, 2, 4, 5)]
    out = reordered([image, video])
    assert_same(out, [moved(image), moved(video)])
    for back in (out, adapter.restore(adapter.flatten([image.contiguous(), video.contiguous()]))):
        assert back[0].is_contiguous(memory_format=torch.channels_last)
        assert back[1].is_contiguous(memory_format=torch.channels_last_3d)
    assert_same(adapter.restore(adapter.flatten([image.contiguous(), video.contiguous()])), [image, video])
    plain = adapter_for(image.contiguous())
    assert plain.restore(plain.flatten(image)).is_contiguous()


def test_the_memory_format_is_that_of_the_first_batch_with_samples() -> None:
    adapter = adapter_for({"image": images(0, torch.channels_last)})
    later = {"image": images(2, torch.channels_last)}
    out = adapter.restore(adapter.flatten(later))
    assert_same(out, later)
    assert out["image"].is_contiguous(memory_format=torch.channels_last)
    assert adapter.restore(adapter.flatten({"image": later["image"].contiguous()}))["image"].stride()[1] == 1


def test_a_later_shape_is_compared_as_it_is_whatever_the_memory_format() -> None:
    adapter = adapter_for({"image": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)})
    with pytest.raises(ValueError, match=r"field 'image' is dense float32 \[\*, 4, 5, 3\],.*was .*\[\*, 3, 4, 5\]"):
        adapter.flatten({"image": torch.zeros(2, 4, 5, 3)})


@pytest.mark.filterwarnings("ignore:ranks had .*loss_scale:UserWarning")
def test_ranks_may_have_images_in_different_memory_formats() -> None:
    formats = [torch.channels_last, torch.contiguous_format]

    def run(transport: Transport) -> list[Any]:
        sizes = (0, 3) if transport.rank else (3, 3)
        mine = [{"image": images(n, formats[transport.rank]), "n": torch.arange(n)} for n in sizes]
        loader = balance(mine, transport, "n", lambda world: (world.rank + 1) % 2)
        return [batch["image"] for batch in loader if len(batch["image"])]

    for rank, received in enumerate(run_in_threads(2, run)):
        for image in received:
            assert_same(image, images(3, torch.contiguous_format))
            assert image.is_contiguous(memory_format=formats[rank])
