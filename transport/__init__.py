"""Moves tensors between ranks: all_gather and all_to_all, no reductions (paper, section 3.3).

Start with `connect`. lane.py has what all backends share: order, deadlines, sizes, errors; a backend is a wire
(wire.py): local, process_group, mpi, verbs/. Memory of GPUs has an engine beside it (device_wire.py): copies, or NCCL.
roll.py and presence.py know who is behind or gone. `python -m freescale.transport.check` says what can run.
"""

from .base import Pending, Transport
from .connect import connect, local_group
from .copy_options import CopyOptions
from .errors import SizeMismatch, TransportClosed, TransportError, TransportTimeout, Unavailable
from .verbs import ChunkEvent, RdmaOptions, draw_trace

__all__ = [
    "ChunkEvent",
    "CopyOptions",
    "Pending",
    "RdmaOptions",
    "SizeMismatch",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportTimeout",
    "Unavailable",
    "connect",
    "draw_trace",
    "local_group",
]
