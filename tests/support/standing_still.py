"""A process that stands still for a while, with all its threads, and then goes on."""

from __future__ import annotations

import os
import signal
import subprocess

# Whoever wakes it first sees that it is asleep: a busy machine may take any time until then.
_WAKE = """
until grep -q '^State:.[TZ]' /proc/{pid}/status || [ ! -e /proc/{pid} ]; do sleep 0.02; done
sleep {seconds}
kill -CONT {pid}
"""


def stand_still(seconds: float) -> None:
    """Stop this process for so long."""
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", _WAKE.format(pid=pid, seconds=seconds)])
    os.kill(pid, signal.SIGSTOP)
