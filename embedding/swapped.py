"""The modules that stand where a model's embedding tables were (sections 3.2, 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Engine
from .errors import EmbeddingError, IdOutOfRange
from .features import FeatureReader
from .pooling import pool
from .table_module import TableModule
from .tables import read_config


class SwappedModule(TableModule):
    """A module whose lookups belong to the forward of the whole model.

    Args:
        engine: All tables of the model.
        keys: Names in the module's state_dict, with the tables that they mean.
        name: Of the module within the model.
        calls: The module's calls among the engine's.

    Attributes:
        looked_up: Calls that this forward has made already.
        waits_for_peers: Forward waits for rows of other ranks; whoever times a model's own compute leaves that out.
    """

    waits_for_peers = True

    def __init__(self, engine: Engine, keys: dict[str, str], name: str, calls: Sequence[int]) -> None:
        super().__init__(engine, keys)
        self.name, self._calls = name, list(calls)
        self.looked_up: set[int] = set()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a step of the tables is not for compilers
    def _look_up(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Rows of one call. Shapes [ids, D], float32."""
        if not self._trains:
            return self._evaluate(ids)
        running = self._engine.current
        if running is None:
            raise EmbeddingError(
                f"'{self.name}' can only be called within the forward of the model that was prioritized, since all "
                "lookups of a batch share one update"
            )
        fresh = [call for call in self._calls if call not in self.looked_up]
        call = self._engine.find_call(running, [*fresh, *self._calls], ids)
        if call is not None:
            self.looked_up.add(call)
            return self._engine.lookup(running, call)
        planned = [self._engine.sizes_of(running, call) for call in self._calls]
        raise EmbeddingError(
            f"'{self.name}' looks up {[each.numel() for each in ids]} ids that `ids` did not find in the batch, where "
            f"it found lists of {planned}: let `ids` give exactly the tensors that the module is called with"
        )

    def _evaluate(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Rows for any ids, in the place of the first call's: an error names the module, not that call's column."""
        first = self._calls[0]
        try:
            return self._engine.evaluate(self._engine.only(first, ids), [first])[0]
        except IdOutOfRange as error:
            if len(ids) > 1:
                raise
            raise error.within(self.name) from None


class SwappedEmbedding(SwappedModule):
    """In the place of a `torch.nn.Embedding`."""

    def __init__(self, engine: Engine, module: nn.Embedding, name: str, calls: Sequence[int]) -> None:
        super().__init__(engine, {"weight": name}, name, calls)
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx = module.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Rows of ids of any shape. Shape [*input.shape, embedding_dim], the table's dtype."""
        rows: Tensor = self._look_up([input])[0]
        return rows.view(*input.shape, self.embedding_dim).to(self._engine.dtype_of(self.name))

    def extra_repr(self) -> str:
        """As that of the module before."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class SwappedBag(SwappedModule):
    """In the place of a `torch.nn.EmbeddingBag`: rows are looked up, and pooled here."""

    def __init__(self, engine: Engine, module: nn.EmbeddingBag, name: str, calls: Sequence[int]) -> None:
        super().__init__(engine, {"weight": name}, name, calls)
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx, self.mode = module.padding_idx, module.mode
        self.include_last_offset = module.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Sums or means of bags; see `torch.nn.EmbeddingBag`. Shape [bags, embedding_dim], the table's dtype."""
        rows = self._look_up([input])[0]
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None where input has two dimensions: its rows are the bags")
            offsets = torch.arange(0, input.numel() + 1, max(input.shape[1], 1), device=input.device)[: len(input) + 1]
        elif offsets is None:
            raise ValueError("offsets must be given where input has one dimension")
        elif not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([input.numel()])])
        flat = input.reshape(-1)
        kept = None if self.padding_idx is None else flat != self.padding_idx
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        pooled: Tensor = pool(rows, offsets, weights, kept, self.mode)
        return pooled.to(self._engine.dtype_of(self.name))


class SwappedCollection(SwappedModule):
    """In the place of torchrec's `EmbeddingCollection`."""

    def __init__(self, engine: Engine, module: Any, name: str, calls: Sequence[int]) -> None:
        configs = module.embedding_configs()
        keys = {f"embeddings.{config.name}.weight": f"{name}.{config.name}" for config in configs}
        super().__init__(engine, keys, name, calls)
        self._configs, self._reader = configs, FeatureReader([read_config(config) for config in configs])

    def forward(self, features: Any) -> dict[str, Any]:
        """Rows of a KeyedJaggedTensor's ids, by feature, as JaggedTensors of float32."""
        return self._reader.wrap(features, self._look_up(self._reader.ids(features)))

    def embedding_configs(self) -> list[Any]:
        """The tables, as torchrec knows them."""
        return list(self._configs)
