"""A process that ends leaves its tables' channels first: peers that wait for rows cannot hear of it otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit
import sys
import time
import torch
from freescale.embedding import PrioritizedEmbeddingCollection, Sgd, Table, lanes, planner
from freescale.transport import TransportClosed, connect

transport = connect("local")
tables = PrioritizedEmbeddingCollection([Table("item", 9, 2)], transport, optimizer=Sgd(lr=0.1))

@atexit.register
def last_of_all():
    for channel in (tables._engine._urgent_channel, tables._engine._background_channel):
        try:
            channel.all_gather(torch.zeros(1)).wait()
            print("open")
        except TransportClosed:
            print("closed")

tables({"item": torch.tensor([1])})["item"].sum().backward()
ask, plan = planner.ask, planner._Work.plan

def ask_late(*arguments):
    time.sleep(lanes._PATIENCE_S + 0.5)
    return ask(*arguments)

def plan_and_say(*arguments):
    found = plan(*arguments)
    print("planned")
    return found

planner.ask, planner._Work.plan = ask_late, plan_and_say
tables.prefetch({"item": torch.tensor([2])})
if "raise" in sys.argv:
    raise RuntimeError("on fire")
"""


@pytest.mark.parametrize("how", ["raise", "return"])
def test_channels_are_closed_before_whatever_else_a_process_does_at_its_end(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.split()[-2:] == ["closed", "closed"], done.stderr
    # Peers may be at the messages for a batch that was prefetched, and MPI takes none back.
    assert "planned" in done.stdout or how == "raise"
    assert done.returncode == (how == "raise")
    assert ("RuntimeError: on fire" in done.stderr) == (how == "raise")
