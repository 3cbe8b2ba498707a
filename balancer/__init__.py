"""Balances each global batch over the ranks before it is trained on (paper, sections 3.1 and 4.1).

Start with `balance` (loader.py), which is `BalancedLoader` by another name; a thread (worker.py) or hooks (hooks.py)
run the protocol/ over batches/, which adapters/ make of users' own and partitioners/ deal to the ranks. Beside it:
DataPipe, node, the staged pipeline, reports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .adapters.adapt import Adapter, adapter_for
from .batches.batch import Column, JaggedBatch
from .datapipe import BalancerIterDataPipe
from .errors import BalancerError, PeerClosed, PeerFailed, PlanMismatch, ProtocolError, SchemaMismatch
from .hooks import Attachment, attach
from .loader import BalancedLoader, balance
from .loss_scaled import LossScaled
from .metrics import imbalance, sparsity, straggler_percentage
from .partitioners.constraints import capped, grouped, keep_together
from .partitioners.cost import CostModel
from .partitioners.partition import fixed_batch_size, greedy_batch_size, home_batch_size
from .partitioners.variable import VariableBatchSize
from .pipeline import Prefetching, StagedPipeline
from .plan import Cost, Partitioner, WorldSamples
from .report import Report
from .reshard import reshard

if TYPE_CHECKING:
    from .batches.parquet import ParquetSource, read_parquet
    from .node import BalancerNode

__all__ = [
    "Adapter",
    "Attachment",
    "BalancedLoader",
    "BalancerError",
    "BalancerIterDataPipe",
    "BalancerNode",
    "Column",
    "Cost",
    "CostModel",
    "JaggedBatch",
    "LossScaled",
    "ParquetSource",
    "Partitioner",
    "PeerClosed",
    "PeerFailed",
    "PlanMismatch",
    "Prefetching",
    "ProtocolError",
    "Report",
    "SchemaMismatch",
    "StagedPipeline",
    "VariableBatchSize",
    "WorldSamples",
    "adapter_for",
    "attach",
    "balance",
    "capped",
    "fixed_batch_size",
    "greedy_batch_size",
    "grouped",
    "home_batch_size",
    "imbalance",
    "keep_together",
    "read_parquet",
    "reshard",
    "sparsity",
    "straggler_percentage",
]


# Imported when they are asked for: Arrow takes a tenth of a second to import, torchdata's nodes a hundredth.
_LATER = {"BalancerNode": ".node", "ParquetSource": ".batches.parquet", "read_parquet": ".batches.parquet"}


def __getattr__(name: str) -> Any:
    """Import what takes long to import."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return globals()[name]
