"""Lists of byte ranges are copied together, and what is kept of them keeps little else alive."""

import numpy as np
import pytest
import torch

from freescale.kernels import host_copy
from freescale.kernels.host_copy import gather_parts, gather_ranges


@pytest.mark.parametrize("most_together", [0, 1 << 20])
def test_parts_are_what_each_would_be_alone(most_together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_MOST_TOGETHER", most_together)
    random = np.random.default_rng(0)
    source = torch.from_numpy(random.integers(0, 256, 4096, dtype=np.uint8))
    dtypes = [torch.int64, torch.int8, torch.bfloat16, torch.int32]
    for _ in range(20):
        sizes = 8 * random.integers(0, 9, (len(dtypes), 7))
        sizes[random.integers(len(dtypes))] = 0
        addresses = source.data_ptr() + 8 * random.integers(0, 500, sizes.shape)
        parts = gather_parts(addresses, sizes, dtypes)
        for part, at, size, dtype in zip(parts, addresses, sizes, dtypes, strict=True):
            assert part.dtype == dtype
            assert torch.equal(part.view(torch.uint8), gather_ranges(at, size))


def test_a_small_part_is_copied_out_of_the_common_buffer() -> None:
    source = torch.arange(1000)
    addresses, sizes = np.full((3, 1), source.data_ptr()), np.array([[8000], [4000], [80]])
    first, second, small = gather_parts(addresses, sizes, [torch.int64] * 3)
    assert first.data_ptr() + 8000 == second.data_ptr()  # both lie in the buffer, at multiples of 64 bytes
    assert not 0 <= small.data_ptr() - first.data_ptr() < 12160
    assert torch.equal(small, source[:10])
