"""Rounds of staging: all bytes, each once, at places that both sides agree on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.transport.rounds import HEADER_BYTES, lay_out_round, lay_out_rounds, num_rounds


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    st.integers(1, 12),
)
def test_both_sides_lay_out_the_same_bytes(bytes_: list[list[int]], chunk_bytes: int) -> None:
    matrix = np.array(bytes_, dtype=np.int64)
    np.fill_diagonal(matrix, 0)
    n = len(matrix)
    total = max(num_rounds(matrix[rank], matrix[:, rank], chunk_bytes) for rank in range(n))
    covered = np.zeros_like(matrix)
    for number in range(total):
        layouts = [lay_out_round(number, matrix[rank], matrix[:, rank], rank, chunk_bytes) for rank in range(n)]
        for a in range(n):
            for b in range(n):
                assert (
                    layouts[a].sent_splits[b]
                    == layouts[b].received_splits[a]
                    == (0 if a == b else layouts[a].sent_splits[b])
                )
                sent = [(p.start, p.size) for p in layouts[a].sends if p.peer == b]
                assert sent == [(p.start, p.size) for p in layouts[b].receives if p.peer == a]
                for start, size in sent:
                    assert start == covered[a, b]
                    covered[a, b] += size
    assert (covered == matrix).all()


def test_pieces_lie_behind_their_headers_and_do_not_overlap() -> None:
    bytes_ = np.array([9, 0, 4, 20])
    layout, *_ = lay_out_rounds(bytes_, bytes_, 0, 8)
    assert [(p.peer, p.slot_at, p.size) for p in layout.sends] == [
        (2, 2 * HEADER_BYTES, 4),
        (3, 3 * HEADER_BYTES + 4, 8),
    ]
    assert layout.sent_splits.tolist() == [0, 8, 12, 16]
