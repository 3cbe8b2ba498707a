"""A process whose thread is inside C++ when it ends, for tests/test_process_ends.py (paper, section 3.3).

The thread waits in a store of torch.distributed, without the interpreter's lock, for a key that is set by Python's last
act: the destructor of an object that `sys` holds. Woken then, it asks an interpreter for the lock that is being torn
down. If nobody sets the key it comes back by itself after a second, or, for a thread that does not end, after minutes.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.balancer import attach, balance, worker
from freescale.embedding import PrioritizedEmbeddingCollection, Sgd, Table, lanes, planner
from freescale.transport import Transport, connect
from freescale.transport import background as library
from freescale.transport.background import BackgroundThread
from freescale.transport.watch import watch

_c10d: Any = dist  # torch's stubs lack what is used through this name

ENOUGH_S = 60.0
LONGEST_S = 0.5  # for a thread that never ends
WAKING_S = 2.0  # a woken thread that needs longer is not seen to end the process


class CppWait:
    """Where the thread waits, for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._store = _c10d.HashStore()
        self._seconds = seconds
        self._begun = threading.Event()
        self._inside: list[threading.Thread] = []

    def wait(self) -> None:
        """Called by the thread."""
        self._inside.append(threading.current_thread())
        self._begun.set()
        with suppress(dist.DistStoreError):
            self._store.wait(["go"], timedelta(seconds=self._seconds))
        self._inside.clear()

    def await_thread(self) -> None:
        """Called by the main thread, which then ends."""
        assert self._begun.wait(ENOUGH_S), "no thread has come"
        vars(sys)["woken_by_the_last_act"] = Waker(self._store, self._inside)


class Waker:
    """Wakes the thread when Python takes `sys` apart. By then no module has anything left that it could use."""

    def __init__(self, store: Any, inside: list[threading.Thread]) -> None:
        self._set, self._inside, self._sleep = store.set, inside, time.sleep

    def __del__(self) -> None:
        if self._inside:  # whether they are alive is not known any more
            self._set("go", "")
            self._sleep(WAKING_S)


def enter_by_watch(cpp: CppWait) -> None:
    """A deadline is looked after."""

    def look() -> bool:
        cpp.wait()
        return True

    watch.add(look)


def enter_by_stage(cpp: CppWait) -> None:
    """Distinct ids are found. The main thread hardly waits for it."""
    lanes._PATIENCE_S = lanes.LAST_PATIENCE_S = 0.01
    ask = vars(planner)["ask"]

    def slow(*arguments: Any) -> Any:
        cpp.wait()
        return ask(*arguments)

    vars(planner)["ask"] = slow
    tables = PrioritizedEmbeddingCollection([Table("item", 9, 2)], connect("local"), optimizer=Sgd(lr=0.1))
    tables.prefetch({"item": torch.tensor([1])})
    KEPT.append(tables)


def enter_by_lane(cpp: CppWait) -> None:
    """An update is applied in the background."""
    lanes._PATIENCE_S = 0.01
    lane = lanes.ThreadLane(connect("local"))

    def job(transport: Transport) -> None:
        cpp.wait()

    lane.run(job)
    KEPT.append(lane)


def enter_by_source(cpp: CppWait) -> None:
    """The next batch is loaded, for longer than the transport's deadline."""
    worker._GRACE_S = 0.01

    class Source:
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            yield {"x": torch.ones(2), "length": torch.tensor([3, 5])}
            cpp.wait()

    iterator = iter(balance(Source(), connect("local", timeout_s=0.01), "length"))
    next(iterator)
    KEPT.append(iterator)


def enter_by_destructor(cpp: CppWait) -> None:
    """A thread that is through frees what it had."""

    class Work:
        def run(self) -> None:
            pass

        def __del__(self) -> None:
            cpp.wait()

    BackgroundThread("through", Work().run, int, int).start()


def enter_and_interrupt(cpp: CppWait) -> None:
    """Somebody has no patience and interrupts the end."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    BackgroundThread("interrupted", cpp.wait, interrupt, int).start()


def enter_nothing(cpp: CppWait) -> None:
    """An epoch at hooks is left half-way. It has no thread, and from Python 3.12 on none can begin any more."""
    epochs: list[worker.Worker] = []
    atexit.register(lambda: print("the epoch has ended" if epochs[0]._ended else "the epoch goes on"))
    model = torch.nn.Linear(1, 1)
    batches = [{"x": torch.ones(2, 1), "length": torch.tensor([3, 5])}] * 9
    loader = balance(batches, connect("local"), "length")
    attach(loader, model, torch.optim.SGD(model.parameters(), lr=0.1))
    iterator = iter(loader)
    next(iterator)
    KEPT.append(iterator)
    epochs.extend(worker._live)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't create new thread at interpreter shutdown: {thread.name}")

    atexit.register(setattr, threading.Thread, "start", refuse)
    cpp._begun.set()


def enter_by_trainer(cpp: CppWait) -> None:
    """A thread that Python waits for trains when the main thread is through."""

    def train() -> None:
        while threading.main_thread().is_alive():
            time.sleep(0.001)
        batches = [{"x": torch.ones(2), "length": torch.tensor([3, 5])}] * 9
        print("trained", sum(1 for _ in balance(batches, connect("local"), "length")), "batches")

    threading.Thread(target=train).start()
    cpp._begun.set()


KEPT: list[object] = []
"""What a training script has in its module until Python ends."""


def main(enters: str, seconds: str, status: str) -> None:
    """See the module's text; `status` is how the process then ends."""
    library._PATIENCE_S = min(library._PATIENCE_S, float(seconds) / 4)
    library._LONGEST_S = LONGEST_S if float(seconds) > ENOUGH_S else library._LONGEST_S
    cpp = CppWait(float(seconds))
    globals()[f"enter_{enters}"](cpp)
    cpp.await_thread()
    print("at the end")
    if status == "error":
        raise ArithmeticError("on fire")
    sys.exit(int(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
