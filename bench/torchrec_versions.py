"""Makes TorchRec run where the bench needs it: beside an older FBGEMM, and without a GPU (beside the paper)."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

_MOVED = {
    "fbgemm_gpu.tbe.monitoring": ["fbgemm_gpu.runtime_monitor", "fbgemm_gpu.tbe_input_multiplexer"],
    "fbgemm_gpu.tbe.config": [
        "fbgemm_gpu.split_table_batched_embeddings_ops_common",
        "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    ],
    "fbgemm_gpu.tbe.config.embedding_config": ["fbgemm_gpu.split_table_batched_embeddings_ops_common"],
}


def supply_moved_modules() -> list[str]:
    """Give modules that torchrec 1.9 imports their new names, where fbgemm_gpu still has the old ones.

    Call it before torchrec is imported for the first time. Changes nothing where FBGEMM is new enough.

    Returns:
        Names that had to be supplied.
    """
    import fbgemm_gpu  # noqa: F401 - registers the operators that the modules below need

    supplied = []
    for name, sources in _MOVED.items():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module = types.ModuleType(name)
            module.__path__ = []
            for source in map(importlib.import_module, sources):
                for key, value in vars(source).items():
                    if not key.startswith("__"):
                        module.__dict__.setdefault(key, value)
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            setattr(importlib.import_module(parent), leaf, module)
            supplied.append(name)
    return supplied


def run_without_gpu() -> None:
    """Let TorchRec's pipelines run on the CPU, in this process.

    They handle CUDA events and streams whatever the device; where there is no CUDA they get ones that do nothing.
    """
    if not torch.cuda.is_available():
        vars(torch.cuda).update(Event=_Nothing, current_stream=_Nothing)
        vars(torch.cpu).update(current_stream=_Nothing)
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]  # a process of the bench only


class _Nothing:
    """Stands for a CUDA event or stream where there is none."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None
