"""The RDMA library `pyverbs`, rdma-core's own, which distributions package (paper, section 3.3).

Its objects for work requests never free what they allocate, so each pair makes them once and changes them. Its wait for
a completion holds the interpreter lock and has no deadline, so others wait for the file descriptor instead.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pyverbs.enums as e
from numpy.typing import NDArray
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from ..errors import TransportError
from .binding import (
    HOP_LIMIT,
    NO_ROOM_RETRIES,
    RETRIES,
    Address,
    Completion,
    Pair,
    Queue,
    Region,
    explain_status,
    format_gid,
)
from .device import Port

_ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
_making_channel = threading.Lock()


class PyverbsCard:
    """An opened device. See `Card`."""

    error: type[Exception] = PyverbsError

    def __init__(self, port: Port) -> None:
        self._port = port
        self._context = Context(name=port.device)
        described = self._context.query_port(port.number)
        device = self._context.query_device()
        self.lid, self.mtu = described.lid, described.active_mtu
        self.most_message_bytes, self.most_completions = described.max_msg_sz, device.max_cqe
        self._domain = PD(self._context)

    def register(self, memory: NDArray[np.uint8]) -> Region:
        """See `Card.register`."""
        return _Region(MR(self._domain, memory.nbytes, _ACCESS, address=memory.ctypes.data))

    def make_queue(self, depth: int) -> Queue:
        """See `Card.make_queue`."""
        return _Queue(self._context, depth)

    def make_pair(self, queue: Queue, sends: int, receives: int) -> Pair:
        """See `Card.make_pair`."""
        assert isinstance(queue, _Queue), "a queue of this card"
        return _Pair(self._port, self.mtu, self._domain, queue, sends, receives)

    def close(self) -> None:
        """See `Card.close`."""
        self._domain.close()
        self._context.close()


class _Region:
    def __init__(self, region: MR) -> None:
        self._region = region
        self.local_key, self.remote_key = region.lkey, region.rkey

    def close(self) -> None:
        self._region.close()


class _Queue:
    def __init__(self, context: Context, depth: int) -> None:
        self._channel, self.fd = _make_channel(context)
        self.queue = CQ(context, depth, None, self._channel, 0)

    def poll(self, most: int) -> list[Completion]:
        return [
            Completion(found.wr_id, found.qp_num, explain_status(found.status), found.imm_data, found.byte_len)
            for found in self.queue.poll(most)[1]
        ]

    def arm(self) -> None:
        self.queue.req_notify()

    def acknowledge(self) -> None:
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)

    def close(self) -> None:
        self.queue.close()
        self._channel.close()


def _make_channel(context: Context) -> tuple[CompChannel, int]:
    """Make a completion channel and find its file descriptor, which this library does not tell."""
    for _ in range(100):
        with _making_channel:
            before = _event_files()
            channel = CompChannel(context)
            made = _event_files() - before
        if len(made) == 1:
            return channel, made.pop()
        channel.close()  # somebody else in this process made one at the same time
    raise TransportError("verbs: pyverbs does not tell the file descriptor of its completion channel, nor does /proc")


def _event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


class _Pair:
    def __init__(self, port: Port, mtu: int, domain: PD, queue: _Queue, sends: int, receives: int) -> None:
        self._port, self._mtu = port, mtu
        room = QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue.queue, rcq=queue.queue, cap=room, sq_sig_all=1)
        attributes = QPAttr(port_num=port.number)
        attributes.qp_access_flags = _ACCESS
        self._pair = QP(domain, wanted, attributes)
        self.number = self._pair.qp_num
        piece = SGE(0, 0, 0)
        self._receive = RecvWR(num_sge=1, sg=[piece])
        self._receive.num_sge = 0
        self._piece = piece
        self._write = SendWR(num_sge=1, sg=[piece], send_flags=e.IBV_SEND_SIGNALED)
        self._write.sg_list = piece

    def connect(self, peer: Address, first_packet: int, ack_timeout: int) -> None:
        port = self._port
        route = GlobalRoute(dgid=GID(format_gid(peer.gid)), sgid_index=port.gid_index, hop_limit=HOP_LIMIT)
        path = AHAttr(gr=route, is_global=1, dlid=peer.lid, port_num=port.number)
        attributes = QPAttr(port_num=port.number)
        attributes.ah_attr = path
        attributes.path_mtu = min(peer.mtu, self._mtu)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn, attributes.sq_psn = peer.first_packet, first_packet
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 12
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = ack_timeout, RETRIES, NO_ROOM_RETRIES
        self._pair.to_rts(attributes)

    def expect(self, count: int) -> None:
        for _ in range(count):
            self._pair.post_recv(self._receive)

    def write(
        self, work: int, source: tuple[int, int, int], remote_address: int, remote_key: int, tag: int | None
    ) -> None:
        request, piece = self._write, self._piece
        piece.addr, piece.length, piece.lkey = source
        request.num_sge = 1 if source[1] else 0
        request.wr_id = work
        request.opcode = e.IBV_WR_RDMA_WRITE if tag is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        request.imm_data = tag or 0
        request.set_wr_rdma(remote_key, remote_address)
        self._pair.post_send(request)

    def close(self) -> None:
        self._pair.close()
