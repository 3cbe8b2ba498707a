"""How long collectives take on a cluster: latency and bandwidth of each kind of link (clusters: paper, section 5).

An alpha-beta model: a collective costs a latency that grows with the number of peers or rounds, and its bytes divided
by the bandwidth of the link that they pass. It knows no congestion between jobs and no failing cables: real networks
are slower at the tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """Hosts of GPUs.

    Attributes:
        gpus_per_host: GPUs that share a host.
        inside_gb_s: Bandwidth of a GPU to the others of its host, one direction, 1e9 bytes a second.
        between_gb_s: A GPU's share of the bandwidth between hosts, one direction.
        sm_free_inside_gb_s: The same inside a host without SMs, over copy engines or host memory.
        latency_us: Latency of any collective.
        peer_us: Latency that each peer on another host adds to an all-to-all.
        round_us: Latency of a round of an all-reduce between hosts.
        device_gb_s: Bandwidth of GPU memory that lookups and updates of rows reach.
        host_ms: Time of the host in an id exchange that nothing hides: sizes are read back from the GPU, and kernels
            that were queued ahead run out.
        gap_ms: Gaps between kernels that every step has, whatever the trainer does.
        launch_ms: What a host takes to launch a step, which cannot be shorter; 0: hosts keep up.
        launch_prioritized_ms: What a host takes for a step of prioritized tables; 0: as long as for any other.

    `host_ms` and `gap_ms` are what TorchRec's pipelines showed on two H200s: the difference of two bubbles, and a
    bubble without its traffic.
    """

    gpus_per_host: int = 8
    inside_gb_s: float = 300.0
    between_gb_s: float = 25.0
    sm_free_inside_gb_s: float = 50.0
    latency_us: float = 20.0
    peer_us: float = 0.5
    round_us: float = 10.0
    device_gb_s: float = 1500.0
    host_ms: float = 3.0
    gap_ms: float = 0.6
    launch_ms: float = 0.0
    launch_prioritized_ms: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            free = each.name.endswith(("_us", "_ms"))  # latencies may be nothing
            if not (0 if free else 1e-9) <= value < math.inf:
                rule = "not negative" if free else "over 0"
                raise ValueError(f"{each.name} of a cluster must be finite and {rule}, got {value}")

    def all_to_all_s(self, sent: Floats, received: Floats, sm_free: bool = False) -> float:
        """Seconds of an all-to-all from the moment when the last rank joins.

        Args:
            sent: Bytes that each rank sends to others, evenly. Shape [world_size].
            received: Bytes that each rank receives. Shape [world_size].
            sm_free: Whether it runs without SMs.
        """
        world_size = len(sent)
        if world_size == 1:
            return 0.0
        here = min(self.gpus_per_host, world_size)
        inside = (here - 1) / (world_size - 1)
        most = float(np.maximum(sent, received).max())
        speed = self.sm_free_inside_gb_s if sm_free else self.inside_gb_s
        transfer = max(most * inside / speed, most * (1 - inside) / self.between_gb_s) / 1e9
        return 1e-6 * (self.latency_us + self.peer_us * (world_size - here)) + transfer

    def all_reduce_s(self, size_bytes: float, world_size: int) -> float:
        """Seconds of an all-reduce: reduced inside hosts, in a ring between them, and spread inside again."""
        if world_size == 1:
            return 0.0
        here = min(self.gpus_per_host, world_size)
        hosts = math.ceil(world_size / here)
        inside = 2 * size_bytes * (here - 1) / here / (1e9 * self.inside_gb_s)
        between = 2 * size_bytes / here * (hosts - 1) / hosts / (1e9 * self.between_gb_s)
        rounds = 2 * math.ceil(math.log2(hosts)) if hosts > 1 else 0
        return 1e-6 * (self.latency_us + self.round_us * rounds) + inside + between


_HOST = {"launch_ms": 14.5, "launch_prioritized_ms": 15.1}  # steps of 9 to 10 ms of computing, two H200s, NVLink

CLUSTERS: Mapping[str, Cluster] = {
    "paper": Cluster(),  # 600 GB/s NVSwitch counts both directions; 8 x 200 Gb/s InfiniBand a host
    "infiniband_400": Cluster(inside_gb_s=400.0, between_gb_s=50.0),
    "ethernet_100": Cluster(between_gb_s=1.56, peer_us=2.0, round_us=30.0),
    "nvlink_pair": Cluster(gpus_per_host=2, **_HOST),
    "shared_memory": Cluster(gpus_per_host=8, inside_gb_s=23.0, sm_free_inside_gb_s=23.0, **_HOST),
    "sockets": Cluster(gpus_per_host=1, between_gb_s=2.0, peer_us=30.0, round_us=60.0, **_HOST),
}
"""Clusters by name: the paper's, faster and slower ones, and the links between two GPUs that can be measured."""


def cluster_of(text: str) -> Cluster:
    """Find a cluster by what a command line says: `paper`, `paper:between_gb_s=12.5,host_ms=1`.

    Raises:
        ValueError: No such cluster or parameter, or a value that no cluster can have.

    Example:
        >>> cluster_of("paper:between_gb_s=12.5").between_gb_s
        12.5
    """
    name, _, rest = text.partition(":")
    if name not in CLUSTERS:
        raise ValueError(f"cluster must be one of {', '.join(CLUSTERS)}, got {name!r}")
    values: dict[str, float] = {}
    known = [each.name for each in fields(Cluster)]
    for part in filter(None, rest.split(",")):
        key, _, number = part.partition("=")
        if key not in known:
            raise ValueError(f"a cluster has {', '.join(known)}, not {key!r}")
        try:
            values[key] = int(number) if key == "gpus_per_host" else float(number)
        except ValueError:
            raise ValueError(f"{key} of a cluster must be a number, got {number!r}") from None
    return replace(CLUSTERS[name], **values)  # type: ignore[arg-type]  # one field is an int, and was read as such
