"""Balances each global batch over the ranks before it is trained on (paper, sections 3.1 and 4.1)."""

from .batch import Column, JaggedBatch
from .errors import BalancerError, PeerClosed, PeerFailed, PlanMismatch, ProtocolError, SchemaMismatch
from .loader import BalancedLoader, balance
from .plan import Cost, Partitioner, WorldSamples
from .report import Report

__all__ = [
    "BalancedLoader",
    "BalancerError",
    "Column",
    "Cost",
    "JaggedBatch",
    "Partitioner",
    "PeerClosed",
    "PeerFailed",
    "PlanMismatch",
    "ProtocolError",
    "Report",
    "SchemaMismatch",
    "WorldSamples",
    "balance",
]
