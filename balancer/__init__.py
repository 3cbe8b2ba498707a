"""Balances each global batch over the ranks before it is trained on (paper, sections 3.1 and 4.1).

Start with `balance` (loader.py); `.balance` of DataPipes is in datapipe.py and `BalancerNode` in node.py.
"""

from .adapters.adapt import Adapter, adapter_for
from .batches.batch import Column, JaggedBatch
from .batches.parquet import ParquetSource, read_parquet
from .datapipe import BalancerIterDataPipe
from .errors import BalancerError, PeerClosed, PeerFailed, PlanMismatch, ProtocolError, SchemaMismatch
from .hooks import Attachment, attach
from .loader import BalancedLoader, balance
from .metrics import imbalance, sparsity, straggler_percentage
from .node import BalancerNode
from .partitioners.constraints import capped, grouped, keep_together
from .partitioners.cost import CostModel
from .partitioners.partition import fixed_batch_size, greedy_batch_size, home_batch_size
from .partitioners.variable import VariableBatchSize
from .pipeline import Prefetching, StagedPipeline
from .plan import Cost, Partitioner, WorldSamples
from .report import Report

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
    "sparsity",
    "straggler_percentage",
]
