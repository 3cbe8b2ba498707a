"""The end-to-end bench on CPU ranks, and what its report makes of measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.bench import end_to_end
from freescale.bench.embedding_contenders import data_parallel
from freescale.bench.embedding_workload import Workload
from freescale.bench.end_to_end_batch import HISTORY, IdsOnHost, batch_of, make_ring
from freescale.bench.end_to_end_plot import draw, parts
from freescale.bench.end_to_end_report import rows, tables, verdicts
from freescale.bench.end_to_end_settings import CONTENDERS, Cell


@pytest.mark.multirank
def test_every_technique_trains_on_two_ranks_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "found.json"
    size = ["--cells", "40x4", "even", "--cuts", "40", "--rounds", "1", "--warm-up", "3", "--timed", "4"]
    assert end_to_end.main(["--device", "cpu", *size, "--json", str(measured), "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    titles = {name: title for name, title in CONTENDERS.items() if name != "sdd_dedup"}
    for title in titles.values():
        assert printed.replace("\n", " ").count(title.split()[-1]) >= 2
    found = json.loads(measured.read_text())["found"]
    timed = [each for each in found if each["kind"] == "measurement"]
    assert {(each["contender"], each["cell"]["even"], each["rank"]) for each in timed} == {
        (name, even, rank) for name in titles for even in (False, True) for rank in (0, 1)
    }
    assert all(len(each["losses"]) == 7 and all(0 < loss < 5 for loss in each["losses"]) for each in timed)
    assert all(
        (len(each["waited_ms"]) > 0) == (each["contender"] in ("balanced", "synchronous", "freescale"))
        for each in timed
    )
    [result] = tmp_path.glob("*-end-to-end-cpu.md")
    assert "prioritized and balanced" in result.read_text()
    both = tmp_path / "both.json"
    arguments = ["--device", "cpu", "--read", str(measured), str(measured), "--json", str(both)]
    assert end_to_end.main([*arguments, "--results", str(tmp_path / "read")]) == 0
    launches = [each["launch"] for each in json.loads(both.read_text())["found"] if each["kind"] == "measurement"]
    assert sorted(set(launches)) == [0, 1]
    [reported] = (tmp_path / "read").glob("*-end-to-end-cpu.md")
    command = json.loads(measured.read_text())["environment"]["command"]
    assert f"`{command}; {command}`" in reported.read_text()


@pytest.mark.multirank
def test_a_rank_alone_shows_what_pipelines_cost_by_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "found.json"
    size = ["--ranks", "1", "--cells", "even", "--rounds", "1", "--warm-up", "3", "--timed", "3", "--traced", "0"]
    small = ["--device", "cpu", *size, "--contenders", "freescale", "sdd", "prioritized", "--json", str(measured)]
    assert end_to_end.main(small) == 0
    said = capsys.readouterr().out
    assert "one rank, cut 20, 8 samples a rank, nothing to gain, against TorchRec, SDD: step " in said
    found = [each for each in json.loads(measured.read_text())["found"] if each["kind"] == "measurement"]
    assert {(each["link"], each["rank"], each["contender"]) for each in found} == {
        ("one rank", 0, name) for name in ("freescale", "sdd", "prioritized")
    }
    first = {each["contender"]: each["losses"][0] for each in found}
    assert first["sdd"] == pytest.approx(first["freescale"], rel=0.2), "the same loss, of other random weights"


def test_rings_deal_each_global_batch_once_and_scales_make_means_global() -> None:
    workload = Workload(50, 0.1, 1, 12, 4000, median=30.0)
    rings = [make_ring(workload, 4, rank, 3, pinned=False) for rank in range(3)]
    for step in range(4):
        batches = [ring.steps[step] for ring in rings]
        ids = torch.cat([batch[HISTORY].values for batch in batches])
        assert torch.equal(ids, workload.global_ids(step)[0])
        assert {ring.global_ids[step] for ring in rings} == {len(ids)}
        made = [batch_of(batch, len(ids), 3) for batch in batches]
        assert sum(batch.scale for batch in made) == pytest.approx(3)
        means = [batch.labels.double().mean() * batch.scale for batch in made]
        overall = torch.cat([batch.labels for batch in made]).double().mean()
        assert float(sum(means) / 3) == pytest.approx(float(overall))
    lengths = [[len(ring.steps[step][HISTORY].values) for step in range(4)] for ring in rings]
    assert len({tuple(each) for each in lengths}) == 3, "ranks are uneven"


def test_ids_that_stay_in_host_memory_stay_there_while_the_rest_is_moved() -> None:
    ring = make_ring(Workload(50, 0.1, 1, 12, 400, median=30.0), 2, 0, 1, pinned=False)
    batch = batch_of(ring.steps[0], ring.global_ids[0], 1)
    moved, kept = batch.to(torch.device("meta")), IdsOnHost.of(batch).to(torch.device("meta"))
    assert moved.ids.values().is_meta
    assert moved.starts.is_meta
    assert isinstance(kept, IdsOnHost)
    assert kept.ids is batch.ids
    assert kept.starts.is_meta
    assert kept.labels.is_meta
    assert (kept.longest, kept.scale) == (batch.longest, batch.scale)


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning")  # TorchRec gives it too
def test_the_dense_part_is_reduced_in_one_piece(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        tower = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))  # 3 MiB
        model, reduced = data_parallel(tower), []

        def note(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            reduced.append(bucket.buffer().numel())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        note.__annotations__.clear()  # torch compares them, and here they are strings
        model.register_comm_hook(None, note)
        for _ in range(3):
            model(torch.ones(2, 512)).sum().backward()
        assert reduced == [sum(weights.numel() for weights in tower.parameters())] * 3
    finally:
        dist.destroy_process_group()


def _found(
    name: str, rank: int, step_ms: float, computes: list[float], exposed: dict[str, float]
) -> list[dict[str, Any]]:
    about = {"link": "nvlink", "rank": rank, "contender": name, "cell": {"cut": 9, "batch_size": 4, "even": False}}
    times = {
        "step_ms": step_ms, "compute_ms": sum(computes) / len(computes), "bubble_ms": step_ms - sum(computes) / 2,
        "side_ms": 0.0, "exposed_ms": max(exposed.values()), "copy_ms": 0.0, "idle_ms": 0.5,
        "compute_by_step": computes,
        "traffic": {kind: {"exposed_ms": ms} for kind, ms in exposed.items()},
    }  # fmt: skip
    measurement = {"step_ms": [step_ms] * 3, "peak_bytes": 10**9, "waited_ms": [], "losses": [0.5]}
    return [{"kind": "measurement", **about, **measurement}, {"kind": "trace", **about, "times": times}]


def test_straggling_is_told_step_by_step_though_ranks_are_even_on_average() -> None:
    found = [
        *_found("sdd", 0, 100.0, [90.0, 70.0], {"dense": 12.0, "rows": 3.0}),
        *_found("sdd", 1, 100.0, [70.0, 90.0], {"dense": 10.0, "rows": 5.0}),
        *_found("freescale", 0, 82.0, [81.0, 80.0], {"late rows": 0.5}),
        *_found("freescale", 1, 82.0, [81.0, 80.0], {"late rows": 0.5}),
    ]
    made = rows(found, 2)
    baseline = made["nvlink", Cell(9, 4), "sdd"]
    assert baseline.straggler_percentage == pytest.approx(10.0)
    assert baseline.bubble_percentage == pytest.approx(20.0)
    assert baseline.samples_per_s == pytest.approx(80.0)
    [table] = tables(made)
    assert table.rows[0][1:7] == ("100.00", "100.0-100.0", "+0.0 %", "80", "20.0", "10.00")
    assert table.rows[0][7:14] == ("0.00", "4.00", "0.00", "11.00", "0.50", "-", "-")
    assert table.rows[1][3] == "-18.0 %"
    assert verdicts(made) == [
        "nvlink, cut 9, 4 samples a rank, against TorchRec, SDD: step -18.0 %; bubble 20.00 -> 1.50 ms, 92 % less "
        "(90 %: met), of it waiting for ranks and their data 11.00 -> 0.50 ms, 95 % less"
    ]


def test_what_moves_is_told_from_waiting_for_ranks_where_all_traces_say_so() -> None:
    found = [each for rank in range(2) for each in _found("sdd", rank, 90.0, [80.0, 80.0], {"dense": 4.0 + rank})]
    found[1]["times"]["exposed_moving_ms"] = 1.0
    [table] = tables(rows(found, 2))
    assert table.rows[0][12:14] == ("-", "-")
    found[3]["times"]["exposed_moving_ms"] = 2.0
    [table] = tables(rows(found, 2))
    assert table.rows[0][12:14] == ("1.50", "3.00")
    assert table.columns[12:14] == ["moving", "for ranks"]


def test_launches_are_told_apart_and_put_together() -> None:
    found = [
        {**each, "launch": launch}
        for launch, (step_ms, computes) in enumerate([(100.0, [90.0, 70.0]), (90.0, [80.0, 80.0])])
        for rank in range(2)
        for each in _found("sdd", rank, step_ms, computes if rank == 0 else computes[::-1], {"dense": 4.0 + launch})
    ]
    [row] = rows(found, 2).values()
    assert row.turns == [100.0, 90.0]
    assert (row.step, row.traced, row.straggling, row.waiting) == pytest.approx((95.0, 95.0, 5.0, 4.5))
    assert row.exposed == pytest.approx({"dense": 4.5})
    alone = rows([each for each in found if (each["launch"], each["rank"]) != (1, 1)], 2)
    assert next(iter(alone.values())).straggling == pytest.approx(10.0), "a launch without all traces says nothing"


def test_a_picture_divides_the_traced_step(tmp_path: Path) -> None:
    made = rows(
        [
            *_found("sdd", 0, 100.0, [90.0, 70.0], {"dense": 12.0}),
            *_found("sdd", 1, 100.0, [70.0, 90.0], {"rows": 14.0}),
        ],
        2,
    )
    [row] = made.values()
    assert list(parts(row).values()) == pytest.approx([80.0, 10.0, 3.0, 7.0])
    draw(made, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    untraced = rows(_found("sdd", 0, 100.0, [90.0, 70.0], {"dense": 12.0}), 2)
    with pytest.raises(ValueError, match="nothing was traced"):
        draw(untraced, tmp_path / "other.png")


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--ratio", "101"], "--ratio must be from 0 to 100, got 101.0"),
        (["--cells", "8000"], "--cells must be of the form CUTxBATCH, such as 8000x128, or even; got '8000'"),
        (["--warm-up", "2"], "--warm-up must be at least 3, got 2"),
        (["--traced", "3"], "--traced must be at least 4, because three of the steps are left out, got 3"),
        (["--ranks", "1", "--links", "nvlink"], "--links must be 'one rank' for --ranks 1 and only then, got nvlink"),
        (["--links", "nvlink", "one rank"], "--links must be 'one rank' for --ranks 1 and only then, got nvlink, one"),
        (["--ranks", "99"], "--ranks 99 needs as many GPUs"),
        (["--read", "/nowhere.json"], "--read must name files that --json wrote, /nowhere.json is none"),
        (["--read", str(Path(__file__))], "is none"),
    ):
        assert end_to_end.main(arguments) == 2
        assert message in capsys.readouterr().err
