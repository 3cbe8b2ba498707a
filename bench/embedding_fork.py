"""Starts the ranks of a bench again and again from one process that has imported everything once (beside 5.2).

NCCL reads how it shall connect once a process, so every link needs new ones; importing TorchRec takes longer than what
many of them measure. This process imports it, touches no GPU, and forks the ranks of one launch after the other.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch then counts GPUs without touching the driver

from .torchrec_versions import run_without_gpu, supply_moved_modules

_ports = itertools.count(random.randrange(12_000, 30_000))  # each is given once
_GRACE_S = 3.0  # for the other ranks to say what they saw when one has failed
_NOT_INITIALISED = 3  # of the CUDA driver


def main() -> None:
    """Run the launches whose settings' paths come line by line, and answer each with a line."""
    supplied = supply_moved_modules()
    if sys.argv[1] == "cpu":
        run_without_gpu()
    import torchrec

    run_rank = importlib.import_module(f"{__package__}.{sys.argv[2]}").run_rank
    _answer(ready=torchrec.__version__, supplied=supplied)
    for line in sys.stdin:
        path, port = Path(line.strip()), _free_port()
        world_size = json.loads(path.read_text())["world_size"]
        started = time.time()
        how = "fork" if _driver_untouched() else "spawn"
        context: Any = multiprocessing.get_context(how)
        ranks = [context.Process(target=run_rank, args=(path, rank, port)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        _answer(codes=_wait(ranks), how=how, seconds=time.time() - started)


def _wait(ranks: list[Any]) -> list[int | None]:
    """Wait for all ranks; when one has failed the others get a little time and are then ended."""
    failed_at: float | None = None
    while any(rank.is_alive() for rank in ranks):
        if failed_at is None and any(rank.exitcode not in (None, 0) for rank in ranks):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + _GRACE_S:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    return [rank.exitcode for rank in ranks]


def _driver_untouched() -> bool:
    """Whether this process has not initialised CUDA, so that its children may use it; true where there is no CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == _NOT_INITIALISED
    except OSError:
        return True


def _free_port() -> int:
    """One below those that the system gives to connections, which could take it before rank 0 does."""
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("of 1000 ports from 12,000 on none is free")


def _answer(**said: object) -> None:
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
