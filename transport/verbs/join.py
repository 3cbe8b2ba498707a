"""Connects the ranks over RDMA; they tell each other their addresses through another transport (paper, section 3.3)."""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

from ..base import Transport
from ..errors import Unavailable
from ..lane import HostTransport, open_lane
from .binding import load_binding
from .device import find_port
from .memory import Kept
from .opened import Device
from .options import RdmaOptions
from .wire import VerbsWire


def connect_verbs(through: Transport, options: RdmaOptions, timeout_s: float, check_sizes: bool) -> HostTransport:
    """Make the first channel over RDMA between the ranks of another transport; collective.

    Args:
        through: Connects the ranks already, and has made sure who they are: queue pairs are connected to what it says
            and to nothing else. It is used for this only, and stays the caller's.
        options: How to use the device.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Noted; sizes are compared in any case, as that costs nothing here.

    Raises:
        Unavailable: No library, no RDMA, or no usable port; says what to install. Or this is a DataLoader worker.
        TransportError: What a peer says cannot be, or ranks name different bindings.
    """
    if get_worker_info() is not None:
        raise Unavailable("verbs: a DataLoader worker is no rank: connect in the trainer's own process")
    wire = VerbsWire(open_device(options), through.rank, through.world_size, options.chunk_bytes)
    try:
        ones = [1] * through.world_size
        described = torch.from_numpy(wire.describe())
        wire.attach(through.all_to_all(described, ones, ones).wait().numpy())
        through.all_gather(torch.zeros(1)).wait()  # all have connected: nobody writes to a pair that is not
    except BaseException:
        wire.abandon()
        raise
    del check_sizes
    return open_lane(wire, "main", through.rank, through.world_size, timeout_s, True)


def open_device(options: RdmaOptions) -> Device:
    """Open the RDMA device.

    Raises:
        Unavailable: See `connect_verbs`.
    """
    open_card = load_binding(options.binding)
    port = find_port(options.device, options.port, options.gid_index)
    try:
        card = open_card(port)
    except Unavailable:
        raise
    except Exception as error:  # pyverbs has a tree of its own
        raise Unavailable(f"verbs: {port.device} cannot be opened by {options.binding}: {error}") from error
    return Device(card, port, options.binding, options.ack_timeout, options.trace, Kept(card))
