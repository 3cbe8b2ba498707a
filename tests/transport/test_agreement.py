"""Whatever a peer says about an exchange, it is an agreement or an error, and then nothing moves between the two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.transport import TransportError, local_group
from freescale.transport.agreement import find_disagreements, make_records
from freescale.transport.exchange import plan_all_to_all

WORDS = st.one_of(st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 7, 2**31, 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))
RANK, WORLD_SIZE, SEQUENCE = 1, 3, 7


LIES = st.lists(st.tuples(st.sampled_from([0, 2]), st.integers(0, 4), WORDS), max_size=10)  # peer, field, value


@given(LIES)
def test_records_with_any_numbers_are_an_agreement_or_an_error(lies: list[tuple[int, int, int]]) -> None:
    exchange = plan_all_to_all(RANK, WORLD_SIZE, torch.zeros(6), [1, 2, 3], [4, 2, 5], None)
    mine = make_records(exchange, SEQUENCE)
    agreed = mine[:, [0, 1, 3, 2, 4]]  # what the others say when all is well: they expect what this rank sends
    theirs = agreed.copy()
    for peer, field, value in lies:
        theirs[peer, field] = value
    sent, received = exchange.sent_bytes.copy(), exchange.received_bytes.copy()
    error = find_disagreements(exchange, mine, theirs)
    liars = [peer for peer in range(WORLD_SIZE) if tuple(theirs[peer]) != tuple(agreed[peer])]
    assert (error is not None) == bool(liars)
    assert error is None or (isinstance(error, TransportError) and f"rank {RANK}" in str(error))
    for peer in range(WORLD_SIZE):
        moved = exchange.sent_bytes[peer], exchange.received_bytes[peer]
        assert moved == ((0, 0) if peer in liars else (sent[peer], received[peer])), peer
    assert exchange.incomplete == bool(liars)


@pytest.mark.parametrize("name", ["", "x" * 65, "é" * 33])
def test_names_of_channels_that_others_could_not_be_told_are_refused(name: str) -> None:
    (alone,) = local_group(1)
    with pytest.raises(ValueError, match=r"name of a channel must have 1 to 64 bytes of UTF-8"):
        alone.channel(name)
