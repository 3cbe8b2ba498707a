"""The check command says what is there, what is not, and what to do about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.transport import check, findings
from freescale.transport.findings import Finding, find_rdma


def make_port(
    root: Path, device: str, state: str = "4: ACTIVE", layer: str = "Ethernet", kind: str = "RoCE v2"
) -> None:
    """What Linux says in /sys of a device with one port that has one address."""
    port = root / device / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "link_layer").write_text(layer)
    (port / "gids" / "0").write_text("0000:0000:0000:0000:0000:ffff:0a00:0001")
    (port / "gid_attrs" / "types" / "0").write_text(kind)


def ports_of(root: Path) -> list[Finding]:
    return [each for each in find_rdma(root) if "mlx5" in each.found or each.found == "no RDMA device"]


def test_a_port_that_is_up_is_named_with_its_address(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0")
    (found,) = ports_of(tmp_path)
    assert found.state == "ok"
    assert found.found.startswith("mlx5_0 port 1: RoCEv2, up, GID 0 is 0000:0000:0000:0000:0000:ffff:0a00:0001")


@pytest.mark.parametrize(
    ("broken", "said"),
    [({"state": "1: DOWN"}, "not up: 1: DOWN"), ({"kind": "IB/RoCE v1"}, "no RoCEv2 address")],
)
def test_a_port_that_cannot_be_used_is_missing_unless_another_can(
    broken: dict[str, str], said: str, tmp_path: Path
) -> None:
    make_port(tmp_path, "mlx5_0", **broken)
    (found,) = ports_of(tmp_path)
    assert (found.state, said in found.found, bool(found.action)) == ("missing", True, True)
    make_port(tmp_path, "mlx5_1")
    assert [each.state for each in ports_of(tmp_path)] == ["note", "ok"]


def test_a_machine_without_rdma_is_told_what_to_load(tmp_path: Path) -> None:
    (found,) = ports_of(tmp_path / "nothing")
    assert (found.backend, found.state) == ("verbs", "missing")
    assert "modprobe" in found.action


def test_whatever_is_missing_says_what_to_do() -> None:
    for finding in findings.find_all():
        assert finding.found
        assert finding.meaning
        if finding.state == "missing":
            assert finding.action, finding


def test_mpi_is_asked_in_a_child_that_is_no_rank_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("PMIX_NAMESPACE", "no such job")
    (found,) = (each for each in findings.find_all() if "mpi4py" in each.found)
    assert found.state == "ok", found


def test_too_few_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (found,) = (each for each in findings.find_all() if "CONNECTIONS" in each.found)
    assert (found.state, found.found) == ("missing", "CUDA_DEVICE_MAX_CONNECTIONS is 1")


def test_the_command_fails_for_what_is_needed_and_not_there() -> None:
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-m", "freescale.transport.check", "--json", "--need", "process_group", "copy_engine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: cannot run here: copy_engine"
    found = json.loads(done.stdout)
    assert {"all", "process_group", "mpi", "copy_engine", "verbs"} == {each["backend"] for each in found}


def test_what_is_not_needed_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--need", "process_group"]) == 0
    assert "torch.distributed with gloo" in capsys.readouterr().out
