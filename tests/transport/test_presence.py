"""Who is gone is known without their help, and nobody else is taken for gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from freescale.transport.presence import Presence, _network

torch_distributed: Any = dist  # torch's stubs lack what is used through this name

LISTENS = """
import os, signal, sys, time
import torch.distributed as dist
from freescale.transport.presence import Presence
presence = Presence(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), "here", 1, 2)
if len(sys.argv) > 2 and os.fork() == 0:
    time.sleep(20)  # as a worker of a DataLoader, which looks every 5 s whether its parent is there
    os._exit(0)
print("listens", flush=True)
signal.pause()
"""


def everybody(store: Any, world_size: int) -> list[Presence]:
    made = [Presence(store, "here", rank, world_size) for rank in range(world_size)]
    for presence in made:
        presence.look_around()
    return made


@pytest.fixture(params=["tcp", "prefix", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hash":
        return torch_distributed.HashStore()
    if request.param == "file":
        return torch_distributed.FileStore(str(tmp_path / "store"), 1)
    tcp = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return (
        tcp if request.param == "tcp" else torch_distributed.PrefixStore("a", torch_distributed.PrefixStore("b", tcp))
    )


def test_while_all_are_there_nobody_is_gone(store: Any) -> None:
    made = everybody(store, 4)
    assert [presence.gone() for presence in made] == [[]] * 4


def test_whoever_let_go_of_the_transport_is_gone_for_all_others(store: Any) -> None:
    made = everybody(store, 5)
    del made[3], made[1]
    assert [presence.gone() for presence in made] == [[1, 3]] * 3


@pytest.mark.parametrize(
    ("ends", "forks"), [(signal.SIGKILL, []), (signal.SIGSTOP, []), (signal.SIGKILL, ["and forks"])]
)
def test_a_killed_process_is_gone_also_if_its_children_are_not_and_a_stopped_one_is_not(
    ends: signal.Signals, forks: list[str]
) -> None:
    store = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", LISTENS, str(store.port), *forks]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listens\n"
        ours = Presence(store, "here", 0, 2)
        ours.look_around()
        assert ours.gone() == []
        child.send_signal(ends)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert ours.gone() == ([1] if ends == signal.SIGKILL else [])
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate(timeout=60)


def test_an_address_that_means_nothing_on_this_host_keeps_nobody_from_the_others() -> None:
    store = torch_distributed.HashStore()
    ours = Presence(store, "here", 0, 3)
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        store.set("here/presence/2", f"{_network()} 127.0.0.1 {closed_soon.getsockname()[1]}")
    store.set("here/presence/1", "another fe80::1%no.such-0 9")
    ours.look_around()
    assert ours.gone() == [2]


@pytest.mark.parametrize(
    "entry",
    [b"\xff\xfe", b"one", b"a b", b"a b c d", b"here 127.0.0.1 99999", b"here 127.0.0.1 -1", b"\n", b"here 1:2 9"],
)
def test_whatever_else_stands_in_the_store_is_nobody_who_listens(entry: bytes) -> None:
    store = torch_distributed.HashStore()
    ours = Presence(store, "here", 0, 2)
    store.set("here/presence/1", entry)
    ours.look_around()
    assert ours.gone() == []


def test_loopback_addresses_of_other_hosts_and_ranks_without_a_socket_are_not_looked_for() -> None:
    store = torch_distributed.HashStore()
    ours = Presence(store, "here", 0, 4)
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    store.set("here/presence/1", f"another 127.0.0.1 {port}")
    store.set("here/presence/2", "")
    store.set("here/presence/3", f"another 127.0.0.1 {port}".replace("127.0.0.1", _own_address()))
    ours.look_around()
    assert ours.gone() == ([3] if _own_address() != "127.0.0.1" else [])


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = unsent.getsockname()[0]
        return address


def test_more_peers_than_are_asked_at_once_are_all_asked() -> None:
    made = everybody(torch_distributed.HashStore(), 200)
    del made[150], made[20]
    assert made[0].gone() == [20, 150]
