"""`balance(dataloader, …)`: a loader that yields balanced batches of the user's own type (paper, section 3.1)."""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..transport import Transport, TransportTimeout
from .adapters.adapt import Adapter, adapter_for, adapter_from
from .arguments import check_arguments, lengths_from, refuse_in_worker, select_columns
from .batches.batch import JaggedBatch
from .iterator import BalancedIterator
from .loss_scaled import LossScaled
from .partitioners.partition import greedy_batch_size
from .plan import Partitioner, reads_measured
from .protocol.header import State
from .protocol.payload import Sections
from .protocol.protocol import Protocol
from .protocol.schema import Schema
from .protocol.step import LocalBatch
from .report import Report
from .reshard import check_state
from .source import ReplayedSource, Source, check_share, source_of
from .worker import Worker

T = TypeVar("T")
Lengths = str | Sequence[str] | Callable[[Any], Tensor]


class BalancedLoader(Generic[T]):
    """A loader whose global batches are balanced over the ranks before they are trained on. Alias: `balance`.

    Collective: every rank makes one, with the same options, and iterates the result. Each iteration is one epoch; it
    lasts until the last rank has run out of data, and every sample is delivered once, on some rank. Ranks that run out
    early receive their share of what the others still have.

    Source: FreeScale, sections 3.1 and 4.1, Algorithm 1.

    Args:
        dataloader: This rank's batches: a DataLoader, StatefulDataLoader, `read_parquet`, a torchdata node, or any
            object that can be iterated again each epoch. Batches are any nest of dicts, tuples and dataclasses of
            tensors with the batch on dim 0, KeyedJaggedTensor, JaggedTensor, jagged nested tensors, or JaggedBatch, in
            host memory.
        transport: From `connect` or `local_group`.
        lengths: What makes a sample long: a column, several (added up), or a function of the user's batch that gives
            integers of shape [batch_size].
        partitioner: Gives each sample its rank; see `WorldSamples`.
        candidates: Column whose lengths are the number of candidates, when no nested column shows them.
        gather: Dense columns that the partitioner wants to see for the whole world, besides those it asks for itself.
        jagged: For batches that hold jagged features as plain tensors: values field → lengths field, or for nested
            ones → (counts field, lengths field).
        example: A batch, of any size, for ranks that may never see one. Only for types that describe themselves by a
            class of the user's (dataclasses, NamedTuples).
        prefetch: Balanced batches to have ready ahead of the trainer, by a thread whose torch operations use one core.
        drop_small: Drop global batches with fewer samples than ranks, instead of giving some ranks empty batches.
        pin_memory: Put balanced batches into pinned memory.

    Attributes:
        last_report: About the batch handed out last; None before the first.
        lets_thread_sleep: A batch that is taken now has another one made only at `wake_thread`, or when the next is
            taken: for whoever takes batches ahead, and has a better moment for a thread that needs the interpreter.

    The other attributes are those of `dataloader`.

    Raises:
        ValueError, TypeError: An argument breaks a rule above.
        RuntimeError: Called inside a DataLoader worker.
    """

    def __init__(
        self,
        dataloader: Iterable[T],
        transport: Transport,
        lengths: Lengths,
        partitioner: Partitioner = greedy_batch_size,
        *,
        candidates: str | None = None,
        gather: str | Sequence[str] = (),
        jagged: Mapping[str, str | tuple[str, ...]] | None = None,
        example: Any = None,
        prefetch: int = 2,
        drop_small: bool = False,
        pin_memory: bool = False,
    ) -> None:
        refuse_in_worker()
        check_arguments(transport, lengths, partitioner, jagged, prefetch, pin_memory)
        self.dataloader = dataloader
        self.last_report: Report | None = None
        self._source: Source = source_of(dataloader, lambda batch: self._flatten(batch).fingerprint())
        check_share(dataloader, transport.rank, transport.world_size)
        self._transport = transport.channel("balancer", check_sizes=False)
        self._partitioner = partitioner
        self._measure_lengths = lengths if callable(lengths) else None
        self._jagged = dict(jagged or {})
        asked = (*getattr(partitioner, "gather", ()), *((gather,) if isinstance(gather, str) else gather))
        self._selection = select_columns(lengths, candidates, asked, drop_small, self._jagged)
        self._adapter: Adapter[Any] | None = None
        self._provisional = False  # the first batch was empty, so its types may be anything
        self._schema: Schema | None = None  # of the first batch; the adapter sees to it that later ones are alike
        if example is not None:
            self._adapter = adapter_for(example, jagged=self._jagged)
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._epoch = 0
        self._loaded: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None  # of the running epoch, after the batch handed out last
        self._next: dict[str, Any] | None = None  # of an epoch that ended: how the next one begins
        self._worker: Worker | None = None
        self._paced = False  # by hooks; see hooks.py
        self.lets_thread_sleep = False
        self._without_room: Worker | None = None  # whose last entry was taken without making room
        self._seconds: tuple[int, float] = (-1, math.nan)
        self._warned = False
        # A worker keeps its loader, so by then it has ended.
        weakref.finalize(self, self._transport.close).atexit = False

    # ---- iterating

    def __iter__(self) -> Iterator[T]:
        return (batch for batch, _ in self.start())

    def with_reports(self) -> Iterator[tuple[T, Report]]:
        """Iterate over (batch, report) pairs; the report has what the loss must be scaled by."""
        return self.start()

    def with_loss_scale(self, column: str | None = None) -> LossScaled[T]:
        """An iterable over (batch, `report.loss_scale(column)`) pairs, for trainers that take batches ahead."""
        return LossScaled(self, column)

    def __len__(self) -> int:
        """Batches of the wrapped loader on this rank. An epoch has as many steps as the rank with the most."""
        return len(self.dataloader)  # type: ignore[arg-type]  # as for any loader: TypeError when it has no length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataloader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataloader, name)

    def start(self) -> BalancedIterator[T]:
        """Begin an epoch: an iterator over (batch, report) pairs. An epoch that is still running is left.

        A state that was loaded is where it begins until a batch was taken: trainers call `iter` once to try it.
        """
        refuse_in_worker()
        self.close()
        self._seconds, self.last_report = (-1, math.nan), None
        state = self._fresh_state() if self._loaded is None else copy.deepcopy(self._loaded)
        if self._loaded is not None:  # steps of an iteration that was only tried may have been learned from
            self._teach_partitioner(state["partitioner"])
        self._next = None
        protocol = Protocol(
            self._transport,
            self._selection,
            self._partitioner,
            step=state["step"],
            epoch=state["epoch"],
            measured=lambda: self._seconds,
        )
        protocol.dropped_samples = state["dropped_samples"]
        batches, error = self._start_source(state)
        self._state = state
        self._worker = Worker(
            protocol,
            batches,
            self._flatten,
            lambda columns: self._restore(protocol, columns),
            self._source,
            prefetch=self._prefetch,
            epoch=state["epoch"],
            exhausted=state["exhausted"],
            end_state=state["source"] if state["exhausted"] else None,
            error=error,
            paced=self._paced,
        )
        return BalancedIterator(self, self._worker)

    def _start_source(self, state: dict[str, Any]) -> tuple[Iterator[Any], Exception | None]:
        """Begin reading. A failure is told to all ranks in the first step, so that none waits for this one."""
        try:
            if state["exhausted"]:
                self._source.go_to_next(state["source"])
                return iter(()), None
            batches = self._source.start(state["source"])
            if state["source"] is None:  # what shuffles draws its order here, so a state has to hold it from now on
                state["source"] = self._source.state(lambda: 0)
            return batches, None
        except Exception as error:
            return iter(()), error

    def pace(self, by_hooks: bool) -> None:
        """Have later epochs run where `advance` is called, instead of in a thread, or no longer. See `attach`."""
        self._paced = by_hooks
        if self._worker is not None and not by_hooks:
            self._worker.run_freely()

    def advance(self, passing: Collection[str]) -> None:
        """Go on with balancing as far as is possible without waiting, if the running epoch is paced."""
        if self._worker is not None:
            self._worker.advance(passing)

    def wake_thread(self) -> None:
        """Have the batch made that `lets_thread_sleep` put off, if it did."""
        worker, self._without_room = self._without_room, None
        if worker is not None:
            worker.make_room()

    def close(self) -> None:
        """Leave the running epoch, and wait until no thread is left. Peers that go on get `PeerClosed`.

        Raises:
            TransportTimeout: Peers neither went on nor left within the transport's deadline.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.close()
        if not worker.join(2 * self._transport.timeout_s):
            raise TransportTimeout(
                f"the balancer's thread did not end within {2 * self._transport.timeout_s} s of closing; "
                "the wrapped loader, or a peer, is stuck"
            )

    # ---- batches

    def _flatten(self, batch: T) -> LocalBatch:
        if self._adapter is None or self._provisional:
            self._adapter = adapter_for(batch, jagged=self._jagged)
            self._schema = None
        columns = self._adapter.flatten(batch)
        # Memory is read by its address from here on. What `flatten` gives back as it is was looked at by the adapter.
        if self._schema is None or not (columns is batch or all(c.values.is_cpu for c in columns.columns.values())):
            self._selection.check(columns)
        if self._schema is None:
            schema = Schema.of(columns, self._adapter.describe())
            schema.to_bytes()  # one that is too large is found here
            self._schema, self._provisional = schema, columns.batch_size == 0
        lengths = None
        if self._measure_lengths is not None:
            lengths = lengths_from(self._measure_lengths, batch, columns.batch_size)
        sections = Sections(columns, self._schema)
        samples = self._selection.sample_words(sections, self._schema, lengths)
        return LocalBatch(State.HAS_BATCH, self._schema, sections, samples, sections.items)

    def _restore(self, protocol: Protocol, columns: JaggedBatch) -> Any:
        if self._adapter is None:
            if protocol.type_description is None:
                raise ValueError(
                    "this rank never saw a batch and the batch type does not describe itself; "
                    "pass example= to balance() on every rank"
                )
            self._adapter = adapter_from(protocol.type_description)
        return self._adapter.restore(columns.pin_memory() if self._pin_memory else columns)

    # ---- measured seconds

    @property
    def reads_seconds(self) -> bool:
        """Whether the partitioner reads the compute seconds of steps; to measure them is of no use otherwise."""
        return reads_measured(self._partitioner)

    @contextlib.contextmanager
    def measure(self, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """Time the compute of a step, for partitioners that use measured seconds.

        Put it around forward and backward, without anything that waits for other ranks.

        Args:
            clock: Seconds; `time.thread_time` where ranks share cores.
        """
        started = clock()
        yield
        self.record_seconds(clock() - started)

    def record_seconds(self, seconds: float, step: int | None = None) -> None:
        """Tell the compute seconds of a step, measured by other means.

        Args:
            seconds: Without waiting for other ranks.
            step: `report.step` of the batch; by default of the one handed out last.
        """
        if not seconds >= 0 or not math.isfinite(seconds):
            raise ValueError(f"seconds must be finite and at least 0, got {seconds}")
        if self.last_report is not None:
            self._seconds = (self.last_report.step if step is None else step, seconds)

    # ---- state

    @property
    def running_state(self) -> dict[str, Any] | None:
        """Where the running epoch stands, for `state_dict` of whoever takes batches ahead of the trainer."""
        return self._state

    def state_dict(self, at: dict[str, Any] | None = None) -> dict[str, Any]:
        """What to load to go on with the first batch that was not handed out yet. Every rank saves its own.

        Args:
            at: An earlier `running_state`: go on with the batch that was handed out next then.

        Raises:
            ValueError: An epoch is under way and the wrapped loader shuffles without a state of its own.
        """
        state = at or self._state or self._loaded or self._next or self._fresh_state()
        if (at or self._state) and state["step"] and isinstance(self._source, ReplayedSource):
            self._source.refuse_shuffling()
        return copy.deepcopy(state)

    def _fresh_state(self) -> dict[str, Any]:
        """The state of an epoch that has not begun."""
        partitioner = self._partitioner
        return {
            "rank": self._transport.rank,
            "world_size": self._transport.world_size,
            "step": 0,
            "epoch": self._epoch,
            "source": None,
            "exhausted": False,
            "dropped_samples": 0,
            "partitioner": copy.deepcopy(partitioner.state_dict()) if hasattr(partitioner, "state_dict") else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next iteration. All ranks must load states of the same step.

        Raises:
            ValueError: It is not a state of this rank of a balanced loader; `reshard` makes those of another number of
                ranks.
        """
        check_state(state)
        saved, here = (state["rank"], state["world_size"]), (self._transport.rank, self._transport.world_size)
        if saved != here:
            raise ValueError(
                f"state: it was saved by rank {saved[0]} of {saved[1]}, but this is rank {here[0]} of {here[1]}; "
                "each rank has to load its own; for another number of ranks see freescale.balancer.reshard"
            )
        self.close()
        loaded = copy.deepcopy(dict(state))
        self._teach_partitioner(loaded["partitioner"])
        self._loaded, self._state, self._epoch = loaded, None, loaded["epoch"]

    @property
    def has_loaded_state(self) -> bool:
        """Whether a state was loaded, and no batch was taken since."""
        return self._loaded is not None

    def forget_loaded_state(self) -> None:
        """Have the next iteration begin anew, though a state may have been loaded for it."""
        self._loaded = None

    def _teach_partitioner(self, learned: Any) -> None:
        if learned is not None and hasattr(self._partitioner, "load_state_dict"):
            self._partitioner.load_state_dict(copy.deepcopy(learned))

    def _finished(self, state: dict[str, Any]) -> None:
        """The epoch ended by itself; a state saved now begins the next one."""
        self._worker = self._loaded = None
        self._epoch, self._state, self._next = state["epoch"], None, state

    def _hand_out(self, report: Report, state: dict[str, Any]) -> None:
        previous, self.last_report, self._state, self._loaded = self.last_report, report, state, None
        unread = previous is not None and not previous.scale_was_read and not self._warned
        if previous is not None and unread and len(set(previous.batch_sizes)) > 1:
            self._warned = True
            warnings.warn(
                f"ranks had {min(previous.batch_sizes)} to {max(previous.batch_sizes)} samples in step {previous.step} "
                "and report.loss_scale() was not read: gradients averaged over ranks are then not those of the mean",
                stacklevel=4,
            )


balance = BalancedLoader
"""Wrap a DataLoader so that its batches are balanced over the ranks: `BalancedLoader`, by the name to call it."""
