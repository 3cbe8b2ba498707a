"""Shared memory between the ranks of a host: flags, news of failures, and room for data (paper, section 3.3).

The segment has a random name, is readable by this user only, and loses its name as soon as all ranks have it, so that
nothing is left behind however they end. Each rank holds a lock on a byte of it, which the system drops when the process
ends.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import TransportError, Unavailable
from .slots import has_reached

FOLDER = Path("/dev/shm")
NAME_BYTES = 48
_LINE_BYTES = 64  # a flag has a cache line of its own
_NUM_FLAGS = 5  # of every pair and direction
_NEWS_BYTES = 512
_PAGE = mmap.PAGESIZE
_NAP_S = 0.00002
_LOCK = "hhqqi4x"  # struct flock where off_t has 64 bits: type, whence, start, length, pid


class Segment:
    """A mapping that all members of a host share. Made by `create` on one of them and by `open` on the others.

    Attributes:
        name: Its name under /dev/shm, for as long as it has one.
        address: Where it is mapped in this process.
        size: Bytes of the mapping.
        data_at: Where the room for data begins, in bytes from `address`.
    """

    def __init__(self, name: str, file: int, num_members: int, member: int, size: int) -> None:
        self.name, self.size = name, size
        self._file, self._num_members, self._member = file, num_members, member
        self._map = mmap.mmap(file, size)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._words = memoryview(self._map).cast("I")  # NumPy takes three times as long for one
        self.address = int(self._bytes.ctypes.data)
        self.data_at = _data_at(num_members)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, member)

    @classmethod
    def create(cls, num_members: int, member: int, data_bytes: int) -> Segment:
        """Make a segment with room for data, all zero.

        Raises:
            Unavailable: There is no /dev/shm, or too little room in it.
        """
        name = f"freescale-{secrets.token_hex(16)}"
        size = _data_at(num_members) + -(-data_bytes // _PAGE) * _PAGE
        try:
            file = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"cannot make shared memory in {FOLDER}: {error.strerror}") from error
        try:
            os.posix_fallocate(file, 0, size)
            return cls(name, file, num_members, member, size)
        except OSError as error:
            os.close(file)
            os.unlink(FOLDER / name)
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise Unavailable(f"cannot use shared memory in {FOLDER}: {error.strerror}") from error
            raise Unavailable(
                f"{FOLDER} has no room for {size >> 20} MiB ({error.strerror}): in a container give it more, "
                "docker run --shm-size=8g say, or ask for a smaller window"
            ) from error

    @classmethod
    def open(cls, name: str, num_members: int, member: int, data_bytes: int) -> Segment:
        """Join a segment that another member made.

        Raises:
            TransportError: It is not there, not ours, or not of the size that was agreed.
        """
        size = _data_at(num_members) + -(-data_bytes // _PAGE) * _PAGE
        if not name.startswith("freescale-") or "/" in name:
            raise TransportError(f"{name!r} is no name of a segment")
        try:
            file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"cannot open shared memory {FOLDER / name}: {error.strerror}") from error
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
            os.close(file)
            raise TransportError(f"{FOLDER / name} has {found.st_size} bytes of user {found.st_uid}, expected {size}")
        return cls(name, file, num_members, member, size)

    def unlink(self) -> None:
        """Take its name away; mappings stay."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def leave(self) -> None:
        """Give up this member's lock and the file; the memory stays for as long as it is viewed."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def arrived(self, source: int, target: int) -> int:
        """Where the count of chunks from one member to another is, in bytes from `address`."""
        return (source * self._num_members + target) * _LINE_BYTES

    def consumed(self, source: int, target: int) -> int:
        """Where the count of chunks that the receiver is through with is, in bytes from `address`."""
        return ((self._num_members + source) * self._num_members + target) * _LINE_BYTES

    def meeting(self, flag: int, writer: int, other: int) -> int:
        """Where one of the three flags of a meeting that `writer` writes is, in bytes from `address`."""
        return (((2 + flag) * self._num_members + writer) * self._num_members + other) * _LINE_BYTES

    def failed(self, member: int) -> int:
        """Where the word is that is 1 once a member has failed, in bytes from `address`."""
        return _NUM_FLAGS * self._num_members**2 * _LINE_BYTES + member * _NEWS_BYTES

    def view(self, at: int, size: int) -> NDArray[np.uint8]:
        """Bytes of the mapping; writing to them writes to the segment."""
        return self._bytes[at : at + size]

    def locked(self, number: int) -> _Locked:
        """Hold one of the locks of the segment against other processes, for a moment: with segment.locked(number)."""
        return _Locked(self._file, self._num_members + number)

    def read(self, at: int) -> int:
        """The word at a place."""
        return self._words[at >> 2]

    def shows(self, at: int, count: int) -> bool:
        """Whether the flag at a place shows at least a count (see `slots.has_reached`)."""
        return has_reached(self._words[at >> 2], count)

    def write(self, at: int, value: int) -> None:
        """Set the word at a place."""
        self._words[at >> 2] = value

    def tell(self, text: str) -> None:
        """Say that this member failed, and why. The first reason stays."""
        at = self.failed(self._member)
        if not self.read(at):
            news = text.encode()[: _NEWS_BYTES - 8]
            self._map[at + 4 : at + 8] = struct.pack("I", len(news))
            self._map[at + 8 : at + 8 + len(news)] = news
            self.write(at, 1)

    def news(self, member: int) -> str | None:
        """Why a member failed: what it said, or that its process has ended; None while it is well."""
        at = self.failed(member)
        if self.read(at):
            (size,) = struct.unpack("I", self._map[at + 4 : at + 8])
            return self._map[at + 8 : at + 8 + min(size, _NEWS_BYTES - 8)].decode(errors="replace")
        if member == self._member:
            return None
        # Whether somebody else holds the lock of that member.
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, member, 1, 0)
        kind = struct.unpack(_LOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0]
        return "its process has ended" if kind == fcntl.F_UNLCK else None


class _Locked:
    """A lock on a byte of a file, for as long as the block.

    Whoever holds it must not wait for another one. The system takes two threads of this process, of which one holds
    a lock and one waits, for one that does both, and so may see a deadlock where there is none.
    """

    def __init__(self, file: int, at: int) -> None:
        self._file, self._at = file, at

    def __enter__(self) -> None:
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._at)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(_NAP_S)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._at)


def _data_at(num_members: int) -> int:
    flags = _NUM_FLAGS * num_members**2 * _LINE_BYTES + num_members * _NEWS_BYTES
    return -(-flags // _PAGE) * _PAGE
