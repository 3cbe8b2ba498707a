"""What a report says that moved, against sums by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.balancer.report import Traffic


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**31), st.integers(0, 12))
def test_traffic_is_the_sum_over_the_samples_of_a_plan(world_size: int, seed: int, num_samples: int) -> None:
    random = np.random.default_rng(seed)
    origin = np.sort(random.integers(world_size, size=num_samples))
    owners = random.integers(world_size, size=num_samples)
    lengths, payload = random.integers(1 << 40, size=(2, num_samples))
    samples = list(zip(origin.tolist(), owners.tolist(), lengths.tolist(), payload.tolist(), strict=True))
    for rank in range(world_size):
        first, last = np.searchsorted(origin, [rank, rank + 1]).tolist()
        traffic = Traffic.of(rank, world_size, origin, owners, lengths, payload, slice(first, last))
        for peer in range(world_size):
            assert traffic.tokens_before[peer] == sum(n for o, _, n, _ in samples if o == peer)
            assert traffic.tokens_after[peer] == sum(n for _, to, n, _ in samples if to == peer)
            assert traffic.payload[peer] == sum(size for o, _, _, size in samples if o == peer)
            assert traffic.sent[peer] == sum(size for o, to, _, size in samples if o == peer != to)
            assert traffic.received[peer] == sum(size for o, to, _, size in samples if to == peer != o)
            assert traffic.batch_sizes[peer] == sum(to == peer for _, to, _, _ in samples)
            to = [size for o, owner, _, size in samples if (o, owner) == (rank, peer)]
            source = [size for o, owner, _, size in samples if (o, owner) == (peer, rank)]
            assert traffic.pair_bytes[:, peer].tolist() == [sum(to), sum(source)]
            assert traffic.pair_samples[:, peer].tolist() == [len(to), len(source)]
