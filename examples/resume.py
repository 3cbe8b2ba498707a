"""Stop in the middle of an epoch, save, and go on in another loader: every sample exactly once (paper, section 3.1).

Launch it with one of
    torchrun --nproc-per-node 2 examples/resume.py process_group
    mpiexec -n 2 python examples/resume.py mpi
"""

import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from freescale.balancer import BalancedLoader, JaggedBatch, balance, read_parquet
from freescale.transport import connect

NUM_ROWS = 1000

backend = sys.argv[1] if len(sys.argv) > 1 else "local"
if backend == "process_group":
    torch.distributed.init_process_group("gloo")
transport = connect(backend, timeout_s=60)

folder = tempfile.TemporaryDirectory()  # each rank writes the same file for itself; a real job shares one
path = Path(folder.name) / "histories.parquet"
lengths = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(0)).exp().mul(20).long().tolist()
rows = {"user": range(NUM_ROWS), "uih_page": [[user] * n for user, n in enumerate(lengths)]}
pq.write_table(pa.table(rows), path, row_group_size=100)


def make_loader() -> BalancedLoader[JaggedBatch]:
    """What a job makes when it starts, first or again."""
    source = read_parquet(path, batch_size=32, rank=transport.rank, world_size=transport.world_size)
    return balance(source, transport, lengths="uih_page")


seen: list[int] = []
loader = make_loader()
for step, batch in enumerate(loader):
    seen += batch["user"].values.tolist()
    if step == 4:
        break
checkpoint = Path(folder.name) / f"loader-{transport.rank}.pt"
torch.save(loader.state_dict(), checkpoint)  # each rank saves its own
loader.close()

loader = make_loader()
loader.load_state_dict(torch.load(checkpoint))
for batch in loader:
    seen += batch["user"].values.tolist()

sizes = transport.all_gather(torch.tensor([len(seen)])).wait()
everyone = transport.all_gather(torch.tensor(seen), sizes).wait()
assert everyone.sort().values.tolist() == list(range(NUM_ROWS)), "every sample exactly once"
print(f"rank {transport.rank}: {len(seen)} of {NUM_ROWS} samples, {NUM_ROWS} over all ranks")
if backend == "process_group":
    torch.distributed.destroy_process_group()
