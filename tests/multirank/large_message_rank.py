"""One rank of two that exchange a message of more than 2 GiB beside a small one."""

from __future__ import annotations

import sys

import torch

from freescale.transport import Transport, connect

ROWS = 2**31 + 4096
MARK = 1000


def main(backend: str) -> None:
    if backend == "process_group":
        torch.distributed.init_process_group("gloo")
    transport = connect(backend, timeout_s=300)
    sent = [0, ROWS] if transport.rank == 0 else [100, 0]
    received = [0, 100] if transport.rank == 0 else [ROWS, 0]
    rows = torch.zeros(sum(sent), dtype=torch.int8)
    rows[: MARK // 10] = 1
    rows[-MARK // 10 :] += 2
    out = transport.all_to_all(rows, sent, received).wait()
    if transport.rank == 0:
        assert out.tolist() == [3] * 100
    else:
        assert out[:100].tolist() == [1] * 100
        assert out[-100:].tolist() == [2] * 100
        assert not out[100:-100].any()
    del rows, out
    if backend == "mpi":  # gloo sends gathered blocks as the all-to-all above
        gather_more_than_2_gib(transport)
    assert transport.all_gather(torch.tensor([transport.rank])).wait().tolist() == [0, 1]
    print("arrived", flush=True)


def gather_more_than_2_gib(transport: Transport) -> None:
    """The total, but no block, is over 2 GiB."""
    half = torch.full((2**30 + 64,), transport.rank + 1, dtype=torch.int8)
    gathered = transport.all_gather(half).wait()
    assert gathered[:: 2**20].tolist() == [1 + (i >= len(half)) for i in range(0, len(gathered), 2**20)]
    assert gathered[-1] == 2


if __name__ == "__main__":
    main(sys.argv[1])
