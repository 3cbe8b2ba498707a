"""The embedding collection whose communication keeps off the critical path, with the same weights (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..transport import Transport
from .engine import Engine
from .features import FeatureReader
from .optimizer import GradScale, Optimizer
from .table_module import EngineModule
from .tables import read_config


class PrioritizedEmbeddingCollection(EngineModule):
    """Embedding tables sharded by rows, with the interface of torchrec's `EmbeddingCollection`.

    Rows that two consecutive batches share are updated and sent at once; all others travel while the model computes.
    Weights and optimizer state are those of a synchronous step, bit for bit. Updates happen in backward: there is
    nothing to step, and nothing for DistributedDataParallel to do.

    Every rank makes the same collection and calls `prefetch`, forward and backward in the same order, from one thread.

    Args:
        configs: The tables: `Table`, or torchrec's `EmbeddingConfig`.
        transport: The ranks. Ids travel in host memory, rows and gradients where the tables are.
        optimizer: `Sgd`, `RowwiseAdagrad` or `Adam`; or one for each table, by name.
        synchronous: Everything is urgent, as without prefetching; same weights.
        device: Where the tables are; None: the CPU.
        ids: Finds in what `prefetch` is given, such as a whole batch of the DataLoader, what forward will be given.
        urgent: Another transport for what the next forward waits for.
        background: Another transport for all other rows and gradients.
        wire_dtype: Type of rows and gradients on their way; None: that of the tables. bfloat16 halves the traffic of
            float32 tables, and rounds.
        gradient_division: Average gradients over ranks, as torchrec does; else they are added.
        grad_scale: What the loss is multiplied with: a GradScaler, or a function that returns it; taken out of the
            gradients before the update. With or without it, rows with a gradient that is not finite are left as they
            are, and counted.
        seed: Of the weights. The same tables come out on any number of ranks.
        process_group: The ranks, for DTensors in state_dicts; None: the default group where it has the same ranks.

    Raises:
        ValueError: No tables, two of one name, a feature of two tables, an optimizer missing.
        TypeError: Something is not what it should be.

    Example:
        >>> from freescale.embedding import PrioritizedEmbeddingCollection, Sgd, Table
        >>> from freescale.transport import connect
        >>> tables = PrioritizedEmbeddingCollection([Table("item", 1000, 8)], connect("local"), optimizer=Sgd(lr=0.1))
        >>> current, upcoming = {"item": torch.tensor([3, 5, 3])}, {"item": torch.tensor([5, 7])}
        >>> tables.prefetch(upcoming)
        >>> rows = tables(current)["item"]
        >>> rows.shape
        torch.Size([3, 8])
        >>> rows.sum().backward()
        >>> tables.close()
    """

    def __init__(
        self,
        configs: Iterable[Any],
        transport: Transport,
        *,
        optimizer: Optimizer | Mapping[str, Optimizer],
        synchronous: bool = False,
        device: torch.device | str | None = None,
        ids: Callable[[Any], Any] | None = None,
        urgent: Transport | None = None,
        background: Transport | None = None,
        wire_dtype: torch.dtype | None = None,
        gradient_division: bool = True,
        grad_scale: GradScale | torch.amp.GradScaler | None = None,
        seed: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        given = list(configs)
        tables = [read_config(config) for config in given]
        reader = FeatureReader(tables)
        engine = Engine(
            tables,
            [reader.pairs],
            transport,
            optimizer,
            device=torch.device("cpu" if device is None else device),
            synchronous=synchronous,
            urgent=urgent,
            background=background,
            wire_dtype=wire_dtype,
            gradient_division=gradient_division,
            grad_scale=grad_scale,
            seed=seed,
            process_group=process_group,
        )
        super().__init__(engine, {f"embeddings.{table.name}.weight": table.name for table in tables})
        self._configs, self._reader, self._ids = given, reader, ids

    def prefetch(self, upcoming: Any) -> None:
        """Plan an upcoming batch: find its distinct ids and what it shares with the batch before. Returns at once.

        Call it before the forward of the current batch, or up to 16 batches ahead, in the order of the forwards. In
        eval mode and without gradients it does nothing. Host ids must not change before their forward.

        Args:
            upcoming: What forward will be given; or what `ids` takes.

        Raises:
            EmbeddingError: Nobody takes the batches; ranks were made with different settings or are out of step.
        """
        if self._trains:
            self._engine.prefetch(self._reader.ids(upcoming if self._ids is None else self._ids(upcoming)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a step of the tables is not for compilers
    def forward(self, features: Any) -> dict[str, Any]:
        """Look up all features.

        Without gradients, or in eval mode, deferred updates are applied and rows looked up at once. A backward through
        a forward in eval mode raises `EmbeddingError`: it would not train the tables.

        Args:
            features: A torchrec `KeyedJaggedTensor`; or, by feature, tensors of ids of any shape or columns with
                `values`.

        Returns:
            By feature: torchrec `JaggedTensor` with values of shape [ids, D], float32, if that is what came; else
            tensors of shape [*ids.shape, D].

        Raises:
            IdOutOfRange: On every rank, if any rank has such an id in this batch or the one prefetched after it; then
                `reset()` before training goes on.
            EmbeddingError: Not the batch that was prefetched, or inside of activation checkpointing.
            TransportError: The ranks cannot reach each other.
        """
        ids = self._reader.ids(features)
        engine = self._engine
        rows = engine.forward(ids) if self._trains else engine.evaluate(ids, [0])[0]
        return self._reader.wrap(features, rows)

    def embedding_configs(self) -> list[Any]:
        """The tables, as given."""
        return self._configs
