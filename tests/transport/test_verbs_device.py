"""Which RDMA port and address are used, and what says why none can be: device.py over a made-up /sys, options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.transport import RdmaOptions, Unavailable, connect, local_group
from freescale.transport.verbs.device import find_port


def make_sysfs(
    root: Path, gids: dict[int, tuple[str, str]], *, link: str = "Ethernet", state: str = "4: ACTIVE"
) -> None:
    port = root / "card0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link}\n")
    for index, (gid, kind) in gids.items():
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")


LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0000"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "fd00:0000:0000:0000:0000:0000:0000:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ({0: (LOCAL, "IB/RoCE v1"), 1: (LOCAL, "RoCE v2"), 2: (IPV4, "IB/RoCE v1"), 3: (IPV4, "RoCE v2")}, 3),
        ({0: (LOCAL, "RoCE v2"), 1: (IPV6, "RoCE v2"), 2: (NONE, "RoCE v2")}, 1),
        ({0: (IPV6, "RoCE v2"), 1: (IPV4, "RoCE v2")}, 1),
    ],
)
def test_a_roce_v2_address_that_reaches_other_hosts_is_chosen(
    tmp_path: Path, gids: dict[int, tuple[str, str]], chosen: int
) -> None:
    make_sysfs(tmp_path, gids)
    port = find_port(None, 1, None, tmp_path)
    assert (port.gid_index, port.device, port.is_ethernet) == (chosen, "card0", True)
    assert port.gid == bytes.fromhex(gids[chosen][0].replace(":", ""))


def test_infiniband_uses_its_first_address(tmp_path: Path) -> None:
    make_sysfs(tmp_path, {0: (LOCAL, "IB/RoCE v1")}, link="InfiniBand")
    assert find_port(None, 1, None, tmp_path).gid_index == 0


def test_devices_that_cannot_be_used_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no RDMA device .* modprobe rdma_rxe"):
        find_port(None, 1, None, tmp_path)
    make_sysfs(tmp_path, {0: (LOCAL, "RoCE v2"), 1: (IPV4, "IB/RoCE v1")})
    with pytest.raises(Unavailable, match="no RoCEv2 address that reaches other hosts"):
        find_port(None, 1, None, tmp_path)
    with pytest.raises(ValueError, match="gid_index must be that of an address of card0 port 1, got 9"):
        find_port(None, 1, 9, tmp_path)
    with pytest.raises(Unavailable, match="port 2 of card0 is not up: there is no such port"):
        find_port(None, 2, None, tmp_path)
    with pytest.raises(Unavailable, match="there is no RDMA device 'mlx5_0', only card0"):
        find_port("mlx5_0", 1, None, tmp_path)
    (tmp_path / "card1").mkdir()
    with pytest.raises(ValueError, match="device must name one of the RDMA devices card0, card1"):
        find_port(None, 1, None, tmp_path)


@pytest.mark.parametrize(
    ("binding", "said"),
    [("ibverbs", "ibverbs cannot be imported .*: pip install ibverbs"), ("pyverbs", "apt install python3-pyverbs")],
)
def test_a_library_that_is_missing_is_unavailable_with_the_install_line(binding: str, said: str) -> None:
    code = (
        f"import sys; sys.modules['{binding}'] = None\n"
        "from freescale.transport import *\n"
        f"try: connect('verbs', through=connect('local'), rdma=RdmaOptions(binding='{binding}'))\n"
        "except Unavailable as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert re.search(said, done.stdout), done.stdout


def test_a_machine_without_rdma_is_unavailable_and_nothing_else_is_used_instead() -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has an RDMA device")
    with pytest.raises(Unavailable, match="no RDMA device"):
        connect("verbs", through=local_group(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"binding": "other"}, "binding must be one of pyverbs, ibverbs, got 'other'"),
        ({"chunk_bytes": 4095}, "chunk_bytes must be 4096 to 1073741824, got 4095"),
        ({"ack_timeout": 0}, "ack_timeout must be 1 to 31, got 0"),
        ({"port": 0}, "port must be at least 1, got 0"),
    ],
)
def test_options_that_break_a_rule_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RdmaOptions(**options)  # type: ignore[arg-type]  # of any type
