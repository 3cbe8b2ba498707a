"""NCCL on a GPU as far as its ends go, on the CPU: who aborts a communicator waits for all kernels of the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.transport import stream_pool
from freescale.transport.exchange import Exchange, plan_all_to_all
from freescale.transport.lane import HostTransport
from freescale.transport.nccl import NcclEngine

from patience import PATIENCE_S


class ModelDevice:
    """A GPU whose kernels wait for peers.

    Attributes:
        answers: Peers come: kernels end at once.
        done: What has happened, in order.
        launched: What was begun.
    """

    def __init__(self) -> None:
        self.answers = True
        self.done: list[str] = []
        self.launched: list[ModelWork] = []
        self._changed = threading.Condition()
        self._running: list[ModelWork] = []

    def launch(self, work: ModelWork) -> None:
        self.launched.append(work)
        with self._changed:
            if not self.answers:
                self._running.append(work)

    def end(self, group: ModelGroup | None = None) -> None:
        """End the kernels of a communicator, or all."""
        with self._changed:
            self._running = [work for work in self._running if group is not None and work.group is not group]
            self._changed.notify_all()

    def is_running(self, work: ModelWork | None = None) -> bool:
        with self._changed:
            return bool(self._running) if work is None else work in self._running

    def synchronize(self) -> bool:
        """As `cudaFree` does. Gives up where a test has failed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, PATIENCE_S)


class ModelWork:
    def __init__(self, group: ModelGroup) -> None:
        self.group = group

    def is_completed(self) -> bool:
        return not self.group.device.is_running(self)

    def wait(self) -> None:
        pass  # the current stream waits


class ModelGroup:
    """In the place of `torch.distributed.ProcessGroupNCCL`."""

    class Options:
        _timeout: Any = None

    device: ModelDevice

    def __init__(self, store: Any, rank: int, world_size: int, options: Options) -> None:
        del store, rank, world_size, options
        self.device.done.append("communicator")

    def alltoall(self, targets: list[Tensor], sources: list[Tensor], options: object) -> ModelWork:
        del targets, sources, options
        work = ModelWork(self)
        self.device.launch(work)
        return work

    def abort(self) -> None:
        self.device.end(self)
        self.device.done.append("aborted" if self.device.synchronize() else "hung")


class ModelStream:
    """A stream behind all kernels of the device."""

    device: ModelDevice

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device
        self.device.done.append(f"stream {priority}")

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return not self.device.is_running()


class _Event:
    def record(self, stream: object = None) -> None:
        pass


@contextmanager
def model_of_nccl() -> Iterator[ModelDevice]:
    """Put the model in the place of torch's."""
    device = ModelDevice()
    group = type("Group", (ModelGroup,), {"device": device})
    stream = type("Stream", (ModelStream,), {"device": device})
    with (
        patch.object(dist, "ProcessGroupNCCL", group, create=True),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "Stream", stream),
        patch.object(torch.cuda, "Event", _Event),
        patch.object(torch.cuda, "current_stream", lambda device=None: stream()),
        patch.object(stream_pool, "_filled", set()),
    ):
        yield device


def make_engine(timeout_s: float) -> NcclEngine:
    """An engine between this rank and itself."""
    store: Any = dist
    return NcclEngine(store.HashStore(), 0, 1, timeout_s)


def begin(engine: NcclEngine) -> Exchange:
    """Enqueue an exchange."""
    exchange = plan_all_to_all(0, 1, torch.arange(4), [4], [4], None, ("cpu",))
    exchange.ready = torch.cuda.Event()
    engine.begin(exchange, 7, _never)
    return exchange


def _never() -> HostTransport:
    raise AssertionError("NCCL has its own way to meet")
