"""Weights and optimizer state in state_dicts and files, whatever the number of ranks that reads them (section 3.2).

With a process group, values are DTensors sharded by rows, which torch.distributed.checkpoint saves and reshards; plain
tensors of one name would lose all but one rank's. Without one, they are this rank's rows, and `save_sharded` keeps the
ranks apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .engine import Engine

_FILE = re.compile(r"rank_(\d+)_of_(\d+)\.pt")


def tensors_of(engine: Engine, table: str) -> dict[str, Tensor]:
    """Weight and optimizer states of a table's rows on this rank; they share memory with the shard."""
    group, index = engine.table_of[table]
    shard = engine.shards[group]
    found = {"weight": shard.of_table(index, shard.weights)}
    return found | {name: shard.of_table(index, state) for name, state in shard.states.items()}


def export(engine: Engine, table: str, local: Tensor) -> Tensor:
    """A table's rows as a state_dict holds them: a DTensor of all rows, or this rank's rows."""
    mesh = engine.mesh()
    if mesh is None:
        return local
    group, index = engine.table_of[table]
    shape = torch.Size((engine.groups[group][0][index].num_embeddings, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    exported: Tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return exported


def load(engine: Engine, table: str, name: str, value: Tensor) -> None:
    """Overwrite this rank's rows.

    Args:
        engine: The tables.
        table: Name of the table.
        name: "weight", or that of an optimizer state.
        value: A DTensor of any sharding (resharding is collective), all rows, or this rank's rows.

    Raises:
        ValueError: The shape is none of these.
    """
    local = tensors_of(engine, table)[name]
    group, index = engine.table_of[table]
    _, first, rows = engine.shards[group].layout.place(index)
    total = engine.groups[group][0][index].num_embeddings
    if isinstance(value, DTensor):
        same = tuple(value.placements) == (Shard(0),) and value.device_mesh.size() == engine.world_size
        value = value.to_local() if same else value.full_tensor()
    if value.shape == (total, *local.shape[1:]):
        value = value[first : first + rows]
    if value.shape != local.shape:
        whole = [total, *local.shape[1:]]
        raise ValueError(
            f"{name} of table '{table}' must have shape {whole}, or {list(local.shape)} for this rank's rows, "
            f"got {list(value.shape)}"
        )
    with torch.no_grad():
        local.copy_(value)


def export_optimizer(engine: Engine) -> dict[str, Any]:
    """What `FusedOptimizer.state_dict` returns: states and step by table, hyperparameters by group of tables."""
    engine.flush()
    state: dict[str, dict[str, Any]] = {}
    for table, (group, _) in engine.table_of.items():
        tensors = tensors_of(engine, table)
        del tensors["weight"]
        state[table] = {name: export(engine, table, local) for name, local in tensors.items()}
        state[table]["step"] = torch.tensor(engine.shards[group].step)
    groups = [
        {**{key: value for key, value in each.items() if key not in ("params", "names")}, "params": each["names"]}
        for each in engine.optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer(engine: Engine, saved: dict[str, Any]) -> None:
    """What `FusedOptimizer.load_state_dict` does.

    Raises:
        ValueError: Other tables, states or groups than those here.
    """
    _refuse_other_states(engine, saved)
    engine.reset()
    for table, (group, _) in engine.table_of.items():
        given = dict(saved["state"][table])
        engine.shards[group].step = int(given.pop("step"))
        for name, value in given.items():
            load(engine, table, name, value)
    settings = {table: each for each in saved["param_groups"] for table in each["params"]}
    for members in engine.optimizer.param_groups:
        members.update({key: value for key, value in settings[members["names"][0]].items() if key != "params"})


def _refuse_other_states(engine: Engine, saved: Any) -> None:
    """Raise unless it is of these tables and groups: files come from anywhere. Shapes are checked when tensors load."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        raise ValueError("state must come from state_dict() of a fused optimizer: it lacks a dict 'state'")
    states, groups = saved["state"], saved.get("param_groups")
    if set(states) != set(engine.table_of):
        raise ValueError(f"state must be of tables {sorted(engine.table_of)}, got {sorted(map(str, states))}")
    for table, (group, _) in engine.table_of.items():
        given, expected = states[table], {*engine.shards[group].states, "step"}
        if not isinstance(given, dict) or set(given) != expected:
            found = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
            raise ValueError(f"state of table '{table}' must have {sorted(expected)}, got {found}")
        if not all(isinstance(value, Tensor) or name == "step" for name, value in given.items()):
            raise ValueError(f"state of table '{table}' must hold tensors")
        step = given["step"]
        if not (isinstance(step, int) or (isinstance(step, Tensor) and step.numel() == 1)) or int(step) < 0:
            raise ValueError(f"step of table '{table}' must be an integer of at least 0, got {step!r}")
    if not isinstance(groups, list) or not all(isinstance(one, dict) and "params" in one for one in groups):
        raise ValueError("param_groups of the state must be a list of dicts with 'params'")
    named = {table: one for one in groups if isinstance(one["params"], list) for table in map(str, one["params"])}
    for members in engine.optimizer.param_groups:
        first = members["names"][0]
        if first not in named:
            raise ValueError(f"param_groups of the state must name table '{first}'")
        for key, value in named[first].items():
            if isinstance(members.get(key), int | float) and not isinstance(value, int | float):
                raise ValueError(f"{key} of table '{first}' must be a number, got {value!r}")


def save_sharded(engine: Engine, folder: Path) -> None:
    """Write this rank's rows into a file of its own; see `PrioritizedEmbeddingCollection.save_sharded`."""
    engine.flush()
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_sizes(folder, engine.world_size)
    tables = {}
    for table, (group, index) in engine.table_of.items():
        _, first, _ = engine.shards[group].layout.place(index)
        copies = {name: local.detach().cpu().clone() for name, local in tensors_of(engine, table).items()}
        tables[table] = {"first": first, "step": engine.shards[group].step, "tensors": copies}
    target = folder / f"rank_{engine.rank}_of_{engine.world_size}.pt"
    partial = target.with_suffix(".partial")
    _write(tables, partial)
    os.replace(partial, target)


def _write(tables: dict[str, Any], path: Path) -> None:
    """Write a file, or leave none.

    Raises:
        OSError: What the system said: of a full disk, torch alone tells of an unexpected position.
    """
    try:
        with path.open("wb") as file:
            torch.save(tables, file)
    except BaseException as error:
        path.unlink(missing_ok=True)
        cause = error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def _refuse_other_sizes(folder: Path, world_size: int) -> None:
    """Raise where another number of ranks has saved: with files of both, neither could be loaded."""
    sizes = {int(match[2]) for path in folder.glob("rank_*.pt") if (match := _FILE.fullmatch(path.name))}
    if sizes - {world_size}:
        raise ValueError(
            f"folder must hold no files of another number of ranks than {world_size}, got those of {sorted(sizes)} "
            f"in {folder}: save into another folder, or remove them"
        )


def load_sharded(engine: Engine, folder: Path) -> None:
    """Read this rank's rows from the files of any number of ranks.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: Files of several saves, or of other tables.
    """
    engine.reset()
    steps: dict[str, set[int]] = {table: set() for table in engine.table_of}
    for path in _files(folder):
        saved = torch.load(path, mmap=True, weights_only=True)
        if set(saved) != set(engine.table_of):
            raise ValueError(f"{path} must hold tables {sorted(engine.table_of)}, got {sorted(saved)}")
        for table, part in saved.items():
            steps[table].add(int(part["step"]))
            _copy_overlap(engine, table, int(part["first"]), part["tensors"])
    for table, (group, _) in engine.table_of.items():
        if len(steps[table]) != 1:
            raise ValueError(f"files in {folder} must be of one save, got steps {sorted(steps[table])} of '{table}'")
        engine.shards[group].step = steps[table].pop()


def _files(folder: Path) -> Iterator[Path]:
    found = [match for path in sorted(folder.glob("rank_*.pt")) if (match := _FILE.fullmatch(path.name))]
    sizes = {int(match[2]) for match in found}
    if len(sizes) > 1:
        raise ValueError(f"{folder} must hold the files of one save, got those of {sorted(sizes)} ranks")
    missing = set(range(sizes.pop() if sizes else 1)) - {int(match[1]) for match in found}
    if missing:
        raise FileNotFoundError(f"{folder} lacks the files of ranks {sorted(missing)}")
    return (folder / match[0] for match in found)


def _copy_overlap(engine: Engine, table: str, first: int, saved: dict[str, Tensor]) -> None:
    group, index = engine.table_of[table]
    _, begin, rows = engine.shards[group].layout.place(index)
    low, high = max(begin, first), min(begin + rows, first + len(saved["weight"]))
    ours = tensors_of(engine, table)
    if set(ours) != set(saved):
        raise ValueError(f"table '{table}' must be saved with {sorted(ours)}, got {sorted(saved)}: another optimizer")
    if low < high:
        for name, tensor in saved.items():
            ours[name][low - begin : high - begin] = tensor[low - first : high - first]
