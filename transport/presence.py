"""Whether the process of a rank is still there: a socket of each that listens and accepts nobody (section 3.3).

The system takes connections for whoever listens, however busy, stopped or stuck that process is, and refuses them as
soon as it is gone. So nobody has to answer, and nothing is sent while all goes well.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

_SILENCE_S = 1.0  # a host that says nothing at all is not known to be gone
_AGAIN_S = 0.2  # the system closes one by one what a process leaves
_NAP_S = 0.02
_AT_ONCE = 128  # sockets
_BACKLOG = 4096
_ENTRY = re.compile(r"([!-~]+) ([0-9a-fA-F:.]+(?:%[\w.-]+)?) ([0-9]{1,5})", re.ASCII)


class Presence:
    """What every rank listens on, and where others do.

    Args:
        store: Shared by the ranks of a process group.
        prefix: Of keys in it; the same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"{prefix}/presence/{peer}" for peer in range(world_size)]
        self._addresses: dict[int, tuple[str, int]] = {}
        self._has_looked = False
        where = ""
        with suppress(OSError):  # peers can then not tell whether this rank is there
            family, address = _address_towards(store)
            listening = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
            weakref.finalize(self, listening.close)
            _listening.add(listening)
            where = f"{_network()} {address} {listening.getsockname()[1]}"
        with suppress(RuntimeError):  # whoever needs the store next says what is wrong with it
            store.set(self._keys[rank], where)

    def look_around(self) -> None:
        """Learn where the others listen, once all have come: later the store may be gone."""
        if self._has_looked:
            return
        self._has_looked = True
        ours = _network()
        entries: list[bytes] = []
        with suppress(RuntimeError):
            extended = self._store.has_extended_api()
            entries = self._store.multi_get(self._keys) if extended else [self._store.get(key) for key in self._keys]
        for peer, entry in enumerate(entries):
            found = _ENTRY.fullmatch(entry.decode(errors="replace"))
            if peer == self._rank or found is None or not _is_address(found[2], int(found[3])):
                continue  # whatever else stands there is nobody who listens
            # A loopback address means another host there.
            if found[1] == ours or not _is_loopback(found[2]):
                self._addresses[peer] = (found[2], int(found[3]))

    def gone(self) -> list[int]:
        """Ranks whose processes have ended, or that have closed all of the transport.

        Those of which that is not known are left out, such as those whose host is gone.
        """
        deadline = time.monotonic() + _AGAIN_S
        peers = sorted(self._addresses)
        while True:
            refusing: list[int] = []
            for start in range(0, len(peers), _AT_ONCE):
                refusing += self._refusing(peers[start : start + _AT_ONCE])
            if refusing or time.monotonic() > deadline:
                return sorted(refusing)
            time.sleep(_NAP_S)

    def _refusing(self, peers: Sequence[int]) -> list[int]:
        """Connect to all at once; ranks where nobody listens any more."""
        refusing: list[int] = []
        deadline = time.monotonic() + _SILENCE_S
        with suppress(OSError), ExitStack() as stack:  # what cannot be found out here is not known
            waiting = stack.enter_context(selectors.DefaultSelector())
            for peer in peers:
                with suppress(OSError):  # too many files, or an address of an interface that this host has not
                    address = self._addresses[peer]
                    probe = stack.enter_context(socket.socket(_family(address[0])))
                    probe.setblocking(False)
                    if (code := probe.connect_ex(address)) == errno.EINPROGRESS:
                        waiting.register(probe, selectors.EVENT_WRITE, (peer, probe))
                    elif code == errno.ECONNREFUSED:
                        refusing.append(peer)
            while waiting.get_map() and (seconds := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(seconds):
                    peer, probe = key.data
                    waiting.unregister(probe)
                    if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                        refusing.append(peer)
        return refusing


_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A child forked from a rank, such as a worker of a DataLoader, may outlive it: it must not go on listening."""
    for listening in list(_listening):
        listening.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _address_towards(store: Any) -> tuple[socket.AddressFamily, str]:
    """Where those can reach this host who use the same store."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host:  # a file, say, which ranks of one host share
        return socket.AF_INET, "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as unsent:
        unsent.connect(address)
        return family, unsent.getsockname()[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_address(address: str, port: int) -> bool:
    with suppress(ValueError):
        return 0 < port < 1 << 16 and bool(ip_address(address))
    return False


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _network() -> str:
    """Names what a loopback address belongs to: the boot of a host, and the container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot.read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    return os.uname().nodename
