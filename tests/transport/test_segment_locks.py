"""Threads of two processes hold and want locks of two segments crosswise: nobody waits for himself, all get them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import IO

import pytest

from freescale.transport.segment import FOLDER, Segment

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")
_OTHER = """
import sys, threading, time
from freescale.transport.segment import Segment

first, second = [Segment.open(name, 2, 1, 100) for name in sys.argv[1:]]

def want_first():
    with first.locked(0):
        print("got the first", flush=True)

with second.locked(0):
    print("holds the second", flush=True)
    sys.stdin.readline()
    threading.Thread(target=want_first).start()
    time.sleep(0.3)
    print("wants the first", flush=True)
    sys.stdin.readline()
"""


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def heard(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_threads_that_lock_segments_crosswise_are_no_deadlock() -> None:
    segments = [Segment.create(2, 0, 100) for _ in range(2)]
    command = [sys.executable, "-c", _OTHER, *(segment.name for segment in segments)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    got: list[str] = []

    def want_second() -> None:
        with segments[1].locked(0):
            got.append("the second")

    wanting = threading.Thread(target=want_second)
    try:
        assert heard(other.stdout) == "holds the second\n"
        with segments[0].locked(0):
            tell(other)
            assert heard(other.stdout) == "wants the first\n"
            wanting.start()
            time.sleep(0.1)
            assert got == []
            tell(other)
            wanting.join(60)
            assert got == ["the second"]
        assert heard(other.stdout) == "got the first\n"
    finally:
        for segment in segments:
            segment.unlink()
        other.kill()
        other.communicate(timeout=60)
