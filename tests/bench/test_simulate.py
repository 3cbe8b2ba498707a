"""The simulator: clocks against sums by hand, traffic against sets, and what it says of each technique."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freescale.bench.compute_fit import ComputeFit, fit_compute, loads_of
from freescale.bench.embedding_workload import power_law
from freescale.bench.pictures import COMPUTING, ROWS, WAITING_FOR_DATA, WAITING_FOR_RANKS
from freescale.bench.simulate_load import Workload, as_loaded, by_measured_cost, step_loads
from freescale.bench.simulate_network import CLUSTERS, Cluster, cluster_of
from freescale.bench.simulate_schedule import COMPUTE, HOST, TRANSFER, WAIT, Schedule
from freescale.bench.simulate_step import TECHNIQUES, Model, StepLoad
from freescale.bench.simulate_step import simulate as simulate_steps
from freescale.bench.simulate_trace import shown_ranks, trace
from freescale.bench.simulate_traffic import (
    Traffic,
    expected_traffic,
    power_law_bins,
    real_traffic,
    samples_of,
    with_collisions,
)
from freescale.bench.trace_picture import _rows_of, draw_steps

pytestmark = pytest.mark.usefixtures("one_thread")
BY_NAME = {technique.name: technique for technique in TECHNIQUES}
# no latency and 1e9 bytes a second inside hosts and between them, so that sums by hand stay readable
PLAIN = Cluster(2, 1.0, 1.0, 1.0, latency_us=0, peer_us=0, round_us=0, device_gb_s=1e9, host_ms=3.0, gap_ms=0)


def even_traffic(world_size: int, asked: float, colliding: float, repeats: float = 1.0) -> Traffic:
    rows, urgent = np.full(world_size, asked), np.full(world_size, colliding)
    return Traffic(repeats * rows, rows, rows, urgent, urgent, urgent, urgent, real=True)


def steps_of(compute_s: list[float], traffic: Traffic, count: int = 4) -> list[StepLoad]:
    return [StepLoad(np.array(compute_s), traffic, np.zeros(len(compute_s)), len(compute_s))] * count


# ---- clocks ------------------------------------------------------------------------------------------------------


def test_a_collective_waits_for_the_slowest_rank_and_then_takes_its_time() -> None:
    schedule = Schedule(3)
    schedule.compute("work", np.array([1.0, 4.0, 2.0]))
    schedule.exchange("rows", 0.5)
    assert schedule.now.tolist() == [4.5, 4.5, 4.5]
    assert schedule.spent(WAIT).tolist() == [3.0, 0.0, 2.0]
    assert schedule.spent(TRANSFER).tolist() == [0.5, 0.5, 0.5]


def test_what_runs_in_the_background_is_exposed_only_where_it_is_not_done_in_time() -> None:
    schedule = Schedule(2)
    ready = schedule.background("rows", 2.0)
    schedule.compute("work", np.array([1.5, 3.0]))
    schedule.wait_for("rows", ready)
    assert schedule.now.tolist() == [2.0, 3.0]
    assert schedule.spent(TRANSFER).tolist() == [0.5, 0.0]


def test_the_network_takes_one_transfer_after_the_other() -> None:
    schedule = Schedule(2)
    schedule.background("first", 2.0)
    later = schedule.background("second", 1.0, after=np.array([0.0, 5.0]))
    assert later.tolist() == [6.0, 6.0]


def test_computing_slows_by_the_contention_while_something_travels_with_sms() -> None:
    for with_sms, expected in ((True, 10.5), (False, 10.0)):
        schedule = Schedule(1, contention=0.1)
        schedule.background("rows", 5.0, with_sms=with_sms)
        schedule.compute("work", np.array([10.0]))
        assert schedule.now.tolist() == [pytest.approx(expected)]


@given(st.lists(st.floats(0, 10), min_size=2, max_size=6), st.floats(0, 3), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_every_moment_of_a_rank_is_accounted_for(compute: list[float], transfer: float, rounds: int) -> None:
    schedule = Schedule(len(compute))
    for _ in range(rounds):
        schedule.compute("work", np.array(compute))
        schedule.exchange("rows", transfer)
    total = schedule.spent(COMPUTE) + schedule.spent(WAIT) + schedule.spent(TRANSFER)
    assert total == pytest.approx(schedule.now)


# ---- network -----------------------------------------------------------------------------------------------------


def test_an_all_to_all_takes_the_slower_of_its_two_links() -> None:
    cluster = Cluster(gpus_per_host=2, inside_gb_s=10.0, between_gb_s=1.0, latency_us=5, peer_us=1)
    sent = np.full(4, 3e9)  # a third stays in the host: 1e9 at 10 GB/s; 2e9 leave it, at 1 GB/s
    assert cluster.all_to_all_s(sent, sent) == pytest.approx(2.0 + 5e-6 + 2e-6)
    one_host = replace(cluster, gpus_per_host=4)
    assert one_host.all_to_all_s(sent, sent) == pytest.approx(0.3 + 5e-6)
    assert one_host.all_to_all_s(sent, sent, sm_free=True) == pytest.approx(3 / cluster.sm_free_inside_gb_s + 5e-6)
    assert cluster.all_to_all_s(sent[:1], sent[:1]) == 0.0


def test_the_busiest_rank_decides_how_long_an_all_to_all_takes() -> None:
    sent, received = np.array([1e9, 1e9]), np.array([1e9, 4e9])
    assert PLAIN.all_to_all_s(sent, received) == pytest.approx(4.0)


def test_an_all_reduce_moves_twice_its_bytes() -> None:
    assert PLAIN.all_reduce_s(1e9, 1) == 0.0
    assert PLAIN.all_reduce_s(1e9, 2) == pytest.approx(1.0)  # 2 (n - 1) / n
    assert PLAIN.all_reduce_s(1e9, 4) == pytest.approx(1.0 + 0.5)  # inside hosts, then half of it between two hosts


def test_clusters_are_found_by_name_and_changed_by_parameter() -> None:
    assert cluster_of("paper") == CLUSTERS["paper"]
    assert cluster_of("paper:gpus_per_host=4,host_ms=0") == replace(CLUSTERS["paper"], gpus_per_host=4, host_ms=0.0)
    for text, message in {
        "moon": "cluster must be one of paper",
        "paper:speed=3": "a cluster has gpus_per_host",
        "paper:host_ms=x": "host_ms of a cluster must be a number",
        "paper:between_gb_s=0": "between_gb_s of a cluster must be finite and over 0",
        "paper:peer_us=-1": "peer_us of a cluster must be finite and not negative",
    }.items():
        with pytest.raises(ValueError, match=message):
            cluster_of(text)


# ---- traffic -----------------------------------------------------------------------------------------------------


def test_real_traffic_is_what_sets_by_hand_give() -> None:
    random = np.random.default_rng(0)
    before, batch, after = ([random.integers(0, 40, 30) for _ in range(3)] for _ in range(3))
    found = real_traffic(before, batch, after)
    asked = [set(ids.tolist()) for ids in batch]
    earlier, later = (set(np.concatenate(ids).tolist()) for ids in (before, after))
    assert found.occurrences.tolist() == [30.0] * 3
    assert found.asked.tolist() == [len(a) for a in asked]
    assert found.late.tolist() == [len(a & earlier) for a in asked]
    assert found.urgent.tolist() == [len(a & later) for a in asked]
    assert found.served.tolist() == [sum(row % 3 == k for a in asked for row in a) for k in range(3)]
    assert found.urgent_served.tolist() == [sum(row % 3 == k for a in asked for row in a & later) for k in range(3)]


def test_expected_traffic_is_close_to_real_sets() -> None:
    rows, exponent, items = 100_000, 1.05, 20_000
    generator = torch.Generator().manual_seed(0)

    def batch() -> list[NDArray[np.int64]]:
        drawn = torch.rand(2, items, generator=generator, dtype=torch.float64)
        return [power_law(each, rows, exponent).numpy() for each in drawn]

    real = real_traffic(batch(), batch(), batch())
    expected = expected_traffic(np.full(2, float(items)), 2.0 * items, 2.0 * items, power_law_bins(rows, exponent))
    assert expected.asked == pytest.approx(real.asked, rel=0.02)
    assert expected.late == pytest.approx(real.late, rel=0.03)
    assert expected.urgent == pytest.approx(real.urgent, rel=0.03)
    assert expected.served.sum() == pytest.approx(real.served.sum(), rel=0.02)


def test_a_rank_without_samples_asks_for_nothing() -> None:
    found = expected_traffic(np.array([0.0, 100.0]), 100.0, 100.0, power_law_bins(1000, 1.2))
    assert found.asked[0] == 0
    assert (
        real_traffic([np.zeros(0, np.int64)] * 2, [np.zeros(0, np.int64)] * 2, [np.zeros(0, np.int64)] * 2).asked.sum()
        == 0
    )


def test_samples_of_a_file_come_again_when_there_are_too_few(tmp_path: Path) -> None:
    pq.write_table(pa.table({"uih": [[1, 2], [], [3]]}), tmp_path / "data.parquet")
    samples = samples_of(f"{tmp_path}/data.parquet:uih")
    assert samples.lengths(2, 4).tolist() == [1, 2, 0, 1]
    assert [ids.tolist() for ids in samples.ids(np.array([3, 2]), np.array([1, 1]))] == [[2], [3]]
    probability, count = samples.popularity
    assert (probability * count).sum() == pytest.approx(1)


# ---- computing ---------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_terms_that_made_the_seconds() -> None:
    random = np.random.default_rng(0)
    owner, lengths = np.repeat(np.arange(50), 20), random.integers(1, 2000, 1000)
    loads = loads_of(owner, lengths, 50)
    made = ComputeFit(step=0.01, item=3e-7, item_squared=2e-10, sample=0.0)
    fit = fit_compute(loads, made.seconds(loads) * (1 + 0.001 * random.standard_normal(50)))
    assert fit.seconds(loads) == pytest.approx(made.seconds(loads), rel=2e-3)
    assert 0.0005 < fit.error < 0.002
    assert made.step * 50 + made.of_samples(lengths).sum() == pytest.approx(made.seconds(loads).sum())


def test_bad_fits_are_refused() -> None:
    for given_terms in ({"step": 1.0}, {"step": "x", "item": 1, "item_squared": 0, "sample": 0}, {"speed": 2.0}):
        with pytest.raises(ValueError, match="a fit of compute time has step"):
            ComputeFit.from_dict(given_terms)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="may be negative"):
        ComputeFit.from_dict({"step": -1.0, "item": 1, "item_squared": 0, "sample": 0})


# ---- techniques --------------------------------------------------------------------------------------------------


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    traffic = even_traffic(2, asked=1e6, colliding=1e5, repeats=2.0)
    model = Model(row_bytes=500, dense_bytes=0, contention=0.0)
    found, _ = simulate_steps(BY_NAME["TorchRec"], steps_of([1.0, 2.0], traffic), PLAIN, model)
    ids, rows = 8 * 2e6 / 2 / 1e9, 500 * 2e6 / 2 / 1e9  # repeats travel; half of everything stays on its rank
    assert found.step_ms == pytest.approx(1e3 * (2.0 + ids + 2 * rows) + 3.0)
    assert found.exposed_ms == pytest.approx(1e3 * (ids + 2 * rows))
    assert found.straggler_percentage == pytest.approx(100 * 500.0 / found.step_ms)
    assert found.bubble_ms == pytest.approx(found.exposed_ms + 500.0 + 3.0), "the host, too, holds the step up"
    assert found.samples_per_s == pytest.approx(2e3 / found.step_ms)
    ahead, _ = simulate_steps(BY_NAME["TorchRec, SDD"], steps_of([1.0, 2.0], traffic), PLAIN, model)
    assert ahead.step_ms == pytest.approx(1e3 * (2.0 + 2 * rows))
    once, _ = simulate_steps(BY_NAME["TorchRec, SDD, ids deduplicated"], steps_of([1.0, 2.0], traffic), PLAIN, model)
    assert once.exposed_ms == pytest.approx(ahead.exposed_ms / 2)


def test_prioritized_exposes_the_colliding_rows_alone() -> None:
    model = Model(row_bytes=500, dense_bytes=0, contention=0.0)
    for colliding in (0.0, 1e5, 1e6):
        steps = steps_of([2.0, 2.0], even_traffic(2, 1e6, colliding), count=6)
        found, _ = simulate_steps(BY_NAME["prioritized only"], steps, PLAIN, model)
        assert found.exposed_ms * 5 / (5 - 0.5) == pytest.approx(1e3 * 2 * 500 * colliding / 2 / 1e9, abs=1e-6), (
            "gradients out and rows back; the last step has no rows to bring back"
        )


def test_background_traffic_that_computing_cannot_hide_is_exposed() -> None:
    model = Model(row_bytes=500, dense_bytes=0, contention=0.0)
    found, _ = simulate_steps(
        BY_NAME["prioritized only"], steps_of([0.1, 0.1], even_traffic(2, 1e6, 0.0), 8), PLAIN, model
    )
    travel = 2 * 500 * 1e6 / 2 / 1e9  # gradients and rows; a step cannot be shorter than the network needs
    assert found.step_ms >= 1e3 * travel * 0.8


def test_sm_free_transfers_do_not_slow_what_they_overlap() -> None:
    steps = steps_of([2.0, 2.0], even_traffic(2, 1e6, 1e5))
    model = Model(row_bytes=500, dense_bytes=0, contention=0.1)
    with_sms, _ = simulate_steps(BY_NAME["FreeScale over NCCL"], steps, PLAIN, model)
    without, _ = simulate_steps(BY_NAME["FreeScale"], steps, PLAIN, model)
    assert without.step_ms < with_sms.step_ms < 1.1 * without.step_ms


def test_a_step_is_not_shorter_than_its_host_takes_to_launch_it() -> None:
    def step_ms(cluster: Cluster, technique: int = 1, compute: float = 0.025) -> tuple[float, float]:
        found, _ = simulate_steps(
            TECHNIQUES[technique], steps_of([compute] * 2, even_traffic(2, 0, 0), 6), cluster, Model(dense_bytes=0)
        )
        return found.step_ms, found.bubble_ms

    assert step_ms(PLAIN) == step_ms(replace(PLAIN, launch_ms=20.0)) == pytest.approx((25.0, 0.0))
    assert step_ms(replace(PLAIN, launch_ms=40.0)) == pytest.approx((40.0, 15.0))
    late = replace(PLAIN, launch_ms=20.0, launch_prioritized_ms=30.0)
    assert step_ms(late) == pytest.approx((25.0, 0.0)), "not prioritized"
    assert step_ms(late, TECHNIQUES.index(next(t for t in TECHNIQUES if t.prioritized))) == pytest.approx((30.0, 5.0))
    assert step_ms(late, TECHNIQUES.index(TECHNIQUES[-1]), 0.1) == pytest.approx((100.0, 0.0))


def test_a_host_is_one_step_ahead_of_the_device_at_most() -> None:
    schedule = Schedule(1)
    for _ in range(5):  # so long that the host has time for many steps
        schedule.compute("forward", np.array([1.0]))
        schedule.launch("launch", 0.1)
        schedule.end_step()
    assert schedule.spent(HOST).tolist() == [0.0]
    for _ in range(3):
        schedule.launch("launch", 0.7)
        schedule.end_step()
    # the first was launched from 4 to 4.7, behind the last long step; the second from 5, when the device came to it
    assert schedule.now.tolist() == pytest.approx([6.4])


def test_balancing_takes_the_waiting_away() -> None:
    samples, fit = samples_of("zipf:rows=10000,median=50"), ComputeFit(1e-3, 1e-5, 1e-8, 0.0)
    workload = Workload(samples, fit, max_length=400, batch_size=16, num_steps=4, most_ids=10**7, seed=0)
    found = {}
    for name, partitioner in (("TorchRec, SDD", as_loaded), ("balanced only", by_measured_cost(fit))):
        steps = step_loads(workload, 16, partitioner)
        assert all(step.traffic.real for step in steps)
        assert sum(step.traffic.occurrences.sum() for step in steps) == sum(
            np.minimum(samples.lengths(i * 256, 256), 400).sum() for i in range(4)
        ), "no id is lost when samples move"
        found[name], _ = simulate_steps(BY_NAME[name], steps, CLUSTERS["paper"], Model())
    assert found["balanced only"].straggler_percentage < 0.1 * found["TorchRec, SDD"].straggler_percentage
    assert sum(step.moved_bytes.sum() for step in step_loads(workload, 16, as_loaded)) == 0


def test_real_sets_and_expected_rows_give_about_the_same_step() -> None:
    samples, fit = samples_of("zipf:rows=100000,median=200"), ComputeFit(1e-3, 1e-6, 0.0, 0.0)
    counted = Workload(samples, fit, 1000, 32, num_steps=4, most_ids=10**7, seed=0)
    found = []
    for workload in (counted, replace(counted, most_ids=0)):
        steps = step_loads(workload, 4, as_loaded)
        found.append(simulate_steps(BY_NAME["TorchRec, SDD, ids deduplicated"], steps, PLAIN, Model())[0])
        assert steps[0].traffic.real == (workload is counted)
    assert found[1].exposed_ms == pytest.approx(found[0].exposed_ms, rel=0.05)


def test_a_share_of_collisions_can_be_set() -> None:
    changed = with_collisions(even_traffic(2, 100.0, 60.0), 0.05)
    assert changed.collisions == 0.05
    assert changed.asked.tolist() == [100.0, 100.0]
    assert changed.late_served.tolist() == [5.0, 5.0]


def test_one_step_cannot_be_simulated() -> None:
    with pytest.raises(ValueError, match="at least two steps"):
        simulate_steps(TECHNIQUES[0], steps_of([1.0], even_traffic(1, 1, 0), 1), PLAIN, Model())


# ---- the trace ----------------------------------------------------------------------------------------------------


def test_a_trace_holds_every_event_of_the_ranks_it_shows_and_says_that_it_is_simulated() -> None:
    steps = steps_of([1.0, 2.0], even_traffic(2, 1e5, 1e4))
    _, schedule = simulate_steps(BY_NAME["FreeScale"], steps, PLAIN, Model())
    found = trace({"FreeScale": schedule}, "test")
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert found["otherData"]["simulated"] == "yes"
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert names == ["FreeScale (simulated)"]
    for rank in range(2):
        computing = sum(e["dur"] for e in events if e["cat"] == COMPUTE and e["tid"] == 2 * rank + 1)
        assert computing == pytest.approx(1e6 * schedule.spent(COMPUTE)[rank], rel=1e-6)
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-2 for a, b in pairwise(spans)), "rows of a trace do not overlap"


def test_a_trace_shows_steps_in_a_row_above_the_ranks_and_calls_a_bubble_a_bubble() -> None:
    steps = steps_of([1.0, 2.0], even_traffic(2, 1e5, 1e4))
    _, schedule = simulate_steps(BY_NAME["TorchRec"], steps, PLAIN, Model())
    found = trace({"TorchRec": schedule}, "test")["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    places = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    assert [rows[tid] for tid in sorted(places, key=lambda tid: places[tid])] == [
        "steps", "rank 0", "rank 0, network behind it", "rank 1", "rank 1, network behind it"
    ]  # fmt: skip
    spans = [e for e in found if e["ph"] == "X" and e["tid"] == 0]
    assert [e["name"] for e in spans] == [f"step {number}" for number in range(len(steps))]
    assert spans[-1]["ts"] + spans[-1]["dur"] == pytest.approx(1e6 * float(schedule.now.max()))
    bubbles = [e for e in found if e["ph"] == "X" and e["name"].startswith("bubble: ")]
    assert {e["cat"] for e in bubbles} == {"wait", "exposed transfer", "host"}
    assert not any(e["cat"] == COMPUTE for e in bubbles)


def test_two_steps_are_drawn_from_their_trace_on_one_scale(tmp_path: Path) -> None:
    steps = steps_of([1.0, 2.0], even_traffic(2, 1e5, 1e4))
    schedules = {name: simulate_steps(BY_NAME[name], steps, PLAIN, Model())[1] for name in ("TorchRec", "FreeScale")}
    found = trace(schedules, "test")
    draw_steps(found, ["TorchRec", "FreeScale"], tmp_path / "steps.svg")
    drawn = (tmp_path / "steps.svg").read_text()
    for colour in (COMPUTING, WAITING_FOR_RANKS, WAITING_FOR_DATA, ROWS):
        assert drawn.count(f"fill: {colour}") >= 2, colour
    rows, length = _rows_of(found, 1)
    spans = sorted(span[:2] for span in rows["rank 0"])
    assert spans[0][0] == 0
    assert sum(duration for _, duration in spans) == pytest.approx(length), "a rank computes or waits, all the time"


def test_of_many_ranks_those_that_wait_least_and_most_are_shown() -> None:
    schedule = Schedule(100)
    schedule.compute("work", np.arange(100.0))
    schedule.exchange("rows", 1.0)
    shown = shown_ranks(schedule)
    assert len(shown) == 16
    assert {0, 99} <= set(shown)
