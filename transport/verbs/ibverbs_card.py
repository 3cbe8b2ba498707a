"""The RDMA library `ibverbs` from PyPI, which finds libibverbs when it is imported (paper, section 3.3)."""

from __future__ import annotations

import ibverbs
import numpy as np
from ibverbs import AccessFlags, SendFlags, WROpcode
from numpy.typing import NDArray

from ..errors import Unavailable
from .binding import HOP_LIMIT, NO_ROOM_RETRIES, RETRIES, Address, Completion, Pair, Queue, Region, explain_status
from .device import Port

_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


class IbverbsCard:
    """An opened device. See `Card`."""

    error: type[Exception] = OSError

    def __init__(self, port: Port) -> None:
        self._port = port
        devices = {device.name: device for device in ibverbs.get_device_list()}
        if port.device not in devices:
            raise Unavailable(
                f"verbs: libibverbs has no driver for {port.device} (it knows {sorted(devices)}): "
                "apt install ibverbs-providers"
            )
        self._context = devices[port.device].open()
        described = self._context.query_port(port.number)
        self.lid, self.mtu = int(described.lid), int(described.active_mtu)
        self.most_message_bytes = int(described.max_msg_sz)
        self.most_completions = int(self._context.query_device().max_cqe)
        self._domain = self._context.alloc_pd()

    def register(self, memory: NDArray[np.uint8]) -> Region:
        """See `Card.register`."""
        return _Region(self._domain.reg_mr(memory.ctypes.data, memory.nbytes, _ACCESS))

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
    def __init__(self, region: ibverbs.MR) -> None:
        self._region = region
        self.local_key, self.remote_key = region.lkey, region.rkey

    def close(self) -> None:
        self._region.close()


class _Queue:
    def __init__(self, context: ibverbs.Context, depth: int) -> None:
        self._channel = context.create_comp_channel()
        self.fd = self._channel.fd
        self.queue = context.create_cq(depth, self._channel)

    def poll(self, most: int) -> list[Completion]:
        return [
            Completion(found.wr_id, found.qp_num, explain_status(int(found.status)), found.imm_data, found.byte_len)
            for found in self.queue.poll(most)
        ]

    def arm(self) -> None:
        self.queue.req_notify()

    def acknowledge(self) -> None:
        self._channel.get_cq_event()
        self.queue.ack_events(1)

    def close(self) -> None:
        self.queue.close()
        self._channel.close()


class _Pair:
    def __init__(self, port: Port, mtu: int, domain: ibverbs.PD, queue: _Queue, sends: int, receives: int) -> None:
        self._port, self._mtu = port, mtu
        self._pair = domain.create_qp(
            ibverbs.QPInitAttr(
                send_cq=queue.queue,
                recv_cq=queue.queue,
                max_send_wr=sends,
                max_recv_wr=receives,
                max_send_sge=1,
                max_recv_sge=1,
            )
        )
        self.number = self._pair.qp_num
        self._pair.to_init(port.number, _ACCESS)
        self._receive = ibverbs.RecvWR()

    def connect(self, peer: Address, first_packet: int, ack_timeout: int) -> None:
        remote = ibverbs.QPInfo(
            qp_num=peer.number,
            psn=peer.first_packet,
            lid=peer.lid,
            gid=peer.gid,
            port=self._port.number,  # of ours: it says where packets leave
            mtu=peer.mtu,
        )
        self._pair.to_rtr(remote, sgid_index=self._port.gid_index, mtu=min(peer.mtu, self._mtu), hop_limit=HOP_LIMIT)
        self._pair.to_rts(first_packet, timeout=ack_timeout, retry_cnt=RETRIES, rnr_retry=NO_ROOM_RETRIES)

    def expect(self, count: int) -> None:
        self._pair.post_recv([self._receive] * count)

    def write(
        self, work: int, source: tuple[int, int, int], remote_address: int, remote_key: int, tag: int | None
    ) -> None:
        address, size, key = source
        request = ibverbs.SendWR(
            wr_id=work,
            sg_list=[ibverbs.SGE(address, size, key)] if size else [],
            opcode=WROpcode.RDMA_WRITE if tag is None else WROpcode.RDMA_WRITE_WITH_IMM,
            send_flags=SendFlags.SIGNALED,
            remote_addr=remote_address,
            rkey=remote_key,
            imm_data=tag or 0,
        )
        self._pair.post_send(request)

    def close(self) -> None:
        self._pair.close()
