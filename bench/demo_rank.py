"""What one rank of the demo does: train as the DataLoader gives batches, then balanced, and time both (section 5.1)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, IterableDataset

from ..balancer import BalancedLoader, JaggedBatch, balance, read_parquet
from ..transport import Transport, connect
from .launch import rank_main
from .partitioners import load_partitioner
from .roles import Roles
from .sequence_model import SequenceModel

MEASURES = ("compute", "waited", "wall", "tokens", "samples", "bytes_sent", "bytes_total", "loss")
_DEADLINE_S = 60.0  # more than any step takes


@dataclass(frozen=True)
class Settings:
    """What all ranks are told.

    Attributes:
        data: Parquet file.
        columns: Columns to read; all when None.
        roles: Which column does what.
        num_steps: Steps of each run.
        batch_size: Samples a rank loads in a step.
        partitioner: Name of a built-in one, or module:function.
        transport: "mpi" or "process_group".
        seed: Seed of the model's weights.
    """

    data: str
    columns: list[str] | None
    roles: Roles
    num_steps: int
    batch_size: int
    partitioner: str
    transport: str
    seed: int

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read from a file."""
        given = json.loads(path.read_text())
        return cls(roles=Roles.of(given.pop("roles")), **given)


class RankShare(IterableDataset[JaggedBatch]):
    """A rank's share of a Parquet file, from its start again at its end, until enough batches were given.

    Args:
        settings: File, batch size and number of batches.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, settings: Settings, rank: int, world_size: int) -> None:
        self._source = read_parquet(
            settings.data, settings.batch_size, rank=rank, world_size=world_size, columns=settings.columns
        )
        self._num_batches = settings.num_steps

    def __iter__(self) -> Iterator[JaggedBatch]:
        given = 0
        while True:
            for batch in self._source:
                yield batch
                given += 1
                if given == self._num_batches:
                    return


class Trainer:
    """A model that several ranks train on the mean loss of the global batch.

    Args:
        settings: Roles and seed.
        transport: Adds up gradients.
    """

    def __init__(self, settings: Settings, transport: Transport) -> None:
        torch.manual_seed(settings.seed)
        self.model = SequenceModel(settings.roles)
        self.transport = transport
        # The accumulator starts over 0, or the first steps would take the sign of rounding errors for a gradient.
        self._optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.03, initial_accumulator_value=1e-10)
        self._warm_up = torch.optim.lr_scheduler.LinearLR(self._optimizer, start_factor=0.1, total_iters=10)

    def step(self, batch: JaggedBatch, scale: float) -> tuple[float, float]:
        """Train on one batch.

        Args:
            batch: This rank's samples; may be empty.
            scale: Factor on the sum of the losses: world size / items of the global batch.

        Returns:
            CPU seconds of this thread without the exchange of gradients, and mean loss of the global batch.
        """
        compute = -time.thread_time()
        self._optimizer.zero_grad()
        logits, labels = self.model(batch)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") * scale
        loss.backward()
        compute += time.thread_time()
        self._average_gradients()
        compute -= time.thread_time()
        self._optimizer.step()
        self._warm_up.step()
        compute += time.thread_time()
        return compute, self.mean(loss.detach())

    def mean(self, value: Tensor) -> float:
        """Average a number over the ranks."""
        return float(self.transport.all_gather(value.double().reshape(1)).wait().mean())

    def _average_gradients(self) -> None:
        """Average gradients with the two operations that transports have: scatter, add up here, gather.

        The order of addition is that of the ranks, so every rank gets the same bits.
        """
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.flatten() for g in gradients])
        world_size = self.transport.world_size
        share = -(-len(flat) // world_size)
        padded = torch.nn.functional.pad(flat, (0, share * world_size - len(flat)))
        splits = [share] * world_size
        received = self.transport.all_to_all(padded, splits, splits).wait()
        average = received.view(world_size, share).double().mean(0).float()
        averages = self.transport.all_gather(average).wait()[: len(flat)]
        for parameter, gradient in zip(parameters, averages.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()


def train_as_loaded(
    dataloader: DataLoader[JaggedBatch], trainer: Trainer, done: Callable[[float], None]
) -> list[list[float]]:
    """Train on the batches as they come. Returns what `MEASURES` names for each step."""
    rows = []
    batches = iter(dataloader)
    started = time.perf_counter()
    while (batch := next(batches, None)) is not None:
        waited = time.perf_counter() - started
        items = trainer.mean(torch.tensor(trainer.model.num_items(batch)))  # on average over the ranks
        compute, loss = trainer.step(batch, scale=1 / items if items else 0.0)
        tokens = len(batch[trainer.model.roles.uih].values)
        wall = time.perf_counter() - started
        started += wall
        rows.append([compute, waited, wall, tokens, batch.batch_size, 0, 0, loss])
        done(loss)
    return rows


def train_balanced(
    dataloader: DataLoader[JaggedBatch], trainer: Trainer, partitioner: str, done: Callable[[float], None]
) -> list[list[float]]:
    """Train on balanced batches. Returns what `MEASURES` names for each step."""
    rows = []
    roles = trainer.model.roles
    loader: BalancedLoader[JaggedBatch] = balance(
        dataloader, trainer.transport, lengths=roles.uih, partitioner=load_partitioner(partitioner)
    )
    batches = loader.with_reports()
    started = time.perf_counter()
    while (entry := next(batches, None)) is not None:
        waited = time.perf_counter() - started
        batch, report = entry
        scale = report.loss_scale() / 2 if roles.label is None else report.loss_scale(roles.label)
        compute, loss = trainer.step(batch, scale)
        loader.record_seconds(compute)
        tokens = len(batch[roles.uih].values)
        wall = time.perf_counter() - started
        started += wall
        moved = [report.bytes_sent, report.bytes_total]
        rows.append([compute, waited, wall, tokens, batch.batch_size, *moved, loss])
        done(loss)
    return rows


def run(settings: Settings, transport: Transport) -> dict[str, Any]:
    """Train twice, from the same weights on the same global batches.

    Args:
        settings: What to train on.
        transport: Between the ranks.

    Returns:
        For the runs "as_loaded" and "balanced" what `MEASURES` names, each as a list of steps of lists of ranks.
    """
    runs = {}
    for name in ("as_loaded", "balanced"):
        dataloader = DataLoader(RankShare(settings, transport.rank, transport.world_size), batch_size=None)
        trainer = Trainer(settings, transport.channel(name))

        def done(loss: float, run: str = name) -> None:
            if transport.rank == 0:
                sys.stdout.write(json.dumps({"run": run, "loss": loss}) + "\n")
                sys.stdout.flush()

        if name == "balanced":
            rows = train_balanced(dataloader, trainer, settings.partitioner, done)
        else:
            rows = train_as_loaded(dataloader, trainer, done)
        gathered = transport.all_gather(torch.tensor(rows, dtype=torch.float64)).wait()
        by_measure = gathered.view(transport.world_size, len(rows), len(MEASURES)).permute(2, 1, 0)
        runs[name] = {measure: by_measure[i].tolist() for i, measure in enumerate(MEASURES)}
    return runs


def main() -> None:
    """Train as one rank; rank 0 writes the measurements beside the settings."""
    path = Path(sys.argv[1])
    with rank_main(path):
        torch.set_num_threads(1)
        settings = Settings.load(path)
        if settings.transport == "process_group":
            torch.distributed.init_process_group("gloo")
        transport = connect(settings.transport, timeout_s=_DEADLINE_S)
        runs = run(settings, transport)
        if transport.rank == 0:
            path.with_name("runs.json").write_text(json.dumps(runs))
        transport.close()
        if settings.transport == "process_group":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
