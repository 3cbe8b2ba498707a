"""Members of a host make the slots between them, or take over those that are free (paper, section 3.3).

To register memory CUDA waits for all streams of the process, also for those that wait for a peer. Where channels are in
several threads, the peer may be registering memory itself, and wait for a stream that waits for this rank: nobody would
ever go on. So the first channel makes slots for later ones too, for as many as may be in use at once, and divides the
window among them. A channel that takes such slots over calls nothing that waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .cuda_streams import RECEIVE, SEND, Streams, most_channels
from .errors import TransportError, TransportTimeout, Unavailable
from .lane import HostTransport
from .meetings import Meetings, book_bytes
from .places import take_place
from .segment import FOLDER, NAME_BYTES, Segment
from .stream_pool import fill_pool
from .windows import Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 8
_LARGEST_SLOT_BYTES = {
    "peer": 1 << 20,  # larger pieces are copied directly
    "segment": 4 << 20,
}
# Smaller ones are not made for the sake of later channels.
_SPARED_SLOT_BYTES = {"peer": 64 << 10, "segment": 1 << 20}
_SLOT_STEP_BYTES = 4096
_LEAST_SLOT_BYTES = 64 << 10  # less room than for these is an error
_HOST_BYTES = 80
_TEXT_BYTES = 400
_NUM_OFFERS = 16
_COUNT_BYTES = 8
_SPARE_SHARE = 4  # of the room that is left for shared memory, a quarter may go to slots for later channels

_idle: dict[tuple[object, ...], dict[str, tuple[Windows, Meetings]]] = {}
_turn = threading.Lock()  # of rank 0: one channel at a time takes slots over, or makes some


def host_key() -> str:
    """Names the host and its shared memory: equal for processes that can share a segment."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    folder = os.stat(FOLDER) if FOLDER.is_dir() else None
    return f"{boot.read_text().strip() if boot.exists() else os.uname().nodename}/{folder.st_dev if folder else '-'}"


def channels_within(via: str, window_bytes: int, num_members: int) -> int:
    """For how many channels the first one makes slots: for all that may be in use at once, if a window holds them.

    Example:
        >>> [channels_within("segment", 256 << 20, n) for n in (2, 8, 16, 64)] if most_channels() == 3 else [3, 3, 2, 1]
        [3, 3, 2, 1]
    """
    least_bytes = _DEPTH * max(1, num_members - 1) * _SPARED_SLOT_BYTES[via]
    return max(1, min(most_channels(), window_bytes // least_bytes))


def slot_size(via: str, window_bytes: int, num_members: int, num_channels: int = 1) -> int:
    """Bytes of a slot, so that all slots of so many channels for what a rank receives fit into a window.

    Example:
        >>> slot_size("segment", 256 << 20, 2, 3) >> 10, slot_size("segment", 64 << 20, 8) >> 10
        (4096, 1168)
    """
    share = window_bytes // (_DEPTH * max(1, num_members - 1) * num_channels)
    return max(_SLOT_STEP_BYTES, min(_LARGEST_SLOT_BYTES[via], share // _SLOT_STEP_BYTES * _SLOT_STEP_BYTES))


def slot_within_room(slot_bytes: int, num_members: int) -> int:
    """A smaller slot where the slots of one channel would take more than their share of what shared memory has left."""
    share = _free_bytes() // _SPARE_SHARE // (_DEPTH * max(1, num_members * (num_members - 1)))
    least = min(slot_bytes, _LEAST_SLOT_BYTES)
    return max(least, min(slot_bytes, share // _SLOT_STEP_BYTES * _SLOT_STEP_BYTES))


def _free_bytes() -> int:
    try:
        free = os.statvfs(FOLDER)
    except OSError:  # whoever makes a segment then says so to all ranks
        return 0
    return free.f_bavail * free.f_frsize


def open_windows(
    lane: HostTransport,
    members: Sequence[int],
    make_streams: Callable[[], Streams],
    device: int,
    via: str,
    window_bytes: int,
    first_count: int,
    patience_s: float | None = None,
) -> tuple[Windows, Meetings]:
    """Make the slots between the members of this host; collective over all ranks of the lane.

    Args:
        lane: Carries names and handles, nothing else.
        members: Ranks of this host in order.
        make_streams: Makes this rank's streams.
        device: Index of the device.
        via: "peer" (slots are for small pieces) or "segment".
        window_bytes: Most memory of a rank, for all channels that the first one makes slots for.
        first_count: Where counts begin.
        patience_s: See `Meetings`.

    Raises:
        Unavailable: Members are on different hosts, or cannot share memory.
        TransportError: Something else failed, here or on another rank.
    """
    _check_host(lane, members)
    fill_pool(device)
    kind = (tuple(members), via, window_bytes, device)
    with _in_turn(lane):  # all ranks have come, so nobody holds it for long
        taken = _take_over(lane, members, kind)
        if taken is None:
            # Slots that hold every piece that goes through them need no second stream to keep them filled.
            sending = RECEIVE if via == "peer" else SEND
            wanted = least_said(lane, channels_within(via, window_bytes, len(members)))
            slot_bytes = least_said(
                lane, slot_within_room(slot_size(via, window_bytes, len(members), wanted), len(members))
            )
            making = _Making(lane, members, slot_bytes, sending, first_count)
            for _ in range(least_said(lane, making.number_within(wanted))):
                made = making.make(make_streams, patience_s)
                _kinds[id(made[0])] = kind
                _idle.setdefault(kind, {})[made[0].segment.name] = made
            taken = _take_over(lane, members, kind)
    if taken is None:
        raise TransportError("another channel of the same ranks took the slots that were made for this one")
    try:
        with together(lane):
            take_place(taken[0].streams, lane.timeout_s)
    except BaseException:
        put_away(*taken)
        raise
    return taken


_kinds: dict[int, tuple[object, ...]] = {}


def put_away(windows: Windows, meetings: Meetings) -> None:
    """Keep the slots of a closed channel, through which nothing passes any more, for a later one."""
    windows.streams.rest()
    _idle.setdefault(_kinds[id(windows)], {})[windows.segment.name] = windows, meetings


def _check_host(lane: HostTransport, members: Sequence[int]) -> None:
    hosts = gather_bytes(lane, host_key().encode(), _HOST_BYTES)
    others = [peer for peer in members if hosts[peer] != hosts[lane.rank]]
    with together(lane):
        if others:
            raise Unavailable(
                f"copies between GPUs need one host with one {FOLDER}: rank {lane.rank} is not where ranks {others} are"
            )


def _take_over(
    lane: HostTransport, members: Sequence[int], kind: tuple[object, ...]
) -> tuple[Windows, Meetings] | None:
    idle = _idle.setdefault(kind, {})
    names = "".join(name.ljust(NAME_BYTES) for name in sorted(idle)[:_NUM_OFFERS])
    offers = gather_bytes(lane, names.encode(), NAME_BYTES * _NUM_OFFERS)
    common = set.intersection(*(_names_in(offers[peer].decode()) for peer in members))
    taken = idle.pop(min(common), None) if common else None
    # Other hosts may have none, or a thread that has its turn elsewhere, as a rank of other groups, was faster.
    have = gather_bytes(lane, b"1" if taken is not None else b"0", 1)
    if taken is not None and any(each != b"1" for each in have):
        put_away(*taken)
        taken = None
    return taken


def _names_in(offer: str) -> set[str]:
    return {offer[at : at + NAME_BYTES].strip() for at in range(0, len(offer), NAME_BYTES)}


@contextmanager
def _in_turn(lane: HostTransport) -> Iterator[None]:
    """Let threads of rank 0, and with them those of the others, come one after another. Collective."""
    held = False
    try:
        with together(lane):
            held = lane.rank == 0 and _turn.acquire(timeout=lane.timeout_s)
            if lane.rank == 0 and not held:
                raise TransportTimeout(f"another channel has not got its slots in {lane.timeout_s:g} s")
        yield
    finally:
        if held:
            _turn.release()


class _Making:
    """The steps in which members make a segment and lay it out."""

    def __init__(
        self, lane: HostTransport, members: Sequence[int], slot_bytes: int, sending: int, first_count: int
    ) -> None:
        self._lane, self._members = lane, list(members)
        self._slot_bytes, self._sending, self._first_count = slot_bytes, sending, first_count
        self._member = self._members.index(lane.rank)
        self._ring_bytes = slot_bytes * _DEPTH
        n = len(members)
        self._book_bytes = -(-book_bytes(n) // _SLOT_STEP_BYTES) * _SLOT_STEP_BYTES
        self._data_bytes = self._book_bytes + n * (n - 1) * self._ring_bytes
        self._segment: Segment | None = None

    def number_within(self, wanted: int) -> int:
        """For how many channels to make slots: one, and more for later ones while there is room in shared memory."""
        return max(1, min(wanted, _free_bytes() // _SPARE_SHARE // self._data_bytes))

    def make(self, make_streams: Callable[[], Streams], patience_s: float | None) -> tuple[Windows, Meetings]:
        """Make the slots of one channel."""
        with together(self._lane):
            streams = make_streams()
        self._make_segment()
        return self._make_windows(streams, patience_s)

    def _make_segment(self) -> None:
        """The first member makes it, the others join, the name goes away."""
        lane, n = self._lane, len(self._members)
        leads = self._member == 0
        with together(lane):
            if leads:
                self._segment = Segment.create(n, 0, self._data_bytes)
        name = self._segment.name if self._segment is not None else ""
        names = gather_bytes(lane, name.encode(), NAME_BYTES)
        try:
            with together(lane):
                if not leads:
                    name = names[self._members[0]].decode(errors="replace")
                    self._segment = Segment.open(name, n, self._member, self._data_bytes)
        finally:
            if leads and self._segment is not None:
                self._segment.unlink()

    def _make_windows(self, streams: Streams, patience_s: float | None) -> tuple[Windows, Meetings]:
        """Register the segment, set the counts."""
        lane, segment = self._lane, self._segment
        assert segment is not None, "the segment is made first"
        flags = 0
        with together(lane):
            flags = streams.register(segment.address, segment.size)
        outgoing: dict[int, int] = {}
        incoming: dict[int, int] = {}
        for index, peer in enumerate(self._members):
            if index != self._member:
                outgoing[peer] = flags + self._in_segment(segment, self._member, index)
                incoming[peer] = flags + self._in_segment(segment, index, self._member)
        place = lane.rank, self._members, streams, segment, flags
        with together(lane):  # all flags are set
            windows = Windows(*place, outgoing, incoming, self._slot_bytes, _DEPTH, self._sending, self._first_count)
            meetings = Meetings(*place, segment.data_at, self._first_count, patience_s)
        return windows, meetings

    @staticmethod
    def _ring(source: int, target: int) -> int:
        """Which of the target's rings is the source's."""
        return source - (source > target)

    def _in_segment(self, segment: Segment, source: int, target: int) -> int:
        ring = target * (len(self._members) - 1) + self._ring(source, target)
        return segment.data_at + self._book_bytes + ring * self._ring_bytes


def gather_bytes(lane: HostTransport, mine: bytes, size: int) -> list[bytes]:
    """Give everybody's bytes to everybody, of a size that all know."""
    assert len(mine) <= size, "the size is that of the longest"
    block = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if mine:
        block[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    gathered: Tensor = lane.all_gather(block).wait()
    return [bytes(part.numpy()).rstrip(b"\0") for part in gathered.reshape(lane.world_size, size)]


def least_said(lane: HostTransport, mine: int) -> int:
    """The least of all ranks' counts; collective."""
    return min(int(said) for said in gather_bytes(lane, str(mine).encode(), _COUNT_BYTES))


@contextmanager
def together(lane: HostTransport) -> Iterator[None]:
    """Around a step that may fail on some rank: then it fails on all, at once. Collective.

    Raises:
        Unavailable: Some rank's step raised that.
        TransportError: Some rank's raised something else.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    texts = gather_bytes(lane, text.encode()[:_TEXT_BYTES], _TEXT_BYTES)
    if isinstance(failure, TransportError):
        raise failure
    if failure is not None:
        raise TransportError(text) from failure
    for peer, said in enumerate(texts):
        if said:
            _raise_for(peer, said.decode(errors="replace"))


def _raise_for(peer: int, said: str) -> NoReturn:
    kind = Unavailable if said.startswith("Unavailable") else TransportError
    raise kind(f"rank {peer}: {said}")
