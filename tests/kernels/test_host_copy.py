"""Byte ranges from anywhere in host memory."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels import gather_ranges, host_copy


def gathered(memory: torch.Tensor, ranges: list[tuple[int, int]]) -> bytes:
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    sizes = np.array([size for _, size in ranges], dtype=np.int64)
    result = gather_ranges(memory.data_ptr() + starts, sizes)
    assert result.dtype == torch.uint8
    assert result.shape == (int(sizes.sum()),)
    return bytes(result.numpy())


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 0)],
        [(5, 0), (900, 0), (0, 0)],
        [(3, 10)],
        [(0, 1000)],
        [(1, 999), (0, 1), (500, 0), (999, 1)],
        [(4, 8), (6, 8), (4, 8), (0, 20)],
        [(990, 10), (3, 7), (500, 1), (500, 1), (0, 0)],
        [(i % 977, i % 3) for i in range(2000)],
        [(7, 1)] * 5 + [(0, 1000)],
    ],
    ids=lambda ranges: f"{len(ranges)} ranges",
)
def test_ranges_come_out_in_order(ranges: list[tuple[int, int]]) -> None:
    memory = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    whole = bytes(memory.numpy())
    assert gathered(memory, ranges) == b"".join(whole[start : start + size] for start, size in ranges)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=60))
def test_any_ranges_come_out_in_order(ranges: list[tuple[int, int]]) -> None:
    memory = torch.arange(500).to(torch.uint8)
    whole = bytes(memory.numpy())
    assert gathered(memory, ranges) == b"".join(whole[start : start + size] for start, size in ranges)


def test_ranges_of_several_buffers_come_out_in_order() -> None:
    buffers = [torch.full((9,), value, dtype=torch.int32) for value in range(40)]
    addresses = np.array([buffer.data_ptr() for buffer in reversed(buffers)])
    result = gather_ranges(addresses, np.full(40, 36)).view(torch.int32)
    assert torch.equal(result, torch.arange(39, -1, -1, dtype=torch.int32).repeat_interleave(9))


def test_the_result_owns_aligned_memory() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    result = gather_ranges(memory.data_ptr() + np.array([1]), np.array([50]))
    memory.zero_()
    assert result.tolist() == list(range(1, 51))
    assert result.data_ptr() % 64 == 0
    result += 1


def test_other_threads_run_meanwhile() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    addresses, sizes = memory.data_ptr() + np.zeros(400, dtype=np.int64), np.full(400, 1 << 20)
    calls, ticks = [0], dict[int, int]()
    enough = threading.Event()

    def copy() -> None:
        while not enough.is_set():
            calls[0] += 1
            gather_ranges(addresses, sizes)

    copier = threading.Thread(target=copy)
    copier.start()
    deadline = time.monotonic() + 60
    # 400 MB take some 100 ms; a thread that had to wait for a call to end would tick once or twice in each.
    while max(ticks.values(), default=0) <= 10 and time.monotonic() < deadline:
        ticks[calls[0]] = ticks.get(calls[0], 0) + 1
        time.sleep(0.001)
    enough.set()
    copier.join(60)
    assert max(ticks.values()) > 10, ticks


def test_threads_that_gather_at_once_get_their_own_ranges() -> None:
    """What Arrow is told of is written anew for each call, while the call of another thread may be under way."""
    num_threads, size = 4, 1 << 16
    failed: list[int] = []

    def gather_again_and_again(number: int) -> None:
        memory = torch.full((size,), number, dtype=torch.uint8)
        random = np.random.default_rng(number)
        for _ in range(60):
            sizes = random.integers(0, 2000, 300)
            starts = random.integers(0, size - 2000, 300)
            result = gather_ranges(memory.data_ptr() + starts, sizes)
            if len(result) != sizes.sum() or not bool((result == number).all()):
                failed.append(number)

    threads = [threading.Thread(target=gather_again_and_again, args=(n + 1,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


def test_ranges_beyond_what_is_kept_do_not_stay_in_memory() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    many = 3 * host_copy._MANY
    result = gather_ranges(np.full(many, memory.data_ptr() + 5), np.ones(many, np.int64))
    assert torch.equal(result, torch.full((many,), 5, dtype=torch.uint8))
    assert host_copy._kept.ranges is None
    assert bytes(gather_ranges(memory.data_ptr() + np.array([3, 1]), np.array([2, 1])).numpy()) == b"\x03\x04\x01"
    kept = host_copy._kept.ranges
    gather_ranges(memory.data_ptr() + np.array([3, 1]), np.array([2, 1]))
    assert host_copy._kept.ranges is kept is not None
