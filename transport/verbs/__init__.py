"""RDMA between hosts without a multiprocessor of a GPU: the paper's CPU-RDMA path (sections 3.3 and 5.3).

device.py finds the port, binding.py a library for it (ibverbs or pyverbs); wire.py exchanges, over link.py to each
peer; trace.py draws what happened to each chunk.
"""

from .options import RdmaOptions
from .trace import ChunkEvent, draw_trace

__all__ = ["ChunkEvent", "RdmaOptions", "draw_trace"]
