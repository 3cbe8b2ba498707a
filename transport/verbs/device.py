"""Finds the RDMA port and the address it is reached by, from what Linux says in /sys (paper, section 3.3)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import Unavailable

SYSFS = Path("/sys/class/infiniband")
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as a GID


@dataclass(frozen=True)
class Port:
    """One port of one device.

    Attributes:
        device: Its name, such as "mlx5_0".
        number: Of the port, from 1.
        is_ethernet: RoCE, rather than InfiniBand.
        gid_index: Which of the port's addresses is used.
        gid: That address, 16 bytes.
    """

    device: str
    number: int
    is_ethernet: bool
    gid_index: int
    gid: bytes


def find_port(device: str | None, number: int, gid_index: int | None, root: Path = SYSFS) -> Port:
    """Find a port that is up, and its address: on Ethernet a RoCEv2 one, of IPv4 if it has such.

    The link-local address that a card has by itself reaches no other host, so it is never chosen.

    Args:
        device: Name; None where there is one device only.
        number: Of the port, from 1.
        gid_index: Which address; None to choose.
        root: Where Linux describes the devices.

    Raises:
        Unavailable: No RDMA here, no such device or port, the port is down, or it has no address that reaches others.
        ValueError: Several devices and none is named, or there is no address of that index.
    """
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not names:
        raise Unavailable(
            "verbs: this machine has no RDMA device (nothing in /sys/class/infiniband): load the card's driver, or for "
            "tests Soft-RoCE: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0"
        )
    if device is None and len(names) > 1:
        raise ValueError(f"device must name one of the RDMA devices {', '.join(names)}, got None")
    device = device or names[0]
    if device not in names:
        raise Unavailable(f"verbs: there is no RDMA device {device!r}, only {', '.join(names)}")
    folder = root / device / "ports" / str(number)
    state = _read(folder / "state")
    if "ACTIVE" not in state:
        raise Unavailable(f"verbs: port {number} of {device} is not up: {state or 'there is no such port'}")
    is_ethernet = _read(folder / "link_layer") == "Ethernet"
    index = _choose_gid(folder, is_ethernet, f"{device} port {number}") if gid_index is None else gid_index
    gid = _read_gid(folder, index)
    if not any(gid):
        raise ValueError(f"gid_index must be that of an address of {device} port {number}, got {index}, which has none")
    return Port(device, number, is_ethernet, index, gid)


def _choose_gid(folder: Path, is_ethernet: bool, name: str) -> int:
    if not is_ethernet:
        return 0
    first_of_ipv6 = None
    types = f"{folder}/gid_attrs/types"
    for index in sorted(map(int, os.listdir(types))):  # up to 1024, of which few are set
        if _read(f"{types}/{index}") == "RoCE v2":
            gid = _read_gid(folder, index)
            if gid.startswith(_MAPPED):
                return index
            if first_of_ipv6 is None and any(gid) and not gid.startswith(b"\xfe\x80"):
                first_of_ipv6 = index
    if first_of_ipv6 is None:
        raise Unavailable(
            f"verbs: {name} has no RoCEv2 address that reaches other hosts: give its network interface an IP address"
        )
    return first_of_ipv6


def _read_gid(folder: Path, index: int) -> bytes:
    with suppress(ValueError):
        gid = bytes.fromhex(_read(folder / "gids" / str(index)).replace(":", ""))
        if len(gid) == 16:
            return gid
    return bytes(16)


def _read(path: str | Path) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:  # an address that is not set cannot be read
        return ""
