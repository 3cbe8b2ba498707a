"""Balances each global batch over the ranks before it is trained on (paper, sections 3.1 and 4.1).

Start with `balance` (loader.py), which is `BalancedLoader` by another name; a thread (worker.py) or hooks (hooks.py)
run the protocol/ over batches/, which adapters/ make of users' own and partitioners/ deal to the ranks. Beside it:
DataPipe, node, the staged pipeline, reports.
"""

from typing import TYPE_CHECKING, Any

from .adapters.adapt import Adapter, adapter_for
from .batches.batch import Column, JaggedBatch
from .datapipe import BalancerIterDataPipe
from .errors import BalancerError, PeerClosed, PeerFailed, PlanMismatch, ProtocolError, SchemaMismatch
from .hooks import Attachment, attach
from .loader import BalancedLoader, balance
from .loss_scaled import LossScaled
from .metrics import imbalance, sparsity, straggler_percentage
from .node import BalancerNode
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


def __getattr__(name: str) -> Any:
    """Import the Parquet source when it is asked for, since importing Arrow takes a tenth of a second."""
    if name not in ("ParquetSource", "read_parquet"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .batches import parquet

    globals()[name] = getattr(parquet, name)
    return globals()[name]
