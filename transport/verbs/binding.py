"""What is needed of an RDMA library: register, connect, write, poll (paper, section 3.3).

Two libraries serve it, chosen by name: `pyverbs`, which distributions package with rdma-core, and `ibverbs` from PyPI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import TransportError, Unavailable
from .device import Port

HOP_LIMIT = 64  # routers on the way of RoCEv2
RETRIES = 6  # not 7: Soft-RoCE then tries for ever
NO_ROOM_RETRIES = 7  # for ever: a peer that makes no room, though it lives, is a matter of our own deadline
BINDINGS = ("pyverbs", "ibverbs")
NO_RDMA_ERRNO = 38  # ENOSYS: the kernel has no RDMA subsystem
_STATUS = {  # of completions, as <infiniband/verbs.h> numbers them
    1: "LOC_LEN_ERR",
    2: "LOC_QP_OP_ERR",
    4: "LOC_PROT_ERR",
    5: "WR_FLUSH_ERR",
    8: "LOC_ACCESS_ERR",
    9: "REM_INV_REQ_ERR: it has no room for the write, or not of this size",
    10: "REM_ACCESS_ERR: it does not let us write there",
    11: "REM_OP_ERR",
    12: "RETRY_EXC_ERR: its process has ended, or the network is down",
    13: "RNR_RETRY_EXC_ERR: it makes no room for writes",
    19: "FATAL_ERR",
    21: "GENERAL_ERR",
}
_NO_RDMA = "this kernel has no RDMA subsystem: load the driver of your card, or for tests Soft-RoCE (modprobe rdma_rxe)"


@dataclass(frozen=True)
class Address:
    """Where a queue pair can be reached.

    Attributes:
        number: Of the queue pair, 24 bits.
        first_packet: Sequence number of the first packet it sends, 24 bits.
        lid: Of the port, on InfiniBand; 0 on Ethernet.
        mtu: Largest packet of the port: 1 to 5 for 256 to 4096 bytes.
        gid: 16 bytes.
    """

    number: int
    first_packet: int
    lid: int
    mtu: int
    gid: bytes

    def check(self) -> None:
        """Raise if a value cannot be one of a queue pair's; it comes from a peer.

        Raises:
            TransportError: A number is out of its range.
        """
        good = 0 < self.number < 2**24 and 0 <= self.first_packet < 2**24 and 0 <= self.lid < 2**16
        if not (good and 1 <= self.mtu <= 5 and len(self.gid) == 16):
            raise TransportError(f"verbs: a peer says that its queue pair is {self}, which cannot be")


class Completion(NamedTuple):
    """What became of one work request.

    Attributes:
        work: The number given to `Pair.write`; 0 for a write of the peer's that arrived.
        pair: Number of the queue pair.
        failure: Empty, or the status and what it means.
        tag: Immediate value of a write that arrived.
        size: Bytes of a write that arrived.
    """

    work: int
    pair: int
    failure: str
    tag: int
    size: int


class Region(Protocol):
    """Registered memory.

    Attributes:
        local_key: For writes from it.
        remote_key: For a peer's writes into it.
    """

    local_key: int
    remote_key: int

    def close(self) -> None:
        """Unregister it."""


class Queue(Protocol):
    """A completion queue that a thread can wait for.

    Attributes:
        fd: Becomes readable when a completion comes after `arm`.
    """

    fd: int

    def poll(self, most: int) -> list[Completion]:
        """Take up to so many completions. Does not block."""

    def arm(self) -> None:
        """Make `fd` readable at the next completion."""

    def acknowledge(self) -> None:
        """Take the event off `fd`, which is readable."""

    def close(self) -> None:
        """Give it back, after its pairs."""


class Pair(Protocol):
    """A reliable connection to one peer.

    Attributes:
        number: 24 bits.
    """

    number: int

    def connect(self, peer: Address, first_packet: int, ack_timeout: int) -> None:
        """Connect to the peer's pair. Neither waits for the peer nor talks to it."""

    def expect(self, count: int) -> None:
        """Make room for so many more writes with a tag from the peer."""

    def write(
        self, work: int, source: tuple[int, int, int], remote_address: int, remote_key: int, tag: int | None
    ) -> None:
        """Write (address, bytes, local key) into the peer's memory; zero bytes touch none. A tag makes it known there.

        It completes with the number `work`, when the peer's card has acknowledged it.
        """

    def close(self) -> None:
        """Destroy the pair. What is under way is dropped; nothing is written into our memory any more."""


class Card(Protocol):
    """An opened device.

    Attributes:
        error: What the library raises, from here and from what is made here.
        lid: Of the port.
        mtu: Largest packet, 1 to 5.
        most_message_bytes: Largest write.
        most_completions: Largest completion queue.
    """

    error: type[Exception]
    lid: int
    mtu: int
    most_message_bytes: int
    most_completions: int

    def register(self, memory: NDArray[np.uint8]) -> Region:
        """Let the card, and peers that know the key, write the memory. It must stay alive until unregistered."""

    def make_queue(self, depth: int) -> Queue:
        """Make a completion queue."""

    def make_pair(self, queue: Queue, sends: int, receives: int) -> Pair:
        """Make a queue pair that completes into a queue, with room for so many work requests each way."""

    def close(self) -> None:
        """Give the device back, after all else."""


def load_binding(name: str) -> Callable[[Port], Card]:
    """Import one of the libraries; what is returned opens a device.

    Raises:
        Unavailable: It cannot be imported; says what to install.
    """
    try:
        if name == "pyverbs":
            from .pyverbs_card import PyverbsCard

            return PyverbsCard
        from .ibverbs_card import IbverbsCard

        return IbverbsCard
    except ImportError as error:
        raise Unavailable(f"verbs: {_explain_import(name, error)}") from error


def _explain_import(binding: str, error: ImportError) -> str:
    if binding == "pyverbs":
        return (
            f"pyverbs cannot be imported ({error}): apt install python3-pyverbs ibverbs-providers (dnf install "
            "python3-pyverbs), for the Python that the distribution has; into a virtual environment of the same minor "
            "version, link /usr/lib/python3/dist-packages/pyverbs. The pyverbs on PyPI does not work"
        )
    return f"ibverbs cannot be imported ({error}): pip install ibverbs; apt install ibverbs-providers (dnf: libibverbs)"


def explain_error(error: Exception) -> str:
    """Say what an error of a library means."""
    text = str(error)
    if f"Errno {NO_RDMA_ERRNO}" in text or f"Errno: {NO_RDMA_ERRNO}" in text:
        return f"{text}: {_NO_RDMA}"
    if "Errno 12" in text or "Errno: 12" in text:
        return f"{text}: more memory to register than `ulimit -l` allows, or the card has no more room"
    return text


def explain_status(status: int) -> str:
    """The failure of a completion in words; empty when there is none."""
    return _STATUS.get(status, f"completion status {status}") if status else ""


def format_gid(gid: bytes) -> str:
    """Write 16 bytes as eight groups of four digits."""
    return ":".join(gid[start : start + 2].hex() for start in range(0, 16, 2))
