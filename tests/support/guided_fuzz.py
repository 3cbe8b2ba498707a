"""Feeds bytes to what reads messages and states, and keeps those that reach new code: a coverage-guided fuzzer.

As a script: `python guided_fuzz.py TARGET SECONDS FOLDER`. It ends with status 0 when nothing was found. What was found
is in FOLDER; `python guided_fuzz.py TARGET 0 FOLDER FILE` reads such a file again. Needs requirements/fuzz.txt.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

with atheris.instrument_imports(include=["freescale"]):
    from freescale.balancer import Column, CostModel, JaggedBatch, ProtocolError, VariableBatchSize, read_parquet
    from freescale.balancer.adapters.adapt import adapter_for, adapter_from
    from freescale.balancer.plan import WorldSamples, validate_plan
    from freescale.balancer.protocol.header import LocalStep, State, WorldStep, encode, message_words
    from freescale.balancer.protocol.payload import Sections, message_bytes, pack, unpack
    from freescale.balancer.protocol.schema import Schema
    from freescale.embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
    from freescale.transport import connect

LONGEST_BYTES, TIMEOUT_S, MOST_MIB = 4096, 20, 4096
Read = Callable[[bytes], object]


def a_batch() -> JaggedBatch:
    counts, inner = torch.tensor([2, 0, 1]), torch.tensor([1, 3, 2])
    columns = {
        "id": Column(torch.arange(3)),
        "uih": Column(torch.arange(7), (torch.tensor([4, 0, 3]),)),
        "content": Column(torch.arange(6.0), (counts, inner)),
        "text": Column(torch.arange(5, dtype=torch.uint8), (torch.tensor([1, 1, 3]),)),
    }
    return JaggedBatch(columns, 3)


def header() -> tuple[Read, list[bytes]]:
    """Stage I: what two ranks say, of up to four samples."""
    said = LocalStep(3, 0, State.HAS_BATCH, capacity=4, batch_size=2, text="naïve")
    said.items, said.samples = np.array([5, 6]), np.array([[4, 1, 80], [0, 0, 8]])
    good = encode(said, 2, 0).repeat(2)
    num_bytes = 2 * message_words(2, 4, 0) * 8

    def read(data: bytes) -> None:
        words = torch.frombuffer(bytearray(data[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.int64)
        with contextlib.suppress(ProtocolError):
            world = WorldStep(words, 2, 2, 0)
            world.are_alike, world.text(1), world.seconds, world.first(State.FAILED)
            if world.batch_size.max() <= 4:
                assert world.samples.min(initial=0) >= 0
                assert len(world.samples) == world.batch_size.sum()

    return read, [good.numpy().tobytes()]


def schema() -> tuple[Read, list[bytes]]:
    """A description of columns."""

    def read(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            made = Schema.from_bytes(data)
            assert made.layout.num_rows
            made.empty_batch()

    return read, [Schema.of(a_batch(), "a type").to_bytes(), Schema.of(a_batch()).to_bytes()]


def batch_type() -> tuple[Read, list[bytes]]:
    """A description of the user's batch type."""
    batches: list[Any] = [{"a": torch.zeros(2, 3), "b": [torch.zeros(2), (torch.ones(2),)]}, a_batch()]
    described = [adapter_for(batch).describe() or "" for batch in batches]

    def read(data: bytes) -> None:
        with contextlib.suppress(ValueError):
            adapter_from(data.decode(errors="replace"))

    return read, [text.encode() for text in described]


def payload() -> tuple[Read, list[bytes]]:
    """Stage III: samples."""
    batch = a_batch()
    columns = Schema.of(batch)
    sections = Sections(batch, columns)
    sizes = message_bytes(columns, np.array([0, sections.payload_bytes().sum()]), np.array([0, 3]))
    good = bytes(pack(sections, np.array([1, 1, 1]), 0, np.array([0, 3]), sizes).tolist())
    nothing = Sections(columns.empty_batch(), columns)

    def read(data: bytes) -> None:
        message = torch.frombuffer(bytearray(data[: len(good)].ljust(len(good), b"\0")), dtype=torch.uint8)
        with contextlib.suppress(ProtocolError):
            got = unpack(
                message.numpy(), sizes[::-1].copy(), np.array([3, 0]), nothing, np.zeros(0, np.int64), columns, 1
            )
            JaggedBatch(got.columns, got.batch_size)

    return read, [good]


def arrow() -> tuple[Read, list[bytes]]:
    """An Arrow stream."""
    sink = pa.BufferOutputStream()
    table = pa.table({"x": [[1, 2], [], [3]], "t": ["ab", "", "c"], "n": [[[1], []], [], [[2, 3]]]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)

    def read(data: bytes) -> None:
        try:
            found = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
        except Exception:  # Arrow's own affair
            return
        with contextlib.suppress(ValueError):
            batch = JaggedBatch.from_arrow(found)
            for name in batch.names:
                batch[name].to_list()

    return read, [sink.getvalue().to_pybytes()]


def plan() -> tuple[Read, list[bytes]]:
    """What a partitioner returns: the first byte is the dtype."""
    world = WorldSamples(world_size=2, rank=torch.tensor([0, 0, 1]), uih_lengths=torch.tensor([1, 2, 3]))
    dtypes = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.complex64]

    def read(data: bytes) -> None:
        dtype = dtypes[data[0] % len(dtypes)] if data else torch.int64
        rest = data[1 : 1 + (len(data) - 1) // dtype.itemsize * dtype.itemsize]
        owners = torch.frombuffer(bytearray(rest), dtype=dtype) if rest else torch.zeros(0, dtype=dtype)
        with contextlib.suppress(TypeError, ValueError):
            checked = validate_plan(owners, world).tolist()
            assert len(checked) == 3
            assert set(checked) <= {0, 1}

    return read, [b"\0" + np.array([0, 1, 1], np.int64).tobytes()]


def states() -> tuple[Read, list[bytes]]:
    """States, as JSON: of a Parquet source, of what learns, of the optimizer of tables."""
    path = Path(tempfile.mkdtemp()) / "data.parquet"
    pq.write_table(pa.table({"id": range(30), "uih": [[1] * (k % 5) for k in range(30)]}), path, row_group_size=7)
    source = read_parquet(path, 4)
    next(iter(source))
    tables = PrioritizedEmbeddingCollection([Table("item", 6, 2)], connect("local"), optimizer=RowwiseAdagrad(lr=0.1))
    loaders: list[Any] = [source, VariableBatchSize(alpha=1.0, autotune=True), CostModel(), tables.fused_optimizer]
    good = [json.dumps(each.state_dict(), default=lambda value: value.tolist()).encode() for each in loaders]

    def read(data: bytes) -> None:
        loader = loaders[data[0] % len(loaders)] if data else source
        try:
            state = json.loads(data[1:])
        except (ValueError, RecursionError):
            return
        with contextlib.suppress(ValueError, TypeError):
            loader.load_state_dict(state)
            if loader is source:
                assert sum(batch.batch_size for batch in source) <= 30

    return read, [bytes([number]) + text for number, text in enumerate(good)]


def planted() -> tuple[Read, list[bytes]]:
    """A fault behind five bytes, of which each is a branch: bytes at random would take ages to come there."""

    @atheris.instrument_func  # type: ignore[untyped-decorator]  # atheris has no types
    def read(data: bytes) -> None:
        for reached, expected in enumerate(b"frees"):
            if len(data) <= reached or data[reached] != expected:
                return
            advance(reached)
        raise AssertionError("found")

    return read, [b""]


@atheris.instrument_func  # type: ignore[untyped-decorator]  # atheris has no types
def advance(reached: int) -> None:
    """A branch for each byte, so that one more is new code."""
    for place in range(5):
        if reached == place:
            return


TARGETS = {each.__name__: each for each in (header, schema, batch_type, payload, arrow, plan, states, planted)}


def main(name: str, seconds: str, folder: str, *files: str) -> None:
    """See the module's text."""
    read, seeds = TARGETS[name]()
    if files:
        for file in files:
            read(Path(file).read_bytes())
        return
    corpus = Path(folder) / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        read(seed)
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MOST_MIB}"]
    found = [f"-artifact_prefix={folder}/", f"-max_len={LONGEST_BYTES}", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, *found, str(corpus)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
