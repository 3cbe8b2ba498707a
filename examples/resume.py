"""Stop in mid-epoch, save, and go on, also on another number of ranks: every sample exactly once (section 3.1).

Launch it with one of
    torchrun --nproc-per-node 2 examples/resume.py process_group
    mpiexec -n 2 python examples/resume.py mpi
"""

import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from freescale.balancer import BalancedLoader, JaggedBatch, balance, read_parquet, reshard
from freescale.transport import Transport, connect

NUM_ROWS = 1000

backend = sys.argv[1] if len(sys.argv) > 1 else "local"
if backend == "process_group":
    torch.distributed.init_process_group("gloo")
transport = connect(backend, timeout_s=60)


def everyone(mine: list[int]) -> list[int]:
    """Join what all ranks have: numbers, one rank after the other."""
    sizes = transport.all_gather(torch.tensor([len(mine)])).wait()
    numbers: list[int] = transport.all_gather(torch.tensor(mine, dtype=torch.int64), sizes).wait().tolist()
    return numbers


folder = Path(bytes(everyone(list(tempfile.mkdtemp().encode()) if transport.rank == 0 else [])).decode())
path = folder / "histories.parquet"
if transport.rank == 0:
    lengths = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(0)).exp().mul(20).long().tolist()
    rows = {"user": range(NUM_ROWS), "uih_page": [[user] * n for user, n in enumerate(lengths)]}
    pq.write_table(pa.table(rows), path, row_group_size=100)
everyone([])  # nobody reads before it is written


def make_loader(ranks: Transport) -> BalancedLoader[JaggedBatch]:
    """What a job makes when it starts, first or again."""
    source = read_parquet(path, batch_size=32, rank=ranks.rank, world_size=ranks.world_size)
    return balance(source, ranks, lengths="uih_page")


def users_of(loader: BalancedLoader[JaggedBatch], most_steps: int | None = None) -> list[int]:
    """Train, so to speak, until the end of the epoch or for so many steps. Returns whom this rank saw."""
    users: list[int] = []
    for step, batch in enumerate(loader, 1):
        users += batch["user"].values.tolist()
        if step == most_steps:
            break
    return users


loader = make_loader(transport)
before = users_of(loader, most_steps=5)
torch.save(loader.state_dict(), folder / f"loader-{transport.rank}.pt")  # each rank saves its own
loader.close()

# The next job, on as many ranks: each loads what it saved.
loader = make_loader(transport)
loader.load_state_dict(torch.load(folder / f"loader-{transport.rank}.pt"))
after = users_of(loader)
assert sorted(everyone(before + after)) == list(range(NUM_ROWS)), "every sample exactly once"
print(f"rank {transport.rank}: {len(before) + len(after)} of {NUM_ROWS} samples, {NUM_ROWS} over all ranks")

# The next job, on one rank alone: from the states of all that there were.
everyone_before = everyone(before)
if transport.rank == 0:
    alone = connect("local")
    states = [torch.load(file) for file in sorted(folder.glob("loader-*.pt"))]
    loader = make_loader(alone)
    loader.load_state_dict(reshard(states, alone.world_size)[alone.rank])
    after = users_of(loader)
    assert sorted(everyone_before + after) == list(range(NUM_ROWS)), "on one rank too"
    print(f"rank 0, alone: the {len(after)} samples that {len(states)} ranks had left")
    shutil.rmtree(folder)
everyone([])
if backend == "process_group":
    torch.distributed.destroy_process_group()
