"""Balances each global batch over the ranks before it is trained on (paper, sections 3.1 and 4.1).

Start with `balance` (loader.py); `.balance` of DataPipes is in datapipe.py and `BalancerNode` in node.py.
"""

from .adapt import Adapter, adapter_for
from .batch import Column, JaggedBatch
from .constraints import capped, grouped, keep_together
from .cost import CostModel
from .datapipe import BalancerIterDataPipe
from .errors import BalancerError, PeerClosed, PeerFailed, PlanMismatch, ProtocolError, SchemaMismatch
from .loader import BalancedLoader, balance
from .metrics import imbalance, sparsity, straggler_percentage
from .node import BalancerNode
from .parquet import ParquetSource, read_parquet
from .partition import fixed_batch_size, greedy_batch_size, home_batch_size
from .plan import Cost, Partitioner, WorldSamples
from .report import Report
from .variable import VariableBatchSize

__all__ = [
    "Adapter",
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
    "ProtocolError",
    "Report",
    "SchemaMismatch",
    "VariableBatchSize",
    "WorldSamples",
    "adapter_for",
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
