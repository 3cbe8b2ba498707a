"""A peer that lies to the tables, and states with anything in them: an error, or believed; no crash and no hang."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.embedding import EmbeddingError, PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
from freescale.transport import Transport, TransportError, connect

from hostile_peer import EXTREMES, HostilePeer, Lie
from rank_threads import run_in_threads

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
WORDS = st.sampled_from(EXTREMES) | st.integers(0, 50)
LIES = st.lists(
    st.builds(Lie, message=st.integers(0, 30), at=st.floats(0, 1), word=st.none() | WORDS, bit=st.integers(0, 7)),
    min_size=1,
    max_size=3,
)
HEARD = (EmbeddingError, TransportError, IndexError)


def train(transport: Transport, steps: int = 4) -> None:
    tables = PrioritizedEmbeddingCollection([Table("item", 20, 2)], transport, optimizer=RowwiseAdagrad(lr=0.1))
    batches = [{"item": (torch.arange(6) * (3 + step) + transport.rank) % 20} for step in range(steps)]
    try:
        for step, batch in enumerate(batches):
            if step + 1 < steps:
                tables.prefetch(batches[step + 1])
            tables(batch)["item"].sum().backward()
        tables.flush()
    finally:
        tables.close()


@settings(PATIENT, max_examples=60)
@given(lies=LIES)
def test_a_peer_that_lies_about_ids_is_an_error_or_believed(lies: list[Lie]) -> None:
    def run(transport: Transport) -> None:
        if transport.rank == 1:
            with contextlib.suppress(Exception):  # it hears its own lies, and may choke on them
                train(HostilePeer(transport, lies))
        else:
            with contextlib.suppress(*HEARD):
                train(transport)
        transport.close()

    run_in_threads(2, run, timeout_s=4)


def test_a_call_of_a_kind_that_is_not_known_is_an_error_that_names_the_rank() -> None:
    lies = [Lie(0, 0.0, 99)]

    def run(transport: Transport) -> str:
        with pytest.raises(EmbeddingError) as caught:
            train(HostilePeer(transport, lies) if transport.rank == 1 else transport)
        return str(caught.value)

    heard, _ = run_in_threads(2, run, timeout_s=60)
    assert "rank 1 at a call of kind 99" in heard


@settings(PATIENT, max_examples=150)
@given(data=st.data())
def test_states_of_an_optimizer_with_anything_in_them_are_loaded_or_refused(data: st.DataObject) -> None:
    tables = PrioritizedEmbeddingCollection([Table("item", 6, 2)], connect("local"), optimizer=RowwiseAdagrad(lr=0.1))
    state = tables.fused_optimizer.state_dict()
    with contextlib.suppress(ValueError, TypeError):
        tables.fused_optimizer.load_state_dict(changed(state, data))
    tables.close()


def changed(value: Any, data: st.DataObject) -> Any:
    """A nest with one place, anywhere, replaced by something else."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value, key=str)))
        return {**value, key: changed(value[key], data)}
    junk: list[Any] = [None, -1, "x", [], {}, 1e308, torch.zeros(3), torch.zeros(6, 9), np.zeros(2), object()]
    return data.draw(st.sampled_from(junk))
