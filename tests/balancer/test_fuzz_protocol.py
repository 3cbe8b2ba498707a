"""Whatever a peer sends, it is an error or taken as it is: no crash, no hang, no memory without bounds, no code run."""

from __future__ import annotations

import contextlib
import json
import resource
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.balancer import BalancerError, Column, JaggedBatch, ProtocolError, balance
from freescale.balancer.adapters.adapt import adapter_for, adapter_from
from freescale.balancer.batches.batch import JaggedBatch as Batch
from freescale.balancer.plan import WorldSamples, validate_plan
from freescale.balancer.protocol.header import LocalStep, State, WorldStep, encode, message_words
from freescale.balancer.protocol.payload import Sections, message_bytes, pack, unpack
from freescale.balancer.protocol.schema import Schema
from freescale.transport import Transport, TransportError

from hostile_peer import EXTREMES, HostilePeer, Lie
from rank_threads import run_in_threads

WORDS = st.sampled_from(EXTREMES) | st.integers(-(2**63), 2**63 - 1)
LIES = st.lists(
    st.builds(
        Lie,
        message=st.integers(0, 20),
        at=st.floats(0, 1),
        word=st.none() | WORDS,
        bit=st.integers(0, 7),
    ),
    min_size=1,
    max_size=3,
)
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def a_batch(rank: int = 0, step: int = 0) -> JaggedBatch:
    counts, inner = torch.tensor([2, 0, 1]), torch.tensor([1, 3, 2])
    columns = {
        "id": Column(torch.arange(3) + 10 * rank + step),
        "uih": Column(torch.arange(7), (torch.tensor([4, 0, 3]),)),
        "content": Column(torch.arange(6.0), (counts, inner)),
        "text": Column(torch.arange(5, dtype=torch.uint8), (torch.tensor([1, 1, 3]),)),
    }
    return JaggedBatch(columns, 3)


@settings(PATIENT, max_examples=200)
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), WORDS), max_size=6))
def test_headers_with_any_numbers_are_read_or_refused(changes: list[tuple[int, int]]) -> None:
    said = LocalStep(3, 0, State.HAS_BATCH, capacity=4, batch_size=2, text="naïve")
    said.items, said.samples = np.array([5, 6]), np.array([[4, 1, 80], [0, 0, 8]])
    words = encode(said, 2, 0).repeat(2)
    for place, word in changes:
        words[place % len(words)] = word
    assert len(words) == 2 * message_words(2, 4, 0)
    with contextlib.suppress(ProtocolError):
        world = WorldStep(words, 2, 2, 0)
        world.are_alike, world.text(1), world.seconds, world.first(State.FAILED)
        if world.batch_size.max() <= 4:
            assert world.samples.min(initial=0) >= 0
            assert len(world.samples) == world.batch_size.sum()


@settings(PATIENT, max_examples=200)
@given(data=st.data())
def test_messages_of_samples_with_any_bytes_are_taken_or_refused(data: st.DataObject) -> None:
    batch = a_batch()
    schema = Schema.of(batch)
    sections = Sections(batch, schema)
    owners = np.array([1, 1, 1])
    payload = np.array([0, sections.payload_bytes().sum()])
    sizes = message_bytes(schema, payload, np.array([0, 3]))
    message = pack(sections, owners, 0, np.bincount(owners, minlength=len(sizes)), sizes)
    for _ in range(data.draw(st.integers(1, 4))):
        at, word = data.draw(st.integers(0, len(message) // 8 - 1)), data.draw(WORDS)
        message.view(torch.int64)[at] = word
    nothing = Sections(schema.empty_batch(), schema)
    with contextlib.suppress(ProtocolError):
        got = unpack(message.numpy(), sizes[::-1].copy(), np.array([3, 0]), nothing, np.zeros(0, np.int64), schema, 1)
        Batch(got.columns, got.batch_size)  # checks that lengths and values agree


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["int64", "dense"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def changed_somewhere(value: Any, data: st.DataObject) -> Any:
    """A nest with one place, anywhere, replaced by something else."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 3)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(list(keys)))
        copy = value.copy()
        copy[key] = changed_somewhere(value[key], data)
        return copy
    return data.draw(JSON)


@settings(PATIENT, max_examples=200)
@given(data=st.data())
def test_descriptions_of_columns_with_anything_in_them_are_read_or_refused(data: st.DataObject) -> None:
    fields = json.loads(Schema.of(a_batch(), "a type").to_bytes())
    with contextlib.suppress(ProtocolError):
        schema = Schema.from_bytes(json.dumps(changed_somewhere(fields, data)).encode())
        assert schema.layout.num_rows
        schema.empty_batch()
    raw = data.draw(st.binary(max_size=60))
    with pytest.raises(ProtocolError):
        Schema.from_bytes(raw + b"{")


@settings(PATIENT, max_examples=200)
@given(data=st.data())
def test_descriptions_of_batch_types_with_anything_in_them_are_read_or_refused(data: st.DataObject) -> None:
    batch = {"a": torch.zeros(2, 3), "b": [torch.zeros(2), (torch.ones(2),)]}
    description = adapter_for(batch).describe()
    assert description is not None
    with contextlib.suppress(ValueError):
        adapter_from(json.dumps(changed_somewhere(json.loads(description), data)))


@settings(PATIENT, max_examples=200)
@given(
    values=st.lists(WORDS, max_size=6),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.complex64]),
    shape=st.sampled_from([(-1,), (1, -1), (-1, 1)]),
)
def test_any_plan_is_one_owner_a_sample_or_refused(values: list[int], dtype: torch.dtype, shape: Any) -> None:
    world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 1]), uih_lengths=torch.tensor([1, 2, 3]))
    plan = torch.tensor(values).to(dtype).reshape(shape)
    try:
        owners = validate_plan(plan, world)
    except (TypeError, ValueError):
        return
    assert owners.tolist() in [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]


@settings(PATIENT, max_examples=100)
@given(lies=LIES)
def test_a_peer_that_lies_is_an_error_or_believed_and_takes_no_memory_without_bounds(lies: list[Lie]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(transport: Transport) -> None:
        mine = HostilePeer(transport, lies) if transport.rank == 1 else transport
        loader = balance([a_batch(transport.rank, step) for step in range(3)], mine, "uih")
        with contextlib.suppress(BalancerError, TransportError):
            for batch, report in loader.with_reports():
                report.loss_scale()
                JaggedBatch(batch.columns, batch.batch_size)
        loader.close()

    run_in_threads(2, run, timeout_s=4)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
