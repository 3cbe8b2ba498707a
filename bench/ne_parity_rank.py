"""What one rank of bench.ne_parity does: trains an epoch in each of the ways that should make no difference (5.4)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from ..balancer import JaggedBatch, Report, StagedPipeline, WorldSamples, balance, greedy_batch_size, read_parquet
from ..embedding import RowwiseAdagrad, prioritize
from ..transport import Transport, connect
from .launch import rank_main
from .roles import Roles
from .sequence_model import SequenceModel

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        title: For people.
        is_balanced: Whether samples move, or stay on the rank that loaded them.
        is_prioritized: Whether only what collides is urgent, or everything.
    """

    title: str
    is_balanced: bool
    is_prioritized: bool


WAYS = {
    "reference": Way("as loaded, synchronous", is_balanced=False, is_prioritized=False),
    "balanced": Way("balanced, synchronous", is_balanced=True, is_prioritized=False),
    "prioritized": Way("as loaded, prioritized", is_balanced=False, is_prioritized=True),
    "both": Way("balanced and prioritized", is_balanced=True, is_prioritized=True),
}


@dataclass(frozen=True)
class Settings:
    """What all ranks are told.

    Attributes:
        data: Parquet file.
        columns: Columns to read; all when None.
        roles: Which column does what.
        batch_size: Samples a rank loads in a step.
        num_steps: Steps at most; None: an epoch.
        num_rows: Rows of each table.
        width: Of the model.
        seed: Seed of the model's weights.
    """

    data: str
    columns: list[str] | None
    roles: Roles
    batch_size: int
    num_steps: int | None
    num_rows: int
    width: int
    seed: int

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read from a file."""
        given = json.loads(path.read_text())
        return cls(roles=Roles.of(given.pop("roles")), **given)


def stay(world: WorldSamples) -> Tensor:
    """Leave every sample where it was loaded: the same protocol and report, and nothing moves."""
    return world.rank


def looked_up(roles: Roles, num_rows: int) -> dict[str, list[Callable[[JaggedBatch], Tensor]]]:
    """What the tables of a `SequenceModel` look up in a batch, in the order of its calls."""

    def rows_of(name: str) -> Callable[[JaggedBatch], Tensor]:
        return lambda batch: torch.remainder(batch[name].values.long(), num_rows)

    items = [roles.uih] if roles.candidates is None else [roles.uih, roles.candidates]
    return {"items": [rows_of(name) for name in items]} | {
        f"contents.{name}": [rows_of(name)] for name in roles.contents
    }


def train(settings: Settings, way: Way, transport: Transport, done: Callable[[], None]) -> Tensor:
    """Train one epoch.

    Args:
        settings: What to train on.
        way: How.
        transport: Between the ranks.
        done: Called after each step.

    Returns:
        For each step, over all ranks: sum of log losses, number of clicks, number of items. Shape [steps, 3], float64.
    """
    roles, model = settings.roles, _model(settings, way, transport)
    # Sums of squares that start above zero: else the first steps follow the sign of rounding errors.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=1e-3)
    loader = balance(
        read_parquet(
            settings.data,
            settings.batch_size,
            rank=transport.rank,
            world_size=transport.world_size,
            columns=settings.columns,
        ),
        transport,
        roles.uih,
        greedy_batch_size if way.is_balanced else stay,
    )
    told: list[Tensor] = []

    def loss_of(output: tuple[Tensor, Tensor], _: JaggedBatch, report: Report | None) -> Tensor:
        assert report is not None
        logits, labels = output
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum") * report.loss_scale(roles.label)

    def note(output: tuple[Tensor, Tensor], _: JaggedBatch, report: Report | None) -> None:
        assert report is not None
        logits, labels = (each.detach().double() for each in output)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        told.append(torch.stack([loss, labels.sum(), torch.tensor(len(labels), dtype=torch.float64)]))
        done()

    pipeline = StagedPipeline(DistributedDataParallel(model), optimizer, loader, loss_fn=loss_of, metrics=note)
    for step, _ in enumerate(pipeline, 1):
        if step == settings.num_steps:
            break
    loader.close()
    gathered = transport.all_gather(torch.stack(told).unsqueeze(0)).wait()
    tables: Any = model.prioritized_embeddings
    tables.close()
    return gathered.sum(0)


def _model(settings: Settings, way: Way, transport: Transport) -> nn.Module:
    torch.manual_seed(settings.seed)
    return prioritize(
        SequenceModel(settings.roles, settings.width, num_rows=settings.num_rows),
        transport.channel("tables"),
        optimizer=RowwiseAdagrad(lr=0.02, eps=1e-6),
        ids=looked_up(settings.roles, settings.num_rows),
        synchronous=not way.is_prioritized,
    )


def main() -> None:
    """Train in every way as one rank; rank 0 writes what came out beside the settings."""
    path = Path(sys.argv[1])
    with rank_main(path):
        torch.set_num_threads(1)
        settings = Settings.load(path)
        torch.distributed.init_process_group("gloo")
        transport = connect("process_group", timeout_s=_DEADLINE_S)

        def done() -> None:
            if transport.rank == 0:
                sys.stdout.write("step\n")
                sys.stdout.flush()

        found = {name: train(settings, way, transport, done).tolist() for name, way in WAYS.items()}
        if transport.rank == 0:
            path.with_name("runs.json").write_text(json.dumps(found))
        transport.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
