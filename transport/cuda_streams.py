"""The few CUDA calls of a copy engine: copies, flags, memory that processes share (paper, sections 3.3 and 5.3).

Nothing here launches a kernel: copies between GPUs, D2H and H2D are done by copy engines, and flags by the streams. (A
copy within one GPU, which is what a rank does with the piece that it keeps, needs multiprocessors for a moment,
whichever CUDA call makes it: `cudaMemcpyFlagPreferOverlapWithCompute` does not change that on an H200.)
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import TransportError, Unavailable
from .exchange import Exchange
from .kept_events import current_stream, free_events, record
from .slots import low

SEND, RECEIVE = 0, 1
_LEAST_CONNECTIONS = 8
HANDLE_BYTES = 64
_NON_BLOCKING = 1
_PORTABLE_AND_MAPPED = 3
_WAIT, _WRITE = 1, 2  # as the driver numbers them
_MOST_AT_ONCE = 8
_OPERATION_WORDS = 6  # of 64 bits: kind, address, value, flags (at least a count; in order), and two that are not used


class Streams(Protocol):
    """A sending and a receiving stream. Addresses are integers; `stream` is SEND or RECEIVE."""

    def on_device(self) -> AbstractContextManager[object]:
        """Around calls below: a thread may have another device current, or none yet. `nothing` where none is needed."""

    def use(self) -> None:
        """A channel begins to use them. Raises Unavailable when too many streams of the process would wait."""

    def rest(self) -> None:
        """The channel was closed; another may use them."""

    def adopt(self, exchange: Exchange, sends: bool = True) -> None:
        """Order the streams behind `exchange.ready`, and keep its memory until they are through.

        Without `sends` the receiving stream alone has to do with this exchange. Then come its copies, waits and writes,
        and `joined`. Flags may be passed on to the device as late as that, in order.
        """

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Enqueue a copy of bytes."""

    def wait(self, stream: int, address: int, count: int) -> None:
        """Let the stream wait until the flag shows at least a count (see `slots.has_reached`)."""

    def write(self, stream: int, address: int, count: int) -> None:
        """Let the stream write a count to a flag, after everything before."""

    def joined(self, flags: Sequence[tuple[int, int]] = (), sends: bool = True) -> Callable[[], object]:
        """A function that makes the current stream wait for all enqueued up to now, and for flags to show counts."""

    def identify(self, address: int) -> tuple[object, int]:
        """Which allocation an address is in: something that no other allocation shares, and where it begins."""

    def export(self, base: int) -> bytes:
        """How other processes open the allocation that begins here. HANDLE_BYTES long."""

    def open(self, handle: bytes) -> int:
        """Map another process's device memory; returns its address here."""

    def register(self, address: int, size: int) -> int:
        """Let the device use host memory; returns its address there."""

    def pinned(self, size: int) -> Tensor:
        """Host memory that the device can use at the same address, all zero. Shape [size], uint8."""


def check_connections() -> None:
    """Refuse a process in which a waiting stream could stop the others.

    Raises:
        Unavailable: CUDA_DEVICE_MAX_CONNECTIONS is below 8, its default.
    """
    if num_connections() < _LEAST_CONNECTIONS:
        raise Unavailable(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {num_connections()}: streams would share queues, and one that waits for "
            f"a peer would stop the others; leave it unset, or set it to {_LEAST_CONNECTIONS} or more"
        )


def num_connections() -> int:
    """Queues between this process and its GPU, which streams share. Seven of eight may hold a waiting stream."""
    told = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(32, int(told)) if told.isdigit() and int(told) > 0 else _LEAST_CONNECTIONS


def most_channels() -> int:
    """How many channels may move CUDA tensors at once: each has two streams that may wait.

    Example:
        >>> most_channels() >= 3
        True
    """
    return (num_connections() - 1) // 2


def check_installation(what: str) -> None:
    """Refuse where the CUDA bindings are missing.

    Raises:
        Unavailable: No cuda-bindings, or no GPU.
    """
    if not torch.cuda.is_available():
        raise Unavailable(
            f"{what}: no CUDA GPU is available to torch: install a CUDA build of torch, and its driver (nvidia-smi)"
        )
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        major = (torch.version.cuda or "13").partition(".")[0]
        raise Unavailable(f"{what}: cuda-bindings is not installed: pip install 'cuda-bindings=={major}.*'")


class CudaStreams:
    """Streams of one device, of our own: torch's are from a pool that the trainer's streams come from too.

    Args:
        device: Index of the CUDA device.
    """

    def __init__(self, device: int) -> None:
        check_connections()
        check_installation("copies between GPUs")
        from cuda.bindings import driver, runtime

        self._driver, self._runtime = driver, runtime
        self._buffer_id = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        self._device = torch.device("cuda", device)
        with torch.cuda.device(self._device):
            _, highest = self._done(runtime.cudaDeviceGetStreamPriorityRange(), "cudaDeviceGetStreamPriorityRange")
            made = [
                int(self._done(runtime.cudaStreamCreateWithPriority(_NON_BLOCKING, highest), "cudaStreamCreate"))
                for _ in range(2)
            ]
        self._handles = [driver.CUstream(raw) for raw in made]
        self._index = device
        self._adopted: list[Exchange | None] = [None, None]  # by streams that have nothing to do with it so far
        self._to_keep: list[Exchange | None] = [None, None]  # whose memory streams will use that have copied none yet
        self._copied: list[torch.cuda.Stream] = []
        self._bases: dict[int, int] = {}
        self._streams = [torch.cuda.ExternalStream(raw, self._device) for raw in made]
        self._make_room_for_flags()

    def _make_room_for_flags(self) -> None:
        """For what one call hands to the driver: each call takes microseconds, whatever it is for."""
        made = [self._driver.CUstreamBatchMemOpParams() for _ in range(_MOST_AT_ONCE)]
        self._at_once = [made[:number] for number in range(_MOST_AT_ONCE + 1)]
        self._words: list[memoryview[int]] = []
        for each in made:
            memory = (ctypes.c_char * (8 * _OPERATION_WORDS)).from_address(each.getPtr())
            self._words.append(memoryview(memory).cast("B").cast("Q"))
            self._words[-1][3] = 0
        self._num_noted = 0
        self._noted_for = SEND

    def on_device(self) -> AbstractContextManager[object]:
        """See `Streams.on_device`."""
        if torch.cuda.current_device() == self._index:
            return nothing
        return torch.cuda.device(self._device)

    def use(self) -> None:
        """See `Streams.use`."""
        _in_use.add(self)
        most = most_channels()
        if len(_in_use) > most:
            _in_use.discard(self)
            raise Unavailable(
                f"{most} channels of this process move CUDA tensors already, with two streams each that may wait for "
                f"peers; when as many streams wait as there are connections ({num_connections()}), all other work "
                "stops too: close a channel, or set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process uses CUDA"
            )

    def rest(self) -> None:
        """See `Streams.rest`."""
        _in_use.discard(self)

    def adopt(self, exchange: Exchange, sends: bool = True) -> None:
        """See `Streams.adopt`. Calls to CUDA cost microseconds: a stream that gets nothing to do is left out."""
        assert exchange.ready is not None, "only CUDA tensors come here"
        self._adopted = [exchange if sends else None, exchange]
        self._to_keep = self._adopted.copy()
        self._copied = []

    def _come_after_ready(self, stream: int, exchange: Exchange) -> None:
        """The first thing that a stream does for an exchange."""
        if self._num_noted:
            self._pass_on()
        self._adopted[stream] = None
        assert exchange.ready is not None, "only CUDA tensors come here"
        exchange.ready.wait(self._streams[stream])

    def _keep(self, stream: int, exchange: Exchange) -> None:
        """Before a stream copies for the first time: the memory is not to serve others until it is through."""
        self._to_keep[stream] = None
        ours = self._streams[stream]
        self._copied.append(ours)
        exchange.rows.record_stream(ours)
        exchange.out.record_stream(ours)

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """See `Streams.copy`."""
        if (exchange := self._adopted[stream]) is not None:
            self._come_after_ready(stream, exchange)
        if (exchange := self._to_keep[stream]) is not None:
            self._keep(stream, exchange)
        if self._num_noted:
            self._pass_on()
        result = self._driver.cuMemcpyAsync(target, source, size, self._handles[stream])
        if result[0]:
            self._done(result, "cuMemcpyAsync")

    def wait(self, stream: int, address: int, count: int) -> None:
        """See `Streams.wait`."""
        self._note(stream, _WAIT, address, count)

    def write(self, stream: int, address: int, count: int) -> None:
        """See `Streams.write`."""
        self._note(stream, _WRITE, address, count)

    def _note(self, stream: int, kind: int, address: int, count: int) -> None:
        """Remember what a stream has to do with a flag. Only of one stream at a time: a full one blocks the host."""
        if (exchange := self._adopted[stream]) is not None:
            self._come_after_ready(stream, exchange)
        number = self._num_noted
        if number and (number == _MOST_AT_ONCE or self._noted_for != stream):
            self._pass_on()
            number = 0
        words = self._words[number]
        words[0], words[1], words[2] = kind, address, low(count)
        self._noted_for, self._num_noted = stream, number + 1

    def _pass_on(self) -> None:
        """Enqueue what was noted, in order."""
        number, self._num_noted = self._num_noted, 0
        stream = self._handles[self._noted_for]
        if number > 1:
            result = self._driver.cuStreamBatchMemOp(stream, number, self._at_once[number], 0)
            if result[0]:
                self._done(result, "cuStreamBatchMemOp")
            return
        kind, address, count = self._words[0][:3]
        if kind == _WAIT:
            self.wait_on(stream, address, count)
            return
        result = self._driver.cuStreamWriteValue32(stream, address, count, 0)
        if result[0]:
            self._done(result, "cuStreamWriteValue32")

    def wait_on(self, stream: Any, address: int, count: int) -> None:
        """Let any stream, by its handle, wait until a flag shows at least a count."""
        result = self._driver.cuStreamWaitValue32(stream, address, low(count), 0)
        if result[0]:
            self._done(result, "cuStreamWaitValue32")

    def joined(self, flags: Sequence[tuple[int, int]] = (), sends: bool = True) -> Callable[[], object]:
        """See `Streams.joined`."""
        del sends  # streams that did nothing are known
        if self._num_noted:
            self._pass_on()
        self._adopted, self._to_keep = [None, None], [None, None]
        return _Joined(self, self._index, flags, self._copied)

    def identify(self, address: int) -> tuple[object, int]:
        """See `Streams.identify`."""
        result = self._driver.cuPointerGetAttribute(self._buffer_id, address)
        number = int(result[1] if not result[0] else self._done(result, "cuPointerGetAttribute"))
        base = self._bases.get(number)
        if base is None:
            found, _ = self._done(self._driver.cuMemGetAddressRange(address), "cuMemGetAddressRange")
            base = self._bases[number] = int(found)
        return number, base

    def export(self, base: int) -> bytes:
        """See `Streams.export`."""
        with torch.cuda.device(self._device):
            result = self._runtime.cudaIpcGetMemHandle(base)
        if result[0]:
            raise Unavailable(
                f"this memory cannot be shared with other processes ({_name(result[0])}): unset expandable_segments "
                "in PYTORCH_CUDA_ALLOC_CONF, or choose CopyOptions(inside='segment')"
            )
        return bytes(result[1].reserved)

    def open(self, handle: bytes) -> int:
        """See `Streams.open`."""
        wanted = self._runtime.cudaIpcMemHandle_t()
        wanted.reserved = handle
        with torch.cuda.device(self._device):
            result = self._runtime.cudaIpcOpenMemHandle(wanted, 1)
            if result[0]:
                raise Unavailable(
                    f"this GPU cannot open memory of a peer's ({_name(result[0])}): without peer access, or between "
                    "containers that do not share a PID namespace, choose CopyOptions(inside='segment')"
                )
        return int(result[1])

    def register(self, address: int, size: int) -> int:
        """See `Streams.register`."""
        with torch.cuda.device(self._device):
            self._done(self._runtime.cudaHostRegister(address, size, _PORTABLE_AND_MAPPED), "cudaHostRegister")
            return int(self._done(self._runtime.cudaHostGetDevicePointer(address, 0), "cudaHostGetDevicePointer"))

    def pinned(self, size: int) -> Tensor:
        """See `Streams.pinned`."""
        return torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _done(self, result: tuple[Any, ...], what: str) -> Any:
        if result[0]:
            raise TransportError(f"{what}: {_name(result[0])}")
        return result[1] if len(result) == 2 else result[1:]


_in_use: set[CudaStreams] = set()
nothing = nullcontext()


class _Joined:
    """Makes the current stream of a device wait for what streams have copied by now, and for flags."""

    def __init__(
        self, owner: CudaStreams, device: int, flags: Sequence[tuple[int, int]], streams: Sequence[torch.cuda.Stream]
    ) -> None:
        self._owner, self._device, self._flags = owner, device, flags
        self._free, self._events = free_events(device), list[torch.cuda.Event]()
        for stream in streams:
            self._events.append(record(device, stream))

    def __call__(self) -> None:
        stream = current_stream(self._device)
        for event in self._events:
            event.wait(stream)
        if self._flags:
            with self._owner.on_device():
                for address, count in self._flags:
                    self._owner.wait_on(stream.cuda_stream, address, count)

    def __del__(self) -> None:
        self._free.extend(self._events)  # nobody will wait for them any more


def _name(error: Any) -> str:
    return f"{getattr(error, 'name', error)} ({int(error)})"
