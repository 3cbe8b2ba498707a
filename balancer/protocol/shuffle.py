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
from ..plan import Partitioner, WorldSamples, validate_plan
from .header import TEXT_BYTES, cut_text
from .payload import Sections, message_bytes, pack, unpack
from .schema import Schema

Int64s = NDArray[np.int64]

PLANNED, PARTITIONER_FAILED, PREPARING_FAILED = range(3)
NOTE_WORDS = 3 + TEXT_BYTES // 8


class Shuffle:
    """One rank's share in moving the samples of one global batch.

    Args:
        transport: Moves the messages.
        schema: The columns.
        sections: The bytes of the local batch; None without one.
        samples: Works out what every rank knows about the global batch.
        buffer: Reused for what arrives, and replaced when it is too small. uint8.
    """

    def __init__(
        self,
        transport: Transport,
        schema: Schema,
        sections: Sections | None,
        samples: Callable[[], WorldSamples],
        buffer: Tensor,
    ) -> None:
        self._transport = transport
        self._schema = schema
        self._work_out_samples = samples
        self._local = sections
        self.buffer = buffer
        self.owners: Int64s = np.zeros(0, np.int64)
        self.error: BaseException | None = None

    def prepare(self, partitioner: Partitioner) -> Tensor:
        """Plan, allocate and pack. What goes wrong is told to all ranks, before any data moves.

        Returns:
            This rank's note to all: status, digest of the plan, error text. Shape [NOTE_WORDS], int64.
        """
        status, text = PREPARING_FAILED, ""
        try:
            self.samples = self._work_out_samples()
            local = self._local
            self._sections = Sections(self._schema.empty_batch(), self._schema) if local is None else local
            status = PARTITIONER_FAILED
            # Copies both ways: a partitioner may write into its argument, or keep what it returns.
            self.owners = validate_plan(partitioner(self.samples.clone()), self.samples).numpy().copy()
            status = PREPARING_FAILED
            self._size_and_pack()
            status = PLANNED
        except BaseException as error:
            self.error = error
            text = describe(error)
        encoded = cut_text(text)
        note = np.zeros(NOTE_WORDS, np.int64)
        note[:3] = status, self._digest(), len(encoded)
        note[3:].view(np.uint8)[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        return torch.from_numpy(note)

    def _digest(self) -> int:
        plan = np.ascontiguousarray(self.owners).tobytes()
        return int.from_bytes(hashlib.sha256(plan).digest()[:8], "little", signed=True)

    def _size_and_pack(self) -> None:
        rank, size = self._transport.rank, self._transport.world_size
        origin = self.samples.rank.numpy()
        here, mine = origin == rank, self.owners == rank
        self._sent = self._message_sizes(self.owners, here & ~mine, size)
        self._received = self._message_sizes(origin, mine & ~here, size)
        self._num_received = np.bincount(origin[mine], minlength=size)
        self._staying = np.flatnonzero(self.owners[here] == rank)
        needed = int(self._received.sum())
        if len(self.buffer) < needed:
            self.buffer = torch.empty(needed * 5 // 4, dtype=torch.uint8, device="cpu")
        self._packed = pack(self._sections, self.owners[here], rank, self._sent)

    def _message_sizes(self, peers: Int64s, moving: NDArray[np.bool_], size: int) -> Int64s:
        """Bytes of the message to or from each rank."""
        payload = self.samples.payload_bytes.numpy()[moving]
        total = np.bincount(peers[moving], weights=payload, minlength=size).astype(np.int64)
        return message_bytes(self._schema, total, np.bincount(peers[moving], minlength=size))

    def post(self) -> Pending:
        """Put the messages on their way."""
        received = self.buffer[: int(self._received.sum())]
        return self._transport.all_to_all(self._packed, self._sent.tolist(), self._received.tolist(), out=received)

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
        )
