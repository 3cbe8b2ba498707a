"""Stage III of one step: the plan, what it makes each rank send and receive, and the exchange (paper, Algorithm 1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...transport import Pending, Transport
from ..batches.batch import JaggedBatch
from ..errors import describe
from ..plan import Partitioner, WorldSamples, check_plan
from .header import PAYLOAD, TEXT_BYTES, WorldStep, cut_text
from .payload import Sections, message_bytes, pack, unpack
from .schema import Schema

Int64s = NDArray[np.int64]

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
        buffer: Tensor,
    ) -> None:
        self._transport = transport
        self._schema = schema
        self._world = world
        self._work_out_samples = samples
        self._local = sections
        self.origin = world.origin()
        self.buffer = buffer
        self.owners: Int64s = np.zeros(0, np.int64)
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
            owners = check_plan(plan, samples)
            self.owners = owners.copy()  # a partitioner may keep what it returns
            self.scraps += (samples, plan, owners)
            status = PREPARING_FAILED
            self._size_and_pack()
            status = PLANNED
        except BaseException as error:
            self.error = error
            encoded = cut_text(describe(error))
            note[2] = len(encoded)
            note[3:].view(np.uint8)[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        note[0], note[1] = status, self._digest()

    def _digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.owners.data, digest_size=8).digest(), "little", signed=True)

    def _size_and_pack(self) -> None:
        world, rank, size = self._world, self._transport.rank, self._transport.world_size
        first = int(_sum(world.batch_size[:rank]))
        last = first + int(world.batch_size[rank])
        mine, payload = self.owners[first:last], world.samples[:, PAYLOAD]
        coming = (self.owners == rank).nonzero()[0]
        sources = self.origin[coming]
        self._staying = (mine == rank).nonzero()[0]
        # To each rank and from each, together.
        peers = np.concatenate([mine, sources + size])
        moved = np.bincount(peers, np.concatenate([payload[first:last], payload[coming]]), 2 * size)
        counts = np.bincount(peers, minlength=2 * size).reshape(2, size)
        messages = message_bytes(self._schema, moved.astype(np.int64).reshape(2, size), counts)
        messages[:, rank] = 0  # what stays is in no message
        self._num_received = counts[1]
        self._sent, self._received = messages
        self._needed = int(_sum(self._received))
        if self.buffer.shape[0] < self._needed:
            self.buffer = torch.empty(self._needed * 5 // 4, dtype=torch.uint8, device="cpu")
        self._packed = pack(self._sections, mine, rank, self._sent)

    def post(self) -> Pending:
        """Put the messages on their way."""
        received = self.buffer[: self._needed]
        self.scraps.append(received)
        return self._transport.all_to_all(self._packed, self._sent, self._received, out=received)

    def finish(self, received: Tensor) -> JaggedBatch:
        """Put what arrived and what stayed home together."""
        return unpack(
            received,
            self._received,
            self._num_received,
            self._sections,
            self._staying,
            self._schema,
            self._transport.rank,
            self.scraps,
        )
