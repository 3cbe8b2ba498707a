"""Shared memory of a host: nobody else's, the size that was agreed, nothing left behind, and news of the dead."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.transport import TransportError, Unavailable
from freescale.transport.segment import FOLDER, Segment

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")
_OTHER = """
import sys
from freescale.transport.segment import Segment
segment = Segment.open(sys.argv[1], 2, 1, 100)
segment.write(segment.arrived(1, 0), 2**32 - 7)
if sys.argv[2] == "tells":
    segment.tell("the disk is full: " + "x" * 2000)
print("joined", flush=True)
sys.stdin.read()
"""


def start(segment: Segment, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OTHER, segment.name, how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def test_members_see_each_others_words_and_a_process_that_ended() -> None:
    segment = Segment.create(2, 0, 100)
    process = start(segment, "is silent")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        segment.unlink()
        assert not (FOLDER / segment.name).exists()
        assert segment.read(segment.arrived(1, 0)) == 2**32 - 7
        assert segment.news(1) is None
    finally:
        end(process)
    assert segment.news(1) == "its process has ended"
    assert segment.news(0) is None


def test_a_member_says_why_it_failed() -> None:
    segment = Segment.create(2, 0, 100)
    process = start(segment, "tells")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        news = segment.news(1)
        assert news is not None
        assert news.startswith("the disk is full: xxx")
    finally:
        end(process)
        segment.unlink()


def test_only_this_user_may_read_it_and_its_name_cannot_be_guessed() -> None:
    first, second = Segment.create(2, 0, 0), Segment.create(2, 0, 0)
    try:
        found = os.stat(FOLDER / first.name)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert first.name != second.name
        assert len(first.name) > 30
    finally:
        first.unlink()
        second.unlink()


@pytest.mark.parametrize("name", ["../etc/passwd", "freescale-../x", "other"])
def test_names_from_peers_are_not_paths(name: str) -> None:
    with pytest.raises(TransportError, match="is no name of a segment"):
        Segment.open(name, 2, 1, 0)


def test_another_size_is_refused() -> None:
    segment = Segment.create(2, 0, 1 << 20)
    try:
        with pytest.raises(TransportError, match="bytes of user"):
            Segment.open(segment.name, 2, 1, 2 << 20)
        with pytest.raises(TransportError, match="bytes of user"):
            Segment.open(segment.name, 3, 1, 1 << 20)
    finally:
        segment.unlink()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"x")
    link = FOLDER / f"freescale-test-link-{os.getpid()}"
    link.symlink_to(target)
    try:
        with pytest.raises(TransportError, match="cannot open shared memory"):
            Segment.open(link.name, 2, 1, 0)
    finally:
        link.unlink()


def test_too_little_room_says_what_to_do_and_leaves_nothing() -> None:
    before = set(os.listdir(FOLDER))
    with pytest.raises(Unavailable, match=r"no room for .* ask for a smaller window"):
        Segment.create(2, 0, 1 << 50)
    assert {name for name in set(os.listdir(FOLDER)) - before if name.startswith("freescale-")} == set()


def test_flags_and_news_do_not_overlap() -> None:
    n = 3
    segment = Segment.create(n, 0, 64)
    try:
        pairs = [(a, b) for a in range(n) for b in range(n)]
        places = [segment.arrived(*pair) for pair in pairs] + [segment.consumed(*pair) for pair in pairs]
        places += [segment.meeting(flag, *pair) for flag in range(3) for pair in pairs]
        assert len(set(places)) == 5 * n * n
        assert max(places) + 64 <= segment.failed(0)
        assert segment.failed(n - 1) + 512 <= segment.data_at
        assert segment.data_at + 64 <= segment.size
    finally:
        segment.unlink()


def test_what_is_not_about_room_does_not_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    before = set(FOLDER.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(Unavailable, match=r"^cannot use shared memory in /dev/shm: Operation not permitted$"):
        Segment.create(2, 0, 100)
    assert not {path for path in set(FOLDER.iterdir()) - before if path.name.startswith("freescale-")}
