"""What every module with tables of an engine shares: state_dict, `.to()`, eval, copies (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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

    def __getattr__(self, name: str) -> Any:
        """What `state_dict()` holds, by the names there, such as `weight`. For reading: `load_state_dict` writes."""
        if name in {key.split(".")[0] for key in self.__dict__.get("_keys", ())}:
            return getattr(_Weights(self._engine, self._keys), name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {key.split(".")[0] for key in self.__dict__.get("_keys", ())}:
            raise AttributeError(f"'{name}' of prioritized tables cannot be replaced: load_state_dict writes weights")
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse to freeze one module, or to train it alone: tables share their updates.

        Raises:
            EmbeddingError: It would change this module and leave the others as they are.
        """
        if requires_grad == self._engine.frozen:
            raise EmbeddingError(
                "one module of prioritized tables cannot be frozen, or trained, alone: give it ids None in "
                "`prioritize`, which leaves it as it is; or use requires_grad_() of the model's "
                "`prioritized_embeddings`, for all tables"
            )
        return super().requires_grad_(requires_grad)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled() and not self._engine.frozen

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EmbeddingError(
            "prioritized embeddings have connections to other ranks and cannot be pickled: save state_dict() instead"
        )


class _Weights:
    """Reads weights by the names that a state_dict has for them, one part of a name after the other."""

    def __init__(self, engine: Engine, keys: dict[str, str]) -> None:
        self._engine, self._keys = engine, keys

    def __getattr__(self, name: str) -> Any:
        rest = {key[len(name) + 1 :]: table for key, table in self._keys.items() if f"{key}.".startswith(f"{name}.")}
        if "" in rest:
            self._engine.flush()
            return export(self._engine, rest[""], tensors_of(self._engine, rest[""])["weight"])
        if not rest:
            raise AttributeError(f"no '{name}' among {sorted(self._keys)}")
        return _Weights(self._engine, rest)


class EngineModule(TableModule):
    """A module that stands for all tables of an engine."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze all tables, or train them again; on every rank alike.

        Frozen, `prefetch` does nothing and forwards look up directly, as in eval mode, but backwards pass the tables
        by. `requires_grad_` of a module around them does not reach them: they have no parameters.
        """
        self._engine.reset()
        self._engine.frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def flush(self) -> None:
        """Apply what is deferred. Taking a state dict and forwards without gradients do it by themselves."""
        self._engine.flush()

    def reset(self) -> None:
        """Forget batches that were prefetched, on every rank alike: for those who leave a loop before its end.

        Deferred updates are applied. Loading a state_dict does it by itself. After an `IdOutOfRange`, training goes on
        from here.
        """
        self._engine.reset()

    def close(self) -> None:
        """End the tables' threads and channels, after what is under way. May be called twice."""
        self._engine.close()

    def save_sharded(self, folder: Path | str) -> None:
        """Write weights and optimizer state, one file a rank; for ranks without a process group.

        Every rank calls it at the same step. A file is replaced only once it is whole.

        Args:
            folder: Where; one folder a save, seen by all ranks that will load it. A save by as many ranks is replaced.

        Raises:
            ValueError: It holds the files of another number of ranks.
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
