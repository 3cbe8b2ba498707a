"""Training that can be stopped anywhere and goes on from its files: Parquet, balanced loader, tables, dense weights."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from freescale.balancer import JaggedBatch, balance, read_parquet, reshard
from freescale.embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
from freescale.transport import Transport

WORLD_SIZE, NUM_SAMPLES, PAGES = 3, 60, 40


def write_samples(path: Path) -> None:
    """Histories of pages; row groups of four samples, so that ranks run out at different steps."""
    lengths = [1 + (7 * k) % 9 for k in range(NUM_SAMPLES)]
    uih = [[(k * 11 + i * i) % PAGES for i in range(n)] for k, n in enumerate(lengths)]
    pq.write_table(pa.table({"id": range(NUM_SAMPLES), "uih": uih}), path, row_group_size=4)


class Trainer:
    """One rank: it announces a batch ahead, and keeps what it would save.

    Args:
        transport: This rank's.
        data: From `write_samples`.

    Attributes:
        ids: Samples trained on, in order.
    """

    def __init__(self, transport: Transport, data: Path) -> None:
        warnings.filterwarnings("ignore", "ranks had .*loss_scale")
        self._transport = transport
        self._dense_channel = transport.channel("dense")
        tables = [Table("uih", PAGES, 4)]
        self.tables = PrioritizedEmbeddingCollection(tables, transport, optimizer=RowwiseAdagrad(lr=0.1))
        self.dense = nn.Linear(4, 1)
        generator = torch.Generator().manual_seed(0)  # ranks may be threads, which share torch's own
        for parameter in self.dense.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
        self._optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.1, momentum=0.9)
        source = read_parquet(data, 3, rank=transport.rank, world_size=transport.world_size, shuffle=True, seed=7)
        self.loader: Any = balance(source, transport, "uih")
        self.ids: list[int] = []

    def run(self, after_step: Callable[[Trainer, int, dict[str, Any]], bool]) -> None:
        """Train until the epoch ends, or `after_step(self, step, state of the loader)` says so."""
        batches = self.loader.with_reports()
        taken = next(batches, None)
        while taken is not None:
            here = self.loader.running_state
            following = next(batches, None)
            if following is not None:
                self.tables.prefetch({"uih": following[0]["uih"].values})
            batch, report = taken
            self._step(batch, report.loss_scale())
            self.ids += batch["id"].values.tolist()
            if after_step(self, report.step, here):
                return
            taken = following

    def _step(self, batch: JaggedBatch, scale: float) -> None:
        rows = self.tables({"uih": batch["uih"].values})["uih"]
        loss = self.dense(rows).square().sum() * scale
        self._optimizer.zero_grad()
        loss.backward()
        for parameter in self.dense.parameters():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = self._dense_channel.all_gather(gradient.unsqueeze(0)).wait().mean(0)
        self._optimizer.step()

    def state_dict(self, loader_state: dict[str, Any]) -> dict[str, Any]:
        """Everything that goes on."""
        return {
            "loader": self.loader.state_dict(loader_state),
            "tables": {name: value.clone() for name, value in self.weights().items()},
            "table_optimizer": self.tables.fused_optimizer.state_dict(),
            "dense": self.dense.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "ids": list(self.ids),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.loader.load_state_dict(state["loader"])
        self.tables.load_state_dict(state["tables"])
        self.tables.fused_optimizer.load_state_dict(state["table_optimizer"])
        self.dense.load_state_dict(state["dense"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.ids = list(state["ids"])

    def load_those_of_others(self, states: list[dict[str, Any]], tables: Path) -> None:
        """Go on from the states of all ranks of another number of them, and what their tables saved."""
        loaders = reshard([state["loader"] for state in states], self._transport.world_size)
        self.loader.load_state_dict(loaders[self._transport.rank])
        self.tables.load_sharded(tables)
        self.dense.load_state_dict(states[0]["dense"])
        # It keeps tensors as they are, which must not be those of other ranks that are threads.
        self._optimizer.load_state_dict(copy.deepcopy(states[0]["optimizer"]))
        self.ids = [k for state in states for k in state["ids"]] if self._transport.rank == 0 else []

    def weights(self) -> dict[str, Tensor]:
        """This rank's rows of the tables."""
        return {
            name: getattr(value, "to_local", lambda v=value: v)() for name, value in self.tables.state_dict().items()
        }

    def everything(self) -> dict[str, Tensor]:
        """What two runs have to have in common."""
        return {name: value.detach().clone() for name, value in {**self.weights(), **self.dense.state_dict()}.items()}

    def close(self) -> None:
        """End threads."""
        self.tables.close()
        self.loader.close()


def save(state: dict[str, Any], path: Path) -> None:
    """Write a file that is whole or not there."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def newest_common_step(saves: Path, world_size: int) -> int | None:
    """The last step that every rank has saved."""
    steps = [{int(path.stem.split("-")[1]) for path in saves.glob(f"{rank}-*.pt")} for rank in range(world_size)]
    return max(set.intersection(*steps), default=None)


def go_on(trainer: Trainer, saves: Path, saved_by: int, rank: int, world_size: int) -> None:
    """Load the newest files, if there are any."""
    step = newest_common_step(saves, saved_by)
    if step is not None and saved_by == world_size:
        trainer.load_state_dict(torch.load(saves / f"{rank}-{step}.pt", weights_only=True))
    elif step is not None:
        states = [torch.load(saves / f"{old}-{step}.pt", weights_only=True) for old in range(saved_by)]
        trainer.load_those_of_others(states, saves / f"tables-{step}")


def train_saving(
    transport: Transport, folder: Path, die: Callable[[int], None] = lambda step: None, saved_by: int = WORLD_SIZE
) -> None:
    """Go on from the newest files, if there are any; save after every step; leave `end-RANK.pt` at the end.

    Args:
        transport: This rank's.
        folder: Holds data.parquet; the files go there.
        die: Called before and after each save.
        saved_by: Number of ranks that have saved the files.
    """
    trainer = Trainer(transport, folder / "data.parquet")
    go_on(trainer, folder / f"by-{saved_by}", saved_by, transport.rank, transport.world_size)
    transport.all_gather(torch.zeros(1)).wait()  # all have looked before any saves
    saves = folder / f"by-{transport.world_size}"
    saves.mkdir(exist_ok=True)

    def after_step(trainer: Trainer, step: int, loader_state: dict[str, Any]) -> bool:
        die(2 * step)
        trainer.tables.save_sharded(saves / f"tables-{step}")
        save(trainer.state_dict(loader_state), saves / f"{transport.rank}-{step}.pt")
        die(2 * step + 1)
        return False

    trainer.run(after_step)
    save({"ids": trainer.ids, "weights": trainer.everything()}, folder / f"end-{transport.rank}.pt")
    trainer.close()
    transport.close()
