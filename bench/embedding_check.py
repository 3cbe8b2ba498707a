"""Do the contenders of bench.embedding train alike? Asked before anything is timed (paper, section 3.2: parity)."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .embedding_batch import Feed, make_ring
from .embedding_contenders import BUILDERS, Setup, Trainer
from .embedding_settings import Settings
from .embedding_workload import Workload
from .prioritized_loop import PrioritizedLoop

_NUM_STEPS = 6
_NUM_ROWS = 20_000
_RATIO = 0.25
_REFERENCE = "synchronous"


def check(setup: Callable[[int], Setup], settings: Settings, rank: int) -> list[dict[str, Any]]:
    """Train every contender a few steps from the same weights on the same batches, and compare.

    The dense part has no attention here and is of float32, so that it gives the same bits every time.

    Args:
        setup: Gives what contenders share, for a number of tables.
        settings: Of this launch.
        rank: This rank.

    Returns:
        For each contender but the reference, ours in synchronous mode: the largest relative differences of its losses
        and of its weights, after the first step and after all; 0 says that all bits are the same. For one that
        fails, its traceback as "fault".
    """
    num_rows = min(_NUM_ROWS, settings.sizes.num_rows)
    small = replace(setup(2), num_rows=num_rows, num_layers=0, width=64, dtype=torch.float32)
    workload = Workload(
        min(200, settings.cells[0].cut), _RATIO, settings.world_size, small.batch_size, num_rows, 2, median=100.0
    )
    ring = make_ring(workload, rank, pinned=small.device.type == "cuda")
    names = [_REFERENCE, *(name for name in settings.contenders if name not in (_REFERENCE, "pec"))]
    trained, failed = {}, []
    for name in names:
        feed = Feed()
        feed.use(ring)
        try:
            trainer = BUILDERS[name](small, feed)
            trained[name] = _train(trainer, small.dim)
            trainer.close()
        except Exception:  # the others can still be compared, and timed
            failed.append({"contender": name, "fault": traceback.format_exc()})
        gc.collect()
    reference = trained.pop(_REFERENCE, None)
    return failed + ([] if reference is None else [_compare(name, each, reference) for name, each in trained.items()])


def _train(trainer: Trainer, dim: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses of all steps, with the weights after the first and after the last."""
    _set_weights(trainer, dim)
    found: list[tuple[float, dict[str, Tensor]]] = []
    for number in range(_NUM_STEPS):
        loss = float(trainer.step())
        found.append((loss, _weights(trainer) if number in (0, _NUM_STEPS - 1) else {}))
    return found


def _compare(
    name: str, found: list[tuple[float, dict[str, Tensor]]], reference: list[tuple[float, dict[str, Tensor]]]
) -> dict[str, Any]:
    differences: dict[str, Any] = {"contender": name}
    for label, chosen in (("first", 0), ("last", _NUM_STEPS - 1)):
        ours, theirs = reference[chosen][1], found[chosen][1]
        assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
        differences[f"{label}_weights"] = _over_ranks(max(_difference(theirs[key], ours[key]) for key in ours))
        differences[f"{label}_loss"] = _over_ranks(abs(found[chosen][0] / reference[chosen][0] - 1))
    return differences


def _difference(found: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest weight."""
    assert found.shape == reference.shape, (found.shape, reference.shape)
    return float((found.double() - reference.double()).abs().max() / reference.abs().max())


def _over_ranks(value: float) -> float:
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


# ---- weights of sharded tables ---------------------------------------------------------------------------------


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's rows of every table, by the table's name."""
    return {name: part.detach().clone() for name, part, _ in _parts(trainer)}


def _set_weights(trainer: Trainer, dim: int) -> None:
    """Give every row weights that depend on its id alone."""
    for name, part, first in _parts(trainer):
        number = int(name.rpartition("_")[2])
        rows = torch.arange(first, first + len(part), device=part.device).unsqueeze(1)
        columns = torch.arange(dim, device=part.device)
        hashed = ((rows * dim + columns + 1) * (2_654_435_761 + 2 * number)) % 2**32
        part.detach().copy_(0.2 * (hashed.double() / 2**32 - 0.5))


def _parts(trainer: Trainer) -> list[tuple[str, Tensor, int]]:
    """Each table's name, this rank's rows of it (not a copy), and the first of these rows."""
    if isinstance(trainer, PrioritizedLoop):
        trainer.tables.flush()
        groups = trainer.tables.fused_optimizer.param_groups
        local = [pair for group in groups for pair in zip(group["names"], group["params"], strict=True)]
        rows = {config.name: config.num_embeddings for config in trainer.tables.embedding_configs()}
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return [(name, part, rank * -(-rows[name] // world_size)) for name, part in local]
    state = trainer.model.state_dict()
    sharded = {key.split(".")[-2]: value for key, value in state.items() if hasattr(value, "local_shards")}
    return [
        (name, shard.tensor, int(shard.metadata.shard_offsets[0]))
        for name, value in sharded.items()
        for shard in value.local_shards()
    ]
