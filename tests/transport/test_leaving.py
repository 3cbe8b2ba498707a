"""What has to be done before a process ends is done in its order, whatever becomes of a part of it."""

import subprocess
import sys

SCRIPT = """
from freescale.transport.leaving import leave_first, leave_in_time, leave_last

class Channel:
    def leave(self, reason):
        print(reason)

channel = Channel()
leave_last(lambda: print("after all others"))
leave_in_time(channel)
leave_last(lambda: print("after channels"))

def is_interrupted():
    raise KeyboardInterrupt

leave_first(lambda: print("before channels"))
leave_first(is_interrupted)
"""


def test_all_is_left_in_order_also_where_a_part_is_interrupted() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    said = ["before channels", "its process ended", "after channels", "after all others"]
    assert done.stdout.splitlines() == said
    assert "KeyboardInterrupt" in done.stderr
