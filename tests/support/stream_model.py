"""A model of CUDA streams on the CPU: operations run at once, and whoever would not be ordered on a GPU is told.

Streams and events carry vector clocks. Every operation of torch on the thread that holds the model counts as enqueued
on the current stream: what it reads must have been written in an order that the streams know of, what it writes must
not be read by others any more, and memory that another stream allocated must be kept for it by `record_stream`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from freescale.embedding import device_arrays, late_check
from freescale.transport import Pending, Transport

Clock = Counter["ModelStream"]
_here = threading.local()
calls: Counter[str] = Counter()
"""How often the main thread made each call of the runtime, since the last `clear`."""


def _count(call: str) -> None:
    """Other threads make theirs sooner or later, in this step or the next."""
    if threading.current_thread() is threading.main_thread():
        calls[call] += 1


class ModelStream:
    """In the place of `torch.cuda.Stream`."""

    device = torch.device("cuda", 0)
    device_index = 0
    _made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device, priority
        ModelStream._made += 1
        self.cuda_stream = ModelStream._made
        self.clock: Clock = Counter()

    def enqueue(self) -> int:
        """Number of one more operation."""
        self.clock[self] += 1
        return self.clock[self]

    def wait_event(self, event: ModelEvent) -> None:
        _count("wait")
        self.clock |= event.clock

    def wait_stream(self, other: ModelStream) -> None:
        _count("record")
        _count("wait")
        self.clock |= other.clock

    def query(self) -> bool:
        return True


class ModelEvent:
    """In the place of `torch.cuda.Event`."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        del enable_timing, blocking
        _count("event")
        self.clock: Clock = Counter()

    def record(self, stream: ModelStream | None = None) -> None:
        _count("record")
        self.clock = Counter((stream or _stream()).clock)

    def query(self) -> bool:
        return True


_main = ModelStream()


def _stream() -> ModelStream:
    """The calling thread's current stream."""
    stream: ModelStream = getattr(_here, "stream", _main)
    return stream


def current(device: object = None) -> ModelStream:
    """See `torch.cuda.current_stream`."""
    del device
    _count("current_stream")
    return _stream()


def make_current(stream: ModelStream) -> None:
    _count("set_stream")
    _here.stream = stream


@contextmanager
def _as_current(stream: ModelStream) -> Iterator[None]:
    before, _here.stream = _stream(), stream
    try:
        yield
    finally:
        _here.stream = before


@dataclass
class _Access:
    """One operation's use of a part of an allocation: when on which stream, from which byte to which, or which rows."""

    stream: ModelStream
    number: int
    begin: int
    end: int
    writes: bool
    rows: frozenset[int] | None = None

    def overlaps(self, other: _Access) -> bool:
        if self.rows is not None and other.rows is not None:
            return not self.rows.isdisjoint(other.rows)
        return self.begin < other.end and other.begin < self.end


@dataclass
class _Memory:
    """What is known of one allocation.

    Attributes:
        owner: Stream that allocated it; None: it was there before, and stays.
        accesses: Those that a later one may have to come after.
        used: Streams that used it.
        kept: Streams that it is kept for.
    """

    owner: ModelStream | None
    accesses: list[_Access] = field(default_factory=list)
    used: set[ModelStream] = field(default_factory=set)
    kept: set[ModelStream] = field(default_factory=set)


_BY_ROWS = ("aten.index_select.default", "aten.index_copy_.default")


class StreamModel(TorchDispatchMode):
    """Checks the operations of the thread that has entered it.

    Attributes:
        faults: What is not ordered.
        operations: Operations of torch so far, by name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own lacks types
        self.faults: list[str] = []
        self.operations: Counter[str] = Counter()
        self._memory: dict[int, _Memory] = {}
        self._held: list[object] = []  # so that what is allocated later lies elsewhere

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.record_stream.default:
            raise AssertionError("record_stream is the model's own")
        out = function(*args, **kwargs)
        name = str(function)
        self.operations[name] += 1
        given: set[int] = set()
        for argument, value in zip(function._schema.arguments, [*args, *[None] * 99], strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(kwargs.get(argument.name, value)):
                given.add(_place(tensor))
                if not function.is_view:
                    rows = frozenset(args[2].tolist()) if argument.name == "self" and name in _BY_ROWS else None
                    self._use(tensor, writes, name, rows)
        for tensor in _tensors(out):
            if _place(tensor) not in given:
                self.allocated(tensor)
        return out

    def allocated(self, tensor: Tensor) -> None:
        """Note that the current stream has allocated and written a tensor."""
        stream = _stream()
        self._held.append(tensor.untyped_storage())
        written = _Access(stream, stream.enqueue(), 0, tensor.untyped_storage().nbytes(), True)
        self._memory[_place(tensor)] = _Memory(stream, [written], {stream})

    def keep(self, tensor: Tensor, stream: ModelStream) -> None:
        """See `Tensor.record_stream`."""
        self._known(tensor).kept.add(stream)

    def transfer(self, rows: Tensor, out: Tensor, stream: ModelStream) -> None:
        """Note that a stream reads one tensor and writes another, both kept for it."""
        with _as_current(stream):
            for tensor, writes in ((rows, False), (out, True)):
                self.keep(tensor, stream)
                self._use(tensor, writes, "transfer")

    def finish(self) -> None:
        """Look whether memory is kept for all streams that used it, wherever it is freed."""
        for memory in self._memory.values():
            if memory.owner is not None:
                for stream in memory.used - memory.kept - {memory.owner}:
                    self.faults.append(f"memory of {memory.owner.cuda_stream} is not kept for {stream.cuda_stream}")

    def _known(self, tensor: Tensor) -> _Memory:
        return self._memory.setdefault(_place(tensor), _Memory(None))

    def _use(self, tensor: Tensor, writes: bool, what: str, rows: frozenset[int] | None = None) -> None:
        if tensor.numel() == 0:
            return
        stream, memory = _stream(), self._known(tensor)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        new = _Access(stream, stream.enqueue(), begin, begin + (last + 1) * tensor.element_size(), writes, rows)
        memory.used.add(stream)
        for old in memory.accesses:
            if (old.writes or writes) and old.overlaps(new) and stream.clock[old.stream] < old.number:
                doing = "writing" if old.writes else "reading"
                self.faults.append(f"{what} on stream {stream.cuda_stream}: {old.stream.cuda_stream} may be {doing} it")
        memory.accesses = [
            old
            for old in memory.accesses
            if rows is not None
            or not (
                new.begin <= old.begin and old.end <= new.end and (writes or (old.stream is stream and not old.writes))
            )
        ]
        memory.accesses.append(new)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, tuple | list) else []


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


class ModelTransport(Transport):
    """A channel that moves tensors of a GPU on a stream of its own, as NCCL does, over one of host memory."""

    def __init__(self, host: Transport, model: StreamModel) -> None:
        self.rank, self.world_size = host.rank, host.world_size
        self._host, self._model, self._stream = host, model, ModelStream()

    def all_to_all(self, rows: Tensor, sent_splits: Any, received_splits: Any, out: Tensor | None = None) -> Pending:
        """See `Transport.all_to_all`."""
        with _disable_current_modes():  # what the host's channel does is no operation on a GPU
            received = self._host.all_to_all(rows, sent_splits, received_splits, out).wait()
        if out is None:
            self._model.allocated(received)
        self._stream.clock |= _stream().clock
        self._model.transfer(rows, received, self._stream)
        return _ModelPending(self._stream, received)

    def all_gather(self, block: Tensor, sizes: Any = None, out: Tensor | None = None) -> Pending:
        """See `Transport.all_gather`."""
        raise NotImplementedError("tables gather nothing from a GPU")

    def channel(self, name: str, check_sizes: bool | None = None) -> Transport:
        """See `Transport.channel`."""
        return ModelTransport(self._host.channel(name, check_sizes), self._model)

    def raise_if_failed(self) -> None:
        """See `Transport.raise_if_failed`."""
        self._host.raise_if_failed()

    def close(self) -> None:
        """See `Transport.close`."""
        self._host.close()


class _ModelPending(Pending):
    def __init__(self, stream: ModelStream, received: Tensor) -> None:
        self._stream, self._clock, self._received = stream, Counter(stream.clock), received

    def test(self) -> bool:
        return True

    def wait(self) -> Tensor:
        _stream().clock |= self._clock
        return self._received


@contextmanager
def model_of_streams() -> Iterator[StreamModel]:
    """Have `torch.cuda`'s streams be the model's; index arrays that are sent to a GPU stay on the CPU."""
    model = StreamModel()

    def empty(*shape: Any, device: object = None, pin_memory: bool = False, **options: Any) -> Tensor:
        made = torch.empty(*shape, **options)
        if device is not None:
            model.allocated(made)  # and written: the copy into it comes next
        return made

    def record_stream(tensor: Tensor, stream: ModelStream) -> None:
        _count("record_stream")
        model.keep(tensor, stream)

    def as_context(stream: ModelStream) -> AbstractContextManager[None]:
        _count("stream_context")
        return _as_current(stream)

    shim: Any = SimpleNamespace(**{**vars(torch), "empty": empty})
    shim.ones = lambda *shape, device, **options: torch.ones(*shape, **options)
    with (
        patch.multiple(
            torch.cuda, Stream=ModelStream, Event=ModelEvent, current_stream=current, set_stream=make_current,
            stream=as_context, current_device=lambda: 0, device=lambda device: nullcontext(),
        ),
        patch.object(Tensor, "record_stream", record_stream),
        patch.object(device_arrays, "torch", shim),
        patch.object(late_check, "torch", shim),
    ):  # fmt: skip
        yield model
