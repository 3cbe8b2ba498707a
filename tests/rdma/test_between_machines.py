"""RDMA between two virtual machines with real verbs: contract, both libraries, faults, MPI over UCX, the balancer.

The machines are started once and run all checks (see rdma_machines.py, rdma_runner.py and rdma_checks.py); each test
here looks at what became of one of them. Where they cannot be started, all are skipped, and say why.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rdma_checks
import rdma_machines
import transport_contract

RUNNER = Path(rdma_checks.__file__).with_name("rdma_runner.py")
DEADLINE_S = 1000  # of the machines; they need some 150 s where nothing else runs
NUM_ROWS = 500
pytestmark = [pytest.mark.rdma, pytest.mark.timeout(DEADLINE_S + 300)]


@dataclass(frozen=True)
class Ran:
    """What became of one check on both machines.

    Attributes:
        statuses: Exit status of each rank; None for one that had to be killed.
        outputs: What each rank said.
    """

    statuses: dict[int, int | None]
    outputs: dict[int, str]

    def explain(self) -> str:
        return "\n".join(
            f"--- rank {rank}: {self.statuses[rank]}\n{said[-4000:]}" for rank, said in self.outputs.items()
        )


@dataclass(frozen=True)
class Machines:
    """Both machines after they have run all checks."""

    ended: list[rdma_machines.Ended]
    table: pa.Table

    def ran(self, name: str) -> Ran:
        statuses: dict[int, int | None] = {}
        outputs: dict[int, str] = {}
        for machine in self.ended:
            lines = (
                (machine.folder / "results").read_text().splitlines() if (machine.folder / "results").exists() else []
            )
            found = [json.loads(line) for line in lines]
            for rank, status in next((f["statuses"] for f in found if f["check"] == name), {}).items():
                statuses[int(rank)] = status
                outputs[int(rank)] = (machine.folder / f"{name}.{rank}").read_text(errors="replace")
        everything = "\n".join(machine.explain() for machine in self.ended)
        assert sorted(statuses) == list(range(rdma_checks.CHECKS[name].world_size)), f"{name} never ran:\n{everything}"
        return Ran(statuses, outputs)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("rdma")
    table = make_table()
    try:
        rdma_machines.prepare()
        names = [name for name in rdma_checks.CHECKS if "pyverbs" not in name or has_pyverbs()]
        for number in (0, 1):
            out = folder / str(number)
            (out / "path").mkdir(parents=True)
            rdma_machines.link_pyverbs(out / "path")
            pq.write_table(table, out / "data.parquet", row_group_size=40)
        command = f"{sys.executable} {RUNNER} {','.join(names)}"
        variables = {"PYTHONPATH": f"/out/path:{RUNNER.parent}", "OMP_NUM_THREADS": "1"}
        yield Machines(rdma_machines.run_in_both(command, folder, timeout_s=DEADLINE_S, environment=variables), table)
    except rdma_machines.CannotBoot as error:
        pytest.skip(f"RDMA between virtual machines was not tested: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_pyverbs() -> bool:
    version = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    return any(rdma_machines.PYVERBS.glob(f"device.{version}*.so"))


def make_table() -> pa.Table:
    """Rows with plain, jagged and nested columns, of very different lengths."""
    random = Random(7)
    pages = [[random.randrange(2**40) for _ in range(int(random.paretovariate(1)) % 300)] for _ in range(NUM_ROWS)]
    deep = [[[random.randrange(100) for _ in range(random.randrange(4))] for _ in range(len(p) % 5)] for p in pages]
    return pa.table(
        {
            "id": pa.array(range(NUM_ROWS), pa.int64()),
            "page": pa.array(pages, pa.list_(pa.int64())),
            "deep": pa.array(deep, pa.list_(pa.list_(pa.int32()))),
        }
    )


PYVERBS = pytest.mark.skipif(
    rdma_machines.PYVERBS.is_dir() and not has_pyverbs(),
    reason=f"the distribution's pyverbs is not for Python {sys.version_info.major}.{sys.version_info.minor}",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=PYVERBS if "pyverbs" in n else []) for n in rdma_checks.CHECKS if n.startswith("contract")],
)
def test_the_contract_holds_between_machines(machines: Machines, name: str) -> None:
    ran = machines.ran(name)
    for rank, status in ran.statuses.items():
        assert status == 0, ran.explain()
        assert ran.outputs[rank].count("passed check_") == len(transport_contract.CHECKS), ran.explain()


def test_late_ranks_are_timeouts(machines: Machines) -> None:
    ran = machines.ran("late")
    assert set(ran.statuses.values()) == {0}, ran.explain()
    assert all(said.count("passed late_check_") == len(transport_contract.LATE_CHECKS) for said in ran.outputs.values())


def test_everything_arrives_exactly_over_a_wire_that_loses_packets(machines: Machines) -> None:
    ran = machines.ran("loss")
    assert set(ran.statuses.values()) == {0}, ran.explain()
    lost = [int(said.split("packets lost: ")[1].split()[0]) for said in ran.outputs.values()]
    assert min(lost) > 0, "the wire lost nothing, so nothing was tested"


@pytest.mark.parametrize("name", [pytest.param("killed-pyverbs", marks=PYVERBS), "killed-ibverbs"])
def test_a_killed_peer_is_named_long_before_the_deadline(machines: Machines, name: str) -> None:
    ran = machines.ran(name)
    assert ran.statuses == {0: 0, 1: -9}, ran.explain()
    assert "rank 1 cannot be reached" in ran.outputs[0]


def test_a_peer_that_stands_still_is_a_timeout_and_later_hears_of_it(machines: Machines) -> None:
    ran = machines.ran("stopped")
    assert set(ran.statuses.values()) == {0}, ran.explain()


def test_a_peer_that_raises_tells_the_others_as_its_process_ends(machines: Machines) -> None:
    ran = machines.ran("raising")
    assert ran.statuses == {0: 0, 1: 1}, ran.explain()
    assert "ValueError: the loader broke" in ran.outputs[1]


@PYVERBS
def test_ranks_that_name_different_libraries_are_refused(machines: Machines) -> None:
    ran = machines.ran("bindings-pyverbs")
    assert set(ran.statuses.values()) == {0}, ran.explain()


@pytest.mark.parametrize("name", [pytest.param("children-pyverbs", marks=PYVERBS), "children-ibverbs"])
def test_forked_children_do_not_disturb_the_connections(machines: Machines, name: str) -> None:
    ran = machines.ran(name)
    assert set(ran.statuses.values()) == {0}, ran.explain()


def test_chunks_go_around_the_ring_before_their_block_is_complete(machines: Machines) -> None:
    ran = machines.ran("ring")
    assert set(ran.statuses.values()) == {0}, ran.explain()


@PYVERBS
def test_a_source_that_fills_is_sent_meanwhile_and_kept_memory_is_not_copied(machines: Machines) -> None:
    ran = machines.ran("filling-pyverbs")
    assert set(ran.statuses.values()) == {0}, ran.explain()


def test_the_balancer_over_rdma_gives_every_row_of_a_file_to_one_rank(machines: Machines) -> None:
    ran = machines.ran("parquet")
    assert set(ran.statuses.values()) == {0}, ran.explain()
    names = sorted(machines.table.column_names)
    expected = Counter(json.dumps([row[name] for name in names]) for row in machines.table.to_pylist())
    files = [path for machine in machines.ended for path in machine.folder.glob("samples.*")]
    got = [path.read_text().splitlines() for path in files]
    assert len(got) == 4
    assert min(map(len, got)) > NUM_ROWS // 8
    assert Counter(line for lines in got for line in lines) == expected


def test_mpi_over_ucx_over_verbs_keeps_the_contract_and_connects_rdma_of_our_own(machines: Machines) -> None:
    ran = machines.ran("mpi")
    said = "\n".join(path.read_text() for machine in machines.ended for path in machine.folder.glob("mpi.launcher"))
    assert set(ran.statuses.values()) == {0}, f"{ran.explain()}\n{said}"
    assert all(each.count("passed check_") == len(transport_contract.CHECKS) for each in ran.outputs.values())
    assert all("MPI is Open MPI" in each for each in ran.outputs.values())


def test_the_machines_end_by_themselves(machines: Machines) -> None:
    assert [machine.status for machine in machines.ended] == [0, 0], machines.ended[0].explain()


def test_no_machine_is_left_running(machines: Machines) -> None:
    mine = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"qemu-system" in (said := read(path)) and str(machines.ended[0].folder.parent).encode() in said
    ]
    assert mine == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # ended meanwhile
        return b""
