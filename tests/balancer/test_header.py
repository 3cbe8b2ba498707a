"""The message of stage I: what is written is what all read, and what cannot be is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from freescale.balancer.errors import ProtocolError
from freescale.balancer.protocol.header import LocalStep, State, WorldStep, encode

SAID = LocalStep(
    step=3,
    epoch=5,
    state=State.CLOSING,
    capacity=4,
    batch_size=2,
    schema_digest=-(2**63),
    schema_bytes=11,
    options_digest=2**63 - 1,
    reads_candidates=True,
    seconds_step=7,
    seconds=0.1,
    text="naïve",
    items=np.array([8, 9]),
    samples=np.array([[1, 2, 3], [4, 5, 6]]),
)


def read(*said: LocalStep) -> WorldStep:
    return WorldStep(torch.cat([encode(each, 2, 0) for each in said]), len(said), 2, 0)


def test_every_field_is_read_as_it_was_written() -> None:
    world = read(LocalStep(0, 0, State.HAS_BATCH, 4), SAID)
    same = ("step", "epoch", "capacity", "batch_size", "schema_digest", "schema_bytes", "options_digest")
    for name in (*same, "reads_candidates", "seconds_step"):
        assert getattr(world, name)[1] == getattr(SAID, name), name
    assert world.state.tolist() == [State.HAS_BATCH, State.CLOSING]
    assert math.isnan(world.seconds[0])
    assert world.seconds[1] == 0.1
    assert world.text(1) == "naïve"
    assert world.items.tolist() == [[0, 0], [8, 9]]
    assert world.samples.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert world.origin.tolist() == [1, 1]
    assert (world.largest_batch, world.somebody_reads_candidates, world.somebody_measured) == (2, True, True)
    nobody = read(LocalStep(0, 0, State.HAS_BATCH, 4), LocalStep(0, 0, State.HAS_BATCH, 4))
    assert nobody.all_have_batches
    assert (nobody.largest_batch, nobody.somebody_reads_candidates, nobody.somebody_measured) == (0, False, False)


@pytest.mark.parametrize("name", ["step", "epoch", "options_digest", "schema_digest", "reads_candidates"])
def test_ranks_that_differ_in_what_is_rarely_different_are_not_alike(name: str) -> None:
    other = LocalStep(**{**vars(SAID), name: not SAID.reads_candidates if name == "reads_candidates" else 1})
    assert read(SAID, SAID).are_alike
    assert not read(SAID, other).are_alike


def test_ranks_may_differ_in_all_else_and_be_alike() -> None:
    other = LocalStep(**{**vars(SAID), "state": State.HAS_BATCH, "batch_size": 1, "seconds": 3.0, "text": ""})
    assert read(SAID, other).are_alike


@pytest.mark.parametrize(
    ("word", "value", "name"),
    [
        (0, 1, "magic"),
        (0, -(2**63), "magic"),
        (5, 2, "reads_candidates"),
        (5, -1, "reads_candidates"),
        (6, 4, "state"),
        (6, -(2**63), "state"),
        (7, (1 << 20) + 1, "batch_size"),
        (7, -1, "batch_size"),
        (9, (1 << 24) + 1, "schema_bytes"),
        (12, 513, "text_bytes"),
        (12, 2**63 - 1, "text_bytes"),
    ],
)
def test_a_field_beyond_its_limits_is_refused_with_its_rank(word: int, value: int, name: str) -> None:
    words = torch.cat([encode(SAID, 2, 0)] * 2)
    words[len(words) // 2 + word] = value
    with pytest.raises(ProtocolError, match=f"{name} of rank 1 must be in .*, got {value}"):
        WorldStep(words, 2, 2, 0)
