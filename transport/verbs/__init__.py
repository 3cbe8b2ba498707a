"""RDMA between hosts without a multiprocessor of a GPU: the paper's CPU-RDMA path (sections 3.3 and 5.3)."""

from .options import RdmaOptions
from .trace import ChunkEvent, draw_trace

__all__ = ["ChunkEvent", "RdmaOptions", "draw_trace"]
