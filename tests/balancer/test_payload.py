"""Packing and unpacking move exactly the bytes of the samples, whatever the columns and the plan."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from freescale.balancer import Column, JaggedBatch, ProtocolError
from freescale.balancer.protocol.payload import Sections, message_bytes, pack, unpack
from freescale.balancer.protocol.quiet import numbers_of
from freescale.balancer.protocol.schema import Schema

DTYPES = [torch.int64, torch.int8, torch.bool, torch.bfloat16, torch.float16, torch.float64, torch.uint8]


def make_batch(generator: torch.Generator, batch_size: int, dtypes: list[torch.dtype]) -> JaggedBatch:
    def values(n: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        raw = torch.randint(0, 2, (n, *shape), generator=generator)
        if dtype != torch.bool:
            raw = torch.randint(-100, 100, (n, *shape), generator=generator)
        return raw.to(dtype)

    def lengths(n: int) -> torch.Tensor:
        return torch.randint(0, 4, (n,), generator=generator)

    columns = {}
    for index, dtype in enumerate(dtypes):
        counts = lengths(batch_size)
        inner = lengths(int(counts.sum()))
        columns[f"dense{index}"] = Column(values(batch_size, dtype, 3))
        columns[f"wide{index}"] = Column(values(batch_size, dtype, 300))
        columns[f"jagged{index}"] = Column(values(int(counts.sum()), dtype), (counts,))
        columns[f"nested{index}"] = Column(values(int(inner.sum()), dtype, 2), (counts.clone(), inner))
    return JaggedBatch(columns, batch_size)


def samples_of(batch: JaggedBatch) -> list[list[object]]:
    """Each sample as plain Python values, by hand."""
    samples: list[list[object]] = [[] for _ in range(batch.batch_size)]
    for name in batch.names:
        values, levels = batch[name].values.tolist(), [level.tolist() for level in batch[name].levels]
        position, inner = 0, 0
        for i in range(batch.batch_size):
            if not levels:
                samples[i].append(values[i])
                continue
            if len(levels) == 1:
                samples[i].append(values[position : position + levels[0][i]])
                position += levels[0][i]
                continue
            contents = []
            for length in levels[1][inner : inner + levels[0][i]]:
                contents.append(values[position : position + length])
                position += length
            inner += levels[0][i]
            samples[i].append(contents)
    return samples


def shuffle(batches: list[JaggedBatch], owners: list[np.ndarray]) -> list[JaggedBatch]:
    """All ranks' packing and unpacking in one process, with the exchange by hand."""
    world_size, schema = len(batches), Schema.of(batches[0])
    sections = [Sections(batch, schema) for batch in batches]
    sizes = np.zeros((world_size, world_size), np.int64)
    counts = np.zeros((world_size, world_size), np.int64)
    for source in range(world_size):
        payload = sections[source].payload_bytes()
        for to in range(world_size):
            chosen = owners[source] == to
            counts[source, to] = chosen.sum()
            if to != source:
                sizes[source, to] = message_bytes(schema, payload[chosen].sum()[None], chosen.sum()[None])[0]
    messages = [
        torch.split(pack(sections[r], owners[r], r, counts[r], sizes[r]), sizes[r].tolist())
        if world_size > 1
        else [torch.empty(0)]
        for r in range(world_size)
    ]
    result = []
    for rank in range(world_size):
        received = torch.cat([messages[source][rank] for source in range(world_size)]).to(torch.uint8)
        staying = np.flatnonzero(owners[rank] == rank)
        result.append(unpack(received.numpy(), sizes[:, rank], counts[:, rank], sections[rank], staying, schema, rank))
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 2**31),
    st.lists(st.sampled_from(DTYPES), min_size=0, max_size=3),
)
def test_every_sample_arrives_whole_and_in_global_order(world_size: int, seed: int, dtypes: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 6, (world_size,), generator=generator).tolist()
    batches = [make_batch(generator, n, dtypes) for n in sizes]
    owners = [torch.randint(0, world_size, (n,), generator=generator).numpy() for n in sizes]
    balanced = shuffle(batches, owners)
    for rank in range(world_size):
        expected = [
            sample
            for batch, owner in zip(batches, owners, strict=True)
            for sample, to in zip(samples_of(batch), owner, strict=True)
            if to == rank
        ]
        assert samples_of(balanced[rank]) == expected
        for name in batches[0].names:
            assert balanced[rank][name].values.dtype == batches[0][name].values.dtype
            assert balanced[rank][name].values.shape[1:] == batches[0][name].values.shape[1:]


@pytest.mark.parametrize("dtypes", [[torch.int64], DTYPES[:3]], ids=["words", "padded"])
@pytest.mark.parametrize("world_size", [255, 256, 257, 70000])
def test_messages_are_in_the_order_of_ranks_however_many_there_are(world_size: int, dtypes: list[torch.dtype]) -> None:
    batch = make_batch(torch.Generator().manual_seed(0), 40, dtypes)
    owners = np.random.default_rng(0).integers(1, world_size, 40)
    owners[[3, 17]] = world_size - 1
    schema, counts = Schema.of(batch), np.bincount(owners, minlength=world_size)
    sections, nothing = Sections(batch, schema), Sections(batch.take([]), schema)
    payload = np.bincount(owners, sections.payload_bytes(), world_size).astype(np.int64)
    sizes = message_bytes(schema, payload, counts)
    message = pack(sections, owners, 0, counts, sizes)
    assert len(message) == sizes.sum()
    arrived = unpack(message.numpy(), sizes, counts, nothing, np.zeros(0, np.int64), schema, 0)
    assert arrived.equal(batch.take(np.argsort(owners, kind="stable").tolist()))


def test_what_a_rank_without_samples_gets_can_be_viewed_as_bytes() -> None:
    batch = make_batch(torch.Generator().manual_seed(0), 3, DTYPES[:3])
    nothing, _ = shuffle([batch, batch], [np.array([1, 1, 1]), np.array([1, 1, 1])])
    assert nothing.batch_size == 0
    for name in nothing.names:
        for tensor in (nothing[name].values.view(-1), *nothing[name].levels):
            assert tensor.view(torch.uint8).numel() == 0


def test_values_without_bytes_are_counted_by_their_lengths() -> None:
    batch = JaggedBatch({"flag": Column(torch.empty(5, 0), (torch.tensor([2, 3]),))}, 2)
    balanced = shuffle([batch, batch], [np.array([0, 1]), np.array([0, 1])])
    assert [tuple(b["flag"].values.shape) for b in balanced] == [(4, 0), (6, 0)]


@pytest.mark.parametrize("lie", [2**40, -1, 2**62])
def test_a_message_whose_lengths_lie_is_an_error(lie: int) -> None:
    batch = JaggedBatch({"ids": Column(torch.arange(4), (torch.tensor([1, 3]),))}, 2)
    schema = Schema.of(batch)
    sections = Sections(batch, schema)
    size = message_bytes(schema, sections.payload_bytes().sum()[None], np.array([2]))
    message = pack(sections, np.array([1, 1]), 0, np.array([0, 2]), np.array([0, size[0]]))
    message[:8].view(torch.int64)[0] = lie
    with pytest.raises(ProtocolError, match="'ids'"):
        unpack(
            message.numpy(), np.array([size[0], 0]), np.array([2, 0]), Sections(schema.empty_batch(), schema),
            np.zeros(0, np.int64), schema, 1,
        )  # fmt: skip


def test_inner_lengths_that_do_not_add_up_to_what_the_heads_say_are_an_error() -> None:
    nested = Column(torch.arange(6), (torch.tensor([2, 1]), torch.tensor([1, 2, 3])))
    batch = JaggedBatch({"content": nested}, 2)
    schema = Schema.of(batch)
    sections = Sections(batch, schema)
    size = message_bytes(schema, sections.payload_bytes().sum()[None], np.array([2]))
    message = pack(sections, np.array([1, 1]), 0, np.array([0, 2]), np.array([0, size[0]]))
    words = message.view(torch.int64)
    assert words[:7].tolist() == [2, 3, 1, 3, 1, 2, 3], "outer lengths and sums of the inner ones, then inner lengths"
    words[5], words[6] = 3, 2  # as many values as before, but shared out otherwise
    with pytest.raises(ProtocolError, match="'content' in a message do not add up"):
        unpack(
            message.numpy(), np.array([size[0], 0]), np.array([2, 0]), Sections(schema.empty_batch(), schema),
            np.zeros(0, np.int64), schema, 1,
        )  # fmt: skip


def later(numbers: list[int]) -> torch.Tensor:
    """What a functional collective gives: a tensor that wraps the one with the numbers."""
    wrapper: torch.Tensor = AsyncCollectiveTensor(torch.tensor(numbers))
    assert wrapper.data_ptr() == 0
    return wrapper


def test_lengths_and_single_values_of_a_tensor_that_wraps_another_are_read_from_there() -> None:
    batch = JaggedBatch({"id": Column(later([7, 8])), "items": Column(torch.arange(3), (later([1, 2]),))})
    (same,) = shuffle([batch], [np.zeros(2, np.int64)])
    assert samples_of(same) == [[7, [0]], [8, [1, 2]]]
    assert numbers_of(later([5, 6])).tolist() == [5, 6]


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_values_of_any_type_are_read_from_a_tensor_that_wraps_them(dtype: torch.dtype) -> None:
    """NumPy has no bfloat16."""
    values = torch.tensor([[1, 0, 3], [0, 5, 6]]).to(dtype)
    (same,) = shuffle([JaggedBatch({"dense": Column(AsyncCollectiveTensor(values))})], [np.zeros(2, np.int64)])
    assert torch.equal(same["dense"].values, values)


@pytest.mark.parametrize("lengths", [None, [1, 2]])
def test_values_that_are_packed_from_where_they_lie_must_lie_somewhere(lengths: list[int] | None) -> None:
    levels = () if lengths is None else (torch.tensor(lengths),)
    values = later([1, 2, 3]) if lengths else AsyncCollectiveTensor(torch.zeros(2, 300))
    batch = JaggedBatch({"items": Column(values, levels)})
    with pytest.raises(ValueError, match="column 'items' is of type AsyncCollectiveTensor, which wraps other tensors"):
        shuffle([batch], [np.zeros(2, np.int64)])
