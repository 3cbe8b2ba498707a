"""The three-stage protocol: gather lengths, gather candidate lengths and plan, shuffle samples (paper, Algorithm 1).

Every rank runs the same steps on the same gathered data. A stage posts its messages, yields what is under way, and
waits when it is resumed, so that a caller can compute in between.

    hello → [ stage I → stage II → plan → agree on the plan → stage III ] for each global batch, until no rank has one
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...transport import Pending, Transport, TransportError
from ..errors import PeerFailed, PlanMismatch, ProtocolError, SchemaMismatch
from ..plan import Partitioner, WorldSamples, reads_candidate_lengths, reads_measured
from ..report import Report
from .gather import Gather
from .header import CANDIDATES, LocalStep, State, WorldStep, encode, message_words, write
from .history import History
from .schema import Schema, describe_difference
from .selection import Selection
from .shuffle import NOTE_WORDS, PARTITIONER_FAILED, PLANNED, Shuffle
from .step import Clock, LocalBatch, Outcome, Posted

Int64s = NDArray[np.int64]
_any = np.logical_or.reduce  # without the method's Python wrapper
_NO_LENGTHS = torch.empty(0, dtype=torch.int64, device="cpu")
Stages = Generator[Posted, None, Outcome]


class Protocol:
    """One rank's side of the protocol over one epoch.

    Args:
        transport: A channel that nothing else uses.
        selection: Which columns mean what; equal on all ranks.
        partitioner: Gives the owner of every sample; the same on all ranks.
        step: Number of the first global batch; equal on all ranks.
        epoch: Number of the epoch; equal on all ranks.
        measured: Gives the step measured last and its compute seconds.

    Attributes:
        alone: The peers are done with the step and this rank is not, so whatever fails now is told at the next one.
    """

    def __init__(
        self,
        transport: Transport,
        selection: Selection,
        partitioner: Partitioner,
        *,
        step: int = 0,
        epoch: int = 0,
        measured: Callable[[], tuple[int, float]] = lambda: (-1, float("nan")),
    ) -> None:
        self.transport = transport
        self.step, self.epoch = step, epoch
        self.alone = False
        self.schema: Schema | None = None
        self.type_description: str | None = None
        self.dropped_samples = 0
        self._selection = selection
        self.partitioner = partitioner
        self._measured = measured
        self._history = History(transport.world_size)
        self._capacity = 0
        self._reads_candidates = reads_candidate_lengths(partitioner)
        self._reads_measured = reads_measured(partitioner)
        self._notes = Gather(transport, NOTE_WORDS)
        self._lengths: Gather | None = None  # made for the agreed capacity
        self._receive_buffer = np.empty(0, np.uint8)

    def run(self, local: LocalBatch) -> Outcome:
        """Take part in one step, from stage I to the shuffled samples.

        Returns:
            This rank's share of the global batch, or the end of the data.

        Raises:
            PeerFailed: A rank said that it failed; on every rank.
            SchemaMismatch, PlanMismatch, ProtocolError: On every rank, naming ranks and values.
            TransportTimeout, TransportError: The network or a peer is gone; names stage and step.
        """
        stages = self.stages(local)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome

    def stages(self, local: LocalBatch) -> Stages:
        """Like `run`, but a generator that yields each time the messages of a stage are on the way."""
        clock = Clock({"load": local.load_seconds})
        self.alone = False
        if self.schema is None:
            world = yield from self._hello(local)
            if (end := self._end(world)) is not None:
                return end
        world = yield from self._gather_lengths(local)
        clock.lap("gather_lengths")
        if (end := self._end(world)) is not None:
            return end
        self._check_schemas(world)
        candidate_lengths = yield from self._gather_candidates(local, world)
        clock.lap("gather_candidates")
        return (yield from self._plan_and_shuffle(local, world, candidate_lengths, clock))

    def _wait(self, work: Pending, stage: str) -> Tensor:
        """Wait for a transfer; an error says which stage and step it hit."""
        try:
            return work.wait()
        except TransportError as error:
            raise type(error)(f"{stage}, step {self.step}: {error}") from error

    # ---- hello and stage I

    def _say(self, local: LocalBatch, capacity: int) -> LocalStep:
        said = LocalStep(self.step, self.epoch, local.state, capacity, text=local.text)
        said.options_digest = self._selection.digest
        said.reads_candidates = self._reads_candidates
        said.seconds_step, said.seconds = self._measured()
        if local.schema is not None:
            said.batch_size = len(local.samples)
            said.schema_digest = local.schema.digest
        return said

    def _hello(self, local: LocalBatch) -> Generator[Posted, None, WorldStep]:
        """Agree on columns and capacity before the first step. Ranks without a batch learn the columns."""
        said = self._say(local, 0)
        if local.schema is not None:
            said.schema_bytes = len(local.schema.to_bytes())
        work = self.transport.all_gather(encode(said, 0, 0))
        yield Posted("hello", work)
        world = WorldStep(self._wait(work, "hello"), self.transport.world_size, 0, 0)
        self._check_agreement(world)
        if self._end(world) is not None:
            return world
        # An empty batch may be of any type, as torch.tensor([]) is float32. So whoever has samples decides.
        knows = (world.state == State.HAS_BATCH) & (world.batch_size > 0)
        knows = knows if knows.any() else world.state == State.HAS_BATCH
        speaker = int(np.flatnonzero(knows)[0])
        differs = world.first_difference("schema_digest", knows) is not None
        if differs or not knows.all():
            speakers = knows if differs else np.arange(len(knows)) == speaker
            schemas = yield from self._gather_schemas(local, world, speakers)
            if differs:
                self._raise_schema_mismatch(schemas)
            self._learn(schemas[speaker])
        if local.schema is not None and knows[self.transport.rank]:
            self._learn(local.schema)
        self._capacity, self._lengths = world.largest_batch, None
        return world

    def _learn(self, schema: Schema) -> None:
        self.schema, self.type_description = schema, schema.type_description

    def _gather_schemas(
        self, local: LocalBatch, world: WorldStep, speakers: NDArray[np.bool_]
    ) -> Generator[Posted, None, dict[int, Schema]]:
        """Some ranks send their columns to all."""
        sizes = np.where(speakers, world.schema_bytes, 0)
        ours = b""
        if local.schema is not None and speakers[self.transport.rank]:
            ours = local.schema.to_bytes()
        block = (
            torch.frombuffer(bytearray(ours), dtype=torch.uint8)
            if ours
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        work = self.transport.all_gather(block, sizes.tolist())
        yield Posted("hello", work)
        gathered = self._wait(work, "hello").numpy().tobytes()
        ends = np.cumsum(sizes)
        return {
            int(rank): Schema.from_bytes(gathered[ends[rank] - sizes[rank] : ends[rank]])
            for rank in np.flatnonzero(speakers)
        }

    def _raise_schema_mismatch(self, schemas: Mapping[int, Schema]) -> None:
        first = min(schemas)
        for rank in sorted(schemas):
            if schemas[rank].columns != schemas[first].columns:
                raise SchemaMismatch(describe_difference(first, schemas[first], rank, schemas[rank]))

    def _check_agreement(self, world: WorldStep) -> None:
        """Raise, on every rank, when ranks are at different steps or were given different options."""
        if world.are_alike:
            return
        if (pair := world.first_difference("step")) is not None:
            a, b = pair
            raise ProtocolError(
                f"rank {a} is at step {world.step[a]} and rank {b} at step {world.step[b]}; "
                "all ranks have to load states of the same step"
            )
        if (pair := world.first_difference("epoch")) is not None:
            a, b = pair
            raise ProtocolError(
                f"rank {a} is in epoch {world.epoch[a]} and rank {b} in epoch {world.epoch[b]}; "
                "all ranks have to load states of the same epoch"
            )
        if (pair := world.first_difference("options_digest")) is not None:
            raise SchemaMismatch(
                f"ranks {pair[0]} and {pair[1]} were given different lengths=, candidates=, gather= or drop_small=; "
                f"rank {self.transport.rank} has {self._selection}"
            )

    def _gather_lengths(self, local: LocalBatch) -> Generator[Posted, None, WorldStep]:
        """Stage I. Repeated with more room when a rank has a larger batch than before."""
        assert self.schema is not None
        num_columns, num_gathered = len(self.schema.columns), len(self._selection.gather)
        while True:
            said = self._say(local, self._capacity)
            said.samples = local.samples
            if local.schema is not None and said.schema_digest == self.schema.digest:
                said.items = local.items
            if self._lengths is None:
                self._lengths = Gather(self.transport, message_words(num_columns, self._capacity, num_gathered))
            write(self._lengths.message, said, num_columns)
            work = self._lengths.post()
            yield Posted("gather_lengths", work)
            self._wait(work, "stage I (gather lengths)")
            # A view of what the next step overwrites; nothing is kept of it for so long.
            world = WorldStep(self._lengths.gathered, self.transport.world_size, num_columns, num_gathered)
            self._check_agreement(world)
            if world.largest_batch <= self._capacity:
                return world
            self._capacity, self._lengths = world.largest_batch, None

    def _check_schemas(self, world: WorldStep) -> None:
        assert self.schema is not None
        if world.are_alike and world.schema_digest[0] == self.schema.digest:
            return
        differs = world.schema_digest != self.schema.digest
        wrong = (world.state == State.HAS_BATCH) & (world.batch_size > 0) & differs
        if wrong.any():
            rank = int(np.flatnonzero(wrong)[0])
            raise SchemaMismatch(f"columns of rank {rank} changed at step {self.step}; they were {self.schema.columns}")

    def _end(self, world: WorldStep) -> Outcome | None:
        """The end of the data, if this is it; raises if a rank failed."""
        if world.all_have_batches:
            return None
        if (rank := world.first(State.FAILED)) is not None:
            raise PeerFailed(rank, self.step, world.text(rank))
        if (rank := world.first(State.CLOSING)) is not None:
            return Outcome(left=rank)
        return None if (world.state == State.HAS_BATCH).any() else Outcome()

    # ---- stage II

    def _gather_candidates(self, local: LocalBatch, world: WorldStep) -> Generator[Posted, None, Tensor]:
        """Stage II: content lengths of all candidates. Nothing to do when no column is nested or nobody reads them."""
        assert self.schema is not None
        if not world.somebody_reads_candidates or (name := self._selection.nested_column(self.schema)) is None:
            return _NO_LENGTHS
        ours = torch.zeros(0, dtype=torch.int64, device="cpu")
        if local.sections is not None and local.has_samples:
            ours = local.sections.batch[name].levels[1]
        if name != self._selection.candidate_column(self.schema):
            sizes = yield from self._gather_sizes(len(ours))
        else:
            sizes = np.bincount(world.origin, world.samples[:, CANDIDATES], world.world_size).astype(np.int64)
        work = self.transport.all_gather(ours, sizes)
        yield Posted("gather_candidates", work)
        return self._wait(work, "stage II (gather candidate lengths)")

    def _gather_sizes(self, size: int) -> Generator[Posted, None, Int64s]:
        work = self.transport.all_gather(torch.tensor([size], dtype=torch.int64, device="cpu"))
        yield Posted("gather_candidates", work)
        return self._wait(work, "stage II (gather candidate lengths)").numpy()

    # ---- plan and stage III

    def _plan_and_shuffle(self, local: LocalBatch, world: WorldStep, candidate_lengths: Tensor, clock: Clock) -> Stages:
        assert self.schema is not None
        if self._selection.drop_small and (num_samples := len(world.origin)) < world.world_size:
            self.dropped_samples += num_samples
            self.step += 1
            return Outcome(dropped=True)
        remembers = self._reads_measured and world.somebody_measured
        # What the partitioner is given it may write into, so what is remembered is a copy.
        contents = candidate_lengths.numpy().copy() if remembers else None
        shuffle = Shuffle(
            self.transport,
            self.schema,
            local.sections if local.has_samples else None,
            world,
            lambda: self._world_samples(candidate_lengths, world),
            self._receive_buffer,
        )
        yield from self._agree(shuffle)
        clock.lap("plan")
        self._receive_buffer = shuffle.buffer
        work = shuffle.post()
        yield Posted("shuffle", work)
        self._wait(work, "stage III (shuffle samples)")
        self.alone = True
        step, self.step = self.step, self.step + 1
        columns = shuffle.finish()
        clock.lap("shuffle")
        if contents is not None:
            self._history.add(step, world.samples.copy(), contents, shuffle.owners)
        items = dict(zip(self.schema.names, np.add.reduce(world.items).tolist(), strict=True))
        size, rank = self.transport.world_size, self.transport.rank
        report = Report(step, rank, size, shuffle.traffic, items, self.dropped_samples, clock.seconds)
        return Outcome(columns, report, scraps=shuffle.scraps)

    def _world_samples(self, candidate_lengths: Tensor, world: WorldStep) -> WorldSamples:
        assert self.schema is not None
        columns = np.array(world.samples.T, order="C")  # always a copy
        uih, candidates, payload = map(torch.from_numpy, columns[:3])
        seconds_step, seconds, measured = self._history.measured(world)
        return WorldSamples(
            world_size=world.world_size,
            rank=torch.from_numpy(world.origin.copy()),
            uih_lengths=uih,
            num_candidates=candidates,
            candidate_lengths=candidate_lengths,
            payload_bytes=payload,
            seconds=seconds,
            seconds_step=seconds_step,
            measured=measured,
            gathered=self._selection.gathered(torch.from_numpy(columns[3:]), self.schema) if len(columns) > 3 else {},
        )

    def _agree(self, shuffle: Shuffle) -> Generator[Posted, None, None]:
        """Plan, pack, and exchange digests, so that every rank knows that all have the same plan before data moves."""
        shuffle.prepare(self.partitioner, self._notes.message)
        work = self._notes.post()
        yield Posted("plan", work)
        self._wait(work, "agreement on the plan")
        notes = self._notes.gathered
        if notes[0, 0] == PLANNED and not _any(notes[:, :2] != notes[0, :2], axis=None):
            return
        if (failed := notes[:, 0].nonzero()[0]).size:
            rank = int(failed[0])
            said = notes[rank, 3:].tobytes()[: int(notes[rank, 2])].decode("utf-8", "replace")
            what = "partitioner" if notes[rank, 0] == PARTITIONER_FAILED else "packing"
            raise PeerFailed(rank, self.step, f"{what}: {said}") from shuffle.error
        digests, counts = np.unique(notes[:, 1], return_counts=True)
        odd = np.flatnonzero(notes[:, 1] != digests[counts.argmax()])
        raise PlanMismatch(
            f"step {self.step}: the partitioner gave another plan on ranks {odd.tolist()} than on the others; "
            "it must depend on its argument alone"
        )
