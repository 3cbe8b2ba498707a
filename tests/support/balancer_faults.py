"""One rank in trouble while batches are balanced: what the ranks say, as real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from freescale.balancer import Column, JaggedBatch, PeerClosed, balance
from freescale.transport import Transport, connect, local_group

from standing_still import stand_still

TIMEOUT_S = 6.0  # where the others find out by that
PATIENCE_S = 60.0
STEPS = 40
_kept: list[object] = []  # as the variables of a script are, until Python takes them away at its end


class Batches:
    def __init__(self, transport: Transport, trouble: str) -> None:
        self.rank, self.trouble = transport.rank, trouble

    def __iter__(self) -> Iterator[JaggedBatch]:
        for step in range(STEPS):
            if self.rank == 1 and step == 3:
                if self.trouble == "loader raises":
                    raise OSError("disk on fire")
                if self.trouble == "killed while loading":
                    os.kill(os.getpid(), signal.SIGKILL)
            lengths = torch.tensor([3, 1 + step % 5])
            yield JaggedBatch({"uih": Column(torch.arange(int(lengths.sum())), (lengths,))}, 2)


def train(transport: Transport, trouble: str) -> None:
    def partition(world: Any) -> Any:
        wrong = trouble == "partitioner differs" and transport.rank == 1
        return world.rank * 0 if wrong else world.rank

    loader = balance(Batches(transport, trouble), transport, "uih", partition)
    batches = iter(loader)
    for step, _ in enumerate(batches):
        time.sleep(0.01)
        if transport.rank == 1 and step == 3:
            if trouble == "trainer raises":
                raise RuntimeError("loss is NaN")
            if trouble == "killed while training":
                os.kill(os.getpid(), signal.SIGKILL)
            if trouble == "stopped for a while":
                stand_still(2 * TIMEOUT_S + 4)
            if trouble == "leaves early":
                loader.close()
                return
            if trouble == "exits":
                sys.exit(3)
            if trouble == "leaves without a word":
                _kept.append(batches)
                return


def balance_alone_first() -> None:
    """As for an evaluation: something of the balancer's is to be told of the process's end before any transport is."""
    (alone,) = local_group(1)
    lengths = torch.tensor([3, 1])
    for _ in balance([JaggedBatch({"uih": Column(torch.arange(4), (lengths,))}, 2)], alone, lengths="uih"):
        pass


def main() -> None:
    backend, trouble = sys.argv[1:]
    balance_alone_first()
    warnings.filterwarnings("ignore", "ranks had .*loss_scale")
    if backend == "process_group":
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    else:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()  # some ranks take seconds to start
    is_silent = trouble.startswith(("killed", "stopped"))
    transport = connect(backend, timeout_s=TIMEOUT_S if is_silent else PATIENCE_S)
    started = time.monotonic()
    try:
        train(transport, trouble)
    except PeerClosed as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error} after {time.monotonic() - started:.1f} s", flush=True)
        raise
    else:
        print("done", flush=True)


if __name__ == "__main__":
    main()
