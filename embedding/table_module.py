"""What every module with tables of an engine shares: state_dict, `.to()`, eval, copies (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .checkpoint import export, load, load_sharded, save_sharded, tensors_of
from .engine import Engine
from .errors import EmbeddingError
from .optimizer import FusedOptimizer


class TableModule(nn.Module):
    """A module whose weights live in shards, which are neither parameters nor buffers.

    Args:
        engine: Where they live.
        keys: Names in the module's state_dict, with the tables that they mean.
    """

    def __init__(self, engine: Engine, keys: dict[str, str]) -> None:
        super().__init__()
        self._engine, self._keys = engine, keys

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own lacks types
        self._engine.move(fn)
        return moved

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._engine.flush()
        for key, table in self._keys.items():
            destination[prefix + key] = export(self._engine, table, tensors_of(self._engine, table)["weight"])

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        ours = {prefix + key: table for key, table in self._keys.items()}
        others = {key: value for key, value in state_dict.items() if key not in ours}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._engine.reset()
        for key, table in ours.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            try:
                load(self._engine, table, "weight", state_dict[key])
            except ValueError as error:
                error_msgs.append(str(error))

    def __deepcopy__(self, memo: Any) -> Any:
        raise EmbeddingError("prioritized embeddings have connections to other ranks and cannot be copied")


class EngineModule(TableModule):
    """A module that stands for all tables of an engine."""

    def flush(self) -> None:
        """Apply what is deferred. `state_dict()` and forwards without gradients do it by themselves."""
        self._engine.flush()

    def reset(self) -> None:
        """Forget batches that were prefetched, on every rank alike: for those who leave a loop before its end.

        Deferred updates are applied. Loading a state_dict does it by itself.
        """
        self._engine.reset()

    def close(self) -> None:
        """End the tables' threads and channels, after what is under way. May be called twice."""
        self._engine.close()

    def save_sharded(self, folder: Path | str) -> None:
        """Write weights and optimizer state, one file a rank; for ranks without a process group.

        Every rank calls it at the same step. A file is replaced only once it is whole.

        Args:
            folder: Where; one folder a save, seen by all ranks that will load it.
        """
        save_sharded(self._engine, Path(folder))

    def load_sharded(self, folder: Path | str) -> None:
        """Read what `save_sharded` wrote on any number of ranks.

        Raises:
            FileNotFoundError: Files of some ranks are missing.
            ValueError: Files of several saves, of other tables or of another optimizer.
        """
        load_sharded(self._engine, Path(folder))

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The tables' optimizer, for schedulers and checkpoints."""
        return self._engine.optimizer

    @property
    def num_skipped_rows(self) -> int:
        """Row updates that were left out because a gradient was not finite, on this rank. Synchronises."""
        self._engine.flush()
        return sum(int(count) for shard in self._engine.shards for count in shard.skipped)
