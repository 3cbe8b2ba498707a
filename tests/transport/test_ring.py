"""The schedules are what Figure 6 says, and chunks cover every byte once, whatever the size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.transport.ring import Stream, pairwise_receives, pairwise_sends, ring_receives, ring_sends

WORLDS = [1, 2, 3, 4, 5, 8, 64]


@pytest.mark.parametrize("world_size", WORLDS)
def test_around_the_ring_every_rank_gets_every_block_once_and_only_passes_on_what_it_has(world_size: int) -> None:
    has = [{rank} for rank in range(world_size)]
    for step in range(world_size - 1):
        moves = [((rank + 1) % world_size, ring_sends(rank, world_size)[step]) for rank in range(world_size)]
        assert all(block in has[rank] for rank, (_, block) in enumerate(moves))
        for receiver, block in moves:
            assert ring_receives(receiver, world_size)[step] == block
            assert block not in has[receiver]
            has[receiver].add(block)
    assert has == [set(range(world_size))] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_pairwise_every_step_is_a_permutation_and_both_sides_agree_on_it(world_size: int) -> None:
    for step in range(world_size - 1):
        receivers = [pairwise_sends(rank, world_size)[step] for rank in range(world_size)]
        assert sorted(receivers) == list(range(world_size))
        assert all(pairwise_receives(peer, world_size)[step] == rank for rank, peer in enumerate(receivers))
    for rank in range(world_size):
        assert sorted([rank, *pairwise_sends(rank, world_size)]) == list(range(world_size))


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 40))
def test_chunks_cover_every_byte_once_in_order(sizes: list[int], chunk_bytes: int) -> None:
    owners = [10 + i for i in range(len(sizes))]
    stream = Stream(owners, sizes, chunk_bytes)
    covered = [
        (c.owner, byte) for c in (stream[i] for i in range(len(stream))) for byte in range(c.start, c.start + c.size)
    ]
    assert covered == [(owner, byte) for owner, size in zip(owners, sizes, strict=True) for byte in range(size)]
    assert all(0 < stream[i].size <= chunk_bytes for i in range(len(stream)))
    with pytest.raises(IndexError):
        stream[len(stream)]


@pytest.mark.parametrize("chunk_bytes", [4096, 2**20, 2**23])
def test_chunks_of_more_than_2_gib_and_of_a_tebibyte_follow_each_other(chunk_bytes: int) -> None:
    sizes = [2**31 + 5, 3, 2**40 + 1]
    stream = Stream([0, 1, 2], sizes, chunk_bytes)
    counts = [-(-size // chunk_bytes) for size in sizes]
    assert len(stream) == sum(counts)
    edges = [0, counts[0] - 2, counts[0] - 1, counts[0], counts[0] + 1, len(stream) - 2, len(stream) - 1]
    for before, after in pairwise(edges):
        if after == before + 1 and stream[before].owner == stream[after].owner:
            assert stream[after].start == stream[before].start + stream[before].size
    assert stream[counts[0] - 1][1:] == ((counts[0] - 1) * chunk_bytes, (2**31 + 5 - 1) % chunk_bytes + 1)
    assert stream[counts[0]] == (1, 0, 3)
    assert stream[len(stream) - 1] == (2, (counts[2] - 1) * chunk_bytes, 2**40 % chunk_bytes + 1)
