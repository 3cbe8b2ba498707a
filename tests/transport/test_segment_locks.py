"""Threads of two processes that hold and want locks of two segments crosswise: each gets them, and holds them alone."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freescale.transport.segment import FOLDER, Segment

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")
ROUNDS = 3000
_OTHER = """
import sys
from test_segment_locks import count_together
from freescale.transport.segment import Segment
segments = [Segment.open(name, 2, 1, 100) for name in sys.argv[1:]]
print("joined", flush=True)
sys.stdin.readline()
count_together(segments)
"""


def count_up(segment: Segment) -> None:
    at = segment.arrived(0, 1)
    for _ in range(ROUNDS):
        with segment.locked(0):
            count = segment.read(at)
            segment.write(at, count + 1)


def count_together(segments: list[Segment]) -> None:
    """Count in all segments, each in a thread of its own."""
    with ThreadPoolExecutor(len(segments)) as pool:
        list(pool.map(count_up, segments))


def test_threads_that_lock_segments_crosswise_are_no_deadlock() -> None:
    segments = [Segment.create(2, 0, 100) for _ in range(2)]
    try:
        command = [sys.executable, "-c", _OTHER, *(segment.name for segment in segments)]
        folder = str(Path(__file__).parent)
        other = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "joined\n"
        assert other.stdin is not None
        other.stdin.write("go\n")
        other.stdin.flush()
        count_together(segments)
        _, said = other.communicate(timeout=60)
    finally:
        for segment in segments:
            segment.unlink()
    assert other.returncode == 0, said
    assert [segment.read(segment.arrived(0, 1)) for segment in segments] == [2 * ROUNDS] * 2
