"""Stage III of one step: the plan, what it makes each rank send and receive, and the exchange (paper, Algorithm 1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ...transport import Pending, Transport
from ..batches.batch import JaggedBatch
from ..errors import describe
from ..plan import Partitioner, WorldSamples, check_plan
from ..report import Traffic
from .header import PAYLOAD, TEXT_BYTES, UIH, WorldStep, cut_text
from .payload import Sections, message_bytes, pack, unpack
from .schema import Schema

Int64s = NDArray[np.int64]

_NO_OWNERS: Int64s = np.empty(0, np.int64)
_sum = np.add.reduce  # without the method's Python wrapper
PLANNED, PARTITIONER_FAILED, PREPARING_FAILED = range(3)
NOTE_WORDS = 3 + TEXT_BYTES // 8


class Shuffle:
    """One rank's share in moving the samples of one global batch.

    Args:
        transport: Moves the messages.
        schema: The columns.
        sections: The bytes of the local batch; None without one.
        world: What all ranks said in stage I.
        samples: Works out what the partitioner is told, and what it may do with as it likes.
        buffer: Reused for what arrives, and replaced when it is too small. uint8.
    """

    def __init__(
        self,
        transport: Transport,
        schema: Schema,
        sections: Sections | None,
        world: WorldStep,
        samples: Callable[[], WorldSamples],
        buffer: NDArray[np.uint8],
    ) -> None:
        self._transport = transport
        self._schema = schema
        self._world = world
        self._work_out_samples = samples
        self._local = sections
        self.buffer = buffer
        self.owners = _NO_OWNERS
        self.traffic: Traffic
        self.error: BaseException | None = None
        self.scraps: list[object] = []  # see `Outcome`

    def prepare(self, partitioner: Partitioner, note: Int64s) -> None:
        """Plan, allocate and pack. What goes wrong is told to all ranks, before any data moves.

        Args:
            partitioner: Plans.
            note: Becomes what this rank tells all: status, digest of the plan, error text. Shape [NOTE_WORDS].
        """
        note.fill(0)
        status = PREPARING_FAILED
        try:
            samples, local = self._work_out_samples(), self._local
            self._sections = Sections(self._schema.empty_batch(), self._schema) if local is None else local
            status = PARTITIONER_FAILED
            plan = partitioner(samples)
            self.owners = check_plan(plan, samples)
            self.scraps += (samples, plan)
            status = PREPARING_FAILED
            self._size_and_pack()
            status = PLANNED
        except BaseException as error:
            self.error = error
            encoded = cut_text(describe(error))
            note[2] = len(encoded)
            note[3:].view(np.uint8)[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        digest = hashlib.blake2b(self.owners.data, digest_size=8).digest()
        note[0], note[1] = status, int.from_bytes(digest, "little", signed=True)

    def _size_and_pack(self) -> None:
        world, rank, size = self._world, self._transport.rank, self._transport.world_size
        first = int(_sum(world.batch_size[:rank]))
        own = slice(first, first + int(world.batch_size[rank]))
        told, mine = world.samples, self.owners[own]
        self.traffic = traffic = Traffic.of(rank, size, world.origin, self.owners, told[:, UIH], told[:, PAYLOAD], own)
        self._staying = (mine == rank).nonzero()[0]
        messages = message_bytes(self._schema, traffic.pair_bytes, traffic.pair_samples)
        self._sent, self._received = messages
        messages[:, rank] = 0  # what stays is in no message
        self._needed = int(_sum(self._received))
        if self.buffer.shape[0] < self._needed:
            self.buffer = np.empty(self._needed * 5 // 4, np.uint8)
        self._packed = pack(self._sections, mine, rank, traffic.pair_samples[0], self._sent)

    def post(self) -> Pending:
        """Put the messages on their way."""
        out = torch.from_numpy(self.buffer[: self._needed])
        self.scraps.append(out)
        return self._transport.all_to_all(self._packed, self._sent, self._received, out)

    def finish(self) -> JaggedBatch:
        """Put what arrived and what stayed home together."""
        return unpack(
            self.buffer[: self._needed],
            self._received,
            self.traffic.pair_samples[1],
            self._sections,
            self._staying,
            self._schema,
            self._transport.rank,
        )
