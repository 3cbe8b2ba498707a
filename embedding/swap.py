"""`prioritize`: puts prioritized tables in the places of a model's embedding modules (sections 3.2, 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..transport import Transport
from .engine import Engine
from .errors import EmbeddingError
from .features import FeatureReader, is_collection, read_ids
from .optimizer import GradScale, Optimizer
from .swapped import SwappedBag, SwappedCollection, SwappedEmbedding, SwappedModule
from .table_module import EngineModule
from .tables import Table, read_config

NAME = "prioritized_embeddings"
Column = str | Callable[[Any], Any]
Source = Column | Sequence[Column] | None


class PrioritizedEmbeddings(EngineModule):
    """All tables of a model that `prioritize` changed, as `model.prioritized_embeddings`.

    Attributes:
        fused_optimizer: The tables' optimizer, for schedulers and checkpoints.
    """

    def __init__(self, engine: Engine, find_ids: Callable[[Any], list[Tensor]], swapped: list[SwappedModule]) -> None:
        super().__init__(engine, {})
        self._find_ids = find_ids
        self.__dict__["_swapped"] = swapped  # not children: they are where the model has them

    def forward(self, given: Any) -> Any:
        """Hand on what it gets: the model may be a `Sequential`, which calls all it holds."""
        return given

    def prefetch(self, upcoming: Any) -> None:
        """Plan an upcoming batch, before the forward of the current one; see the collection's `prefetch`.

        Args:
            upcoming: What the model will be called with.
        """
        if self._trains:
            self._engine.prefetch(self._find_ids(upcoming))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a step of the tables is not for compilers
    def start(self, batch: Any) -> None:
        """Begin the forward of a batch; the model does it when it is called."""
        self.stop()
        if self._trains:
            self._engine.start(self._find_ids(batch))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """End a forward: no lookup follows."""
        self._engine.current = None
        for module in self.__dict__["_swapped"]:
            module.looked_up.clear()


def prioritize(
    model: nn.Module,
    transport: Transport,
    *,
    optimizer: Optimizer | Mapping[str, Optimizer],
    ids: Mapping[str, Source],
    synchronous: bool = False,
    urgent: Transport | None = None,
    background: Transport | None = None,
    wire_dtype: torch.dtype | None = None,
    gradient_division: bool = True,
    grad_scale: GradScale | torch.amp.GradScaler | None = None,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Swap a model's embedding tables for prioritized ones, in place, with their weights and state_dict names.

    Takes `torch.nn.Embedding`, `torch.nn.EmbeddingBag` and torchrec's `EmbeddingCollection`. Call it before
    DistributedDataParallel wraps the model. The model must then be called with the batch as its first argument (or
    with keyword arguments only, which together are the batch). The tables are `model.prioritized_embeddings`, which has
    `prefetch(batch)`, `fused_optimizer` and `flush()`; everything else stays with the model's own optimizer.

    Args:
        model: The model; every rank has it whole, and keeps its part of each table.
        transport: The ranks.
        optimizer: Of all tables, or by name: that of the module, or `module.table` within a collection.
        ids: For each embedding module what it will look up: columns of the batch, in one call each, by name or as
            functions of the batch that return the tensor of ids. For an `EmbeddingCollection`: the column that holds
            its KeyedJaggedTensor, by name or as a function. None leaves a module as it is.
        synchronous: See `PrioritizedEmbeddingCollection`, as for all that follow.
        urgent: See there.
        background: See there.
        wire_dtype: See there.
        gradient_division: See there.
        grad_scale: See there.
        process_group: See there.

    Returns:
        The model.

    Raises:
        ValueError: A module without ids, ids without a module, or a module that cannot be swapped, by name.
        TypeError: `model` is no module, or `transport` no transport.

    Example:
        >>> from freescale.embedding import Sgd, prioritize
        >>> from freescale.transport import connect
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.pages = torch.nn.Embedding(100, 4)
        ...     def forward(self, batch):
        ...         return self.pages(batch["uih_page"]).sum()
        >>> model = prioritize(Model(), connect("local"), optimizer=Sgd(lr=0.1), ids={"pages": ["uih_page"]})
        >>> model({"uih_page": torch.tensor([1, 2, 2])}).backward()
        >>> list(model.state_dict())
        ['pages.weight']
        >>> model.prioritized_embeddings.close()
    """
    if not isinstance(transport, Transport):
        raise TypeError(f"transport must come from freescale.transport.connect, got {type(transport).__name__}")
    found = _find_modules(model, ids)
    plans = [_plan_module(name, module, ids[name]) for name, module in found.items()]
    first_weight = next(next(iter(found.values())).parameters())
    engine = Engine(
        [table for plan in plans for table in plan.tables],
        [call for plan in plans for call in plan.calls],
        transport,
        optimizer,
        device=first_weight.device,
        synchronous=synchronous,
        urgent=urgent,
        background=background,
        wire_dtype=wire_dtype,
        gradient_division=gradient_division,
        grad_scale=grad_scale,
        seed=None,
        process_group=process_group,
    )
    swapped, first_call = [], 0
    for (name, module), plan in zip(found.items(), plans, strict=True):
        _copy_weights(engine, module, plan)
        made = plan.make(engine, module, name, range(first_call, first_call + len(plan.calls)))
        first_call += len(plan.calls)
        _replace(model, module, made)
        swapped.append(made)
    return _install(model, engine, plans, swapped)


@dataclass(frozen=True)
class _ModulePlan:
    """What becomes of one module: its tables, the weights they get, its calls, how a batch's ids are found."""

    tables: list[Table]
    weights: list[str]
    calls: list[list[tuple[str, str]]]
    find_ids: Callable[[Any], list[Tensor]]
    make: Callable[[Engine, nn.Module, str, range], SwappedModule]


def _find_modules(model: nn.Module, ids: Mapping[str, Source]) -> dict[str, nn.Module]:
    """The modules to swap, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("model must not be wrapped in DistributedDataParallel yet: prioritize first, then wrap")
    if hasattr(model, NAME):
        raise ValueError(f"model has an attribute '{NAME}' already: prioritize it once")
    tables = {name: each for name, each in model.named_modules() if _is_table(each)}
    tables = {name: each for name, each in tables.items() if not any(_within(name, other, tables) for other in tables)}
    if "" in tables:
        raise ValueError("model must have its embedding tables as submodules, got a table itself")
    unknown, unnamed = sorted(set(ids) - set(tables)), sorted(set(tables) - set(ids))
    if unknown:
        raise ValueError(f"ids must name embedding modules of the model, {sorted(tables)}, got {unknown}")
    if unnamed:
        raise ValueError(f"ids must say what {unnamed} look up; None leaves a module as it is")
    chosen = {name: each for name, each in tables.items() if ids[name] is not None}
    if not chosen:
        raise ValueError("ids must name at least one embedding module of the model")
    for name, module in chosen.items():
        _refuse_what_cannot_be_swapped(model, name, module)
    return chosen


def _is_table(module: nn.Module) -> bool:
    return type(module) in (nn.Embedding, nn.EmbeddingBag) or is_collection(module)


def _within(name: str, other: str, tables: Mapping[str, nn.Module]) -> bool:
    """Whether a module is one of a collection's own tables."""
    return name.startswith(f"{other}.") and is_collection(tables[other])


def _refuse_what_cannot_be_swapped(model: nn.Module, name: str, module: nn.Module) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise ValueError(f"'{name}' has {option}={getattr(module, option)!r}, which prioritized tables do not have")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise ValueError(f"'{name}' has mode='max', which prioritized tables do not have: use 'sum' or 'mean'")
    own = {id(each) for each in module.parameters()}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if not other.startswith(f"{name}.") and (id(parameter) in own):
            raise ValueError(
                f"weights of '{name}' are '{other}', too: tied weights cannot be sharded; untie them, or leave "
                f"'{name}' as it is with ids None"
            )
    for key, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise ValueError(f"'{name}.{key}' is frozen: leave it as it is with ids None")


def _plan_module(name: str, module: nn.Module, source: Source) -> _ModulePlan:
    if is_collection(module):
        return _plan_collection(name, module, source)
    assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
    columns = [source] if isinstance(source, str) or callable(source) else list(source or [])
    if not columns:
        raise ValueError(f"ids of '{name}' must name at least one column, got {source!r}")

    def find_ids(batch: Any) -> list[Tensor]:
        return [column(batch) if callable(column) else read_ids(batch, column) for column in columns]

    table = Table(
        name, module.num_embeddings, module.embedding_dim, padding_idx=module.padding_idx, dtype=module.weight.dtype
    )
    made: Callable[..., SwappedModule] = SwappedBag if isinstance(module, nn.EmbeddingBag) else SwappedEmbedding
    calls = [[(column if isinstance(column, str) else f"{name}'s ids", name)] for column in columns]
    return _ModulePlan([table], ["weight"], calls, find_ids, made)


def _plan_collection(name: str, module: Any, source: Source) -> _ModulePlan:
    if not (isinstance(source, str) or callable(source)):
        raise ValueError(f"ids of '{name}' must be one column of KeyedJaggedTensors or a function, got {source!r}")
    configs = [read_config(config) for config in module.embedding_configs()]
    reader = FeatureReader(configs)

    def find_ids(batch: Any) -> list[Tensor]:
        return reader.ids(source(batch) if callable(source) else batch[source])

    tables = [
        Table(f"{name}.{each.name}", each.num_embeddings, each.embedding_dim, each.features, dtype=each.dtype)
        for each in configs
    ]
    calls = [[(feature, f"{name}.{table}") for feature, table in reader.pairs]]
    return _ModulePlan(
        tables, [f"embeddings.{each.name}.weight" for each in configs], calls, find_ids, SwappedCollection
    )


def _copy_weights(engine: Engine, module: nn.Module, plan: _ModulePlan) -> None:
    """Keep this rank's rows of a module's weights."""
    state = module.state_dict()
    for table, key in zip(plan.tables, plan.weights, strict=True):
        group, index = engine.table_of[table.name]
        shard = engine.shards[group]
        start, first, rows = shard.layout.place(index)
        shard.weights[start : start + rows] = state[key][first : first + rows]


def _replace(model: nn.Module, module: nn.Module, made: nn.Module) -> None:
    """Put the new module wherever the model holds the old one."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is module:
                setattr(parent, key, made)


def _install(model: nn.Module, engine: Engine, plans: list[_ModulePlan], swapped: list[SwappedModule]) -> nn.Module:
    """Add the module that stands for all tables, and have the model's forward begin and end an iteration."""

    def find_ids(batch: Any) -> list[Tensor]:
        return [ids for plan in plans for ids in plan.find_ids(batch)]

    tables = PrioritizedEmbeddings(engine, find_ids, swapped)
    tables.train(model.training)
    model.add_module(NAME, tables)
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_finish, always_call=True)
    return model


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not args and not kwargs:
        raise EmbeddingError("the model must be called with the batch, which says what its tables look up")
    getattr(model, NAME).start(args[0] if args else kwargs)


def _finish(model: nn.Module, args: Any, output: Any) -> None:
    del args, output
    getattr(model, NAME).stop()
