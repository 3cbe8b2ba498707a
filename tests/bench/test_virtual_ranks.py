"""Virtual ranks: plans, timing and the barrier, with a clock by formula where noise would hide what is tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freescale.balancer import WorldSamples, fixed_batch_size, sparsity, straggler_percentage
from freescale.bench import simulate, virtual_ranks
from freescale.bench.lengths import length_source
from freescale.bench.virtual_rank_timing import ModelSize, RankTimer, measure_plans, reference_step
from freescale.bench.virtual_runs import pooled
from freescale.bench.virtual_study import AS_LOADED, COST_MODEL, FLOOR, Outcome, Point, Scale, Study, points

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ModelSize(width=8, num_heads=2, num_layers=1, dim=4)
CPU = torch.device("cpu")


class FormulaTimer(RankTimer):
    """Seconds by formula in place of the clock's: linear layers, quadratic attention, a part for each sample."""

    def __init__(self) -> None:
        super().__init__(lambda lengths: None, CPU)
        self.timed: list[Tensor] = []

    def seconds(self, lengths: Tensor) -> float:
        self.timed.append(lengths)
        items = lengths.double()
        return float(2e-3 + (1e-7 * items + 2e-11 * items**2).sum() + 1e-5 * len(items))


def study(base: Point) -> Study:
    scale = Scale(base, (), (), (), 1.0, SMALL)
    return Study(FormulaTimer(), length_source("lognormal"), scale, seed=0)


def test_all_ranks_batches_of_a_plan_are_timed_and_nothing_else() -> None:
    world = WorldSamples(3, torch.arange(12) // 4, torch.arange(1, 13))
    timer = FormulaTimer()
    found = measure_plans(timer, world, {"loaded": lambda world: world.rank, "FBS": fixed_batch_size}, FLOOR)
    assert list(found) == ["loaded", "FBS", FLOOR]
    assert [batch.tolist() for batch in timer.timed[0::3]] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    dealt = sorted(length for batch in timer.timed[1::3] for length in batch.tolist())
    assert dealt == list(range(1, 13))
    assert len({tuple(batch.tolist()) for batch in timer.timed[2::3]}) == 1, "the floor: the same batch on every rank"
    assert straggler_percentage(found[FLOOR].seconds) == pytest.approx(0, abs=1e-9)
    assert found["loaded"].sparsity() == pytest.approx(
        sum(sparsity(torch.tensor(batch)) for batch in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])) / 3
    )


def test_balancing_reduces_waiting_as_the_paper_says_when_time_grows_faster_than_length() -> None:
    base = Point(21000, 128, 64)
    found = study(base)
    found.learn(lambda: None)
    outcomes = {outcome.partitioner: outcome for outcome in found.measure(base, 1, lambda: None)}
    assert outcomes[AS_LOADED].straggler_percentage > 9 * outcomes["FBS"].straggler_percentage
    assert outcomes[COST_MODEL].straggler_percentage < outcomes[FLOOR].straggler_percentage + 0.5
    assert outcomes["VBS"].sparsity < 0.5 * outcomes[AS_LOADED].sparsity
    assert outcomes["FBS"].mean_ms == pytest.approx(outcomes[AS_LOADED].mean_ms), "the same work in all"
    said = virtual_ranks.verdict(list(outcomes.values()), base)
    assert "At 21,000 / 128 / 64" in said
    fit = found.fit()
    assert fit.item == pytest.approx(1e-7, rel=0.02)
    assert fit.item_squared == pytest.approx(2e-11, rel=0.02)
    assert fit.error < 1e-6


def test_what_a_point_will_take_is_known_after_the_first() -> None:
    base = Point(21000, 16, 8)
    found = study(base)
    assert found.predicted_s(base, 1) == 0
    found.measure(base, 1, lambda: None)
    twice = found.predicted_s(Point(21000, 16, 16), 1)
    once = found.predicted_s(base, 1)
    assert 1.5 < twice / once < 2.5
    timer = found._timer
    timer.repeats = 3
    assert found.predicted_s(base, 1) == pytest.approx(3 * once)
    timer.enough_s = 1e-9
    assert found.predicted_s(base, 1) == pytest.approx(once), "what takes long enough is timed once"


def test_the_points_are_those_of_the_axes_each_once() -> None:
    scale = Scale(Point(10, 4, 2), (5, 10), (8,), (2, 4), 1.0, SMALL)
    assert points(scale) == [Point(10, 4, 2), Point(5, 4, 2), Point(10, 8, 2), Point(10, 4, 4)]


def test_the_reference_step_computes_and_leaves_no_gradients_behind() -> None:
    step = reference_step(SMALL, CPU)
    for lengths in ([3, 0, 5], [1], [100] * 90):  # more items than rows were drawn at first
        step(torch.tensor(lengths))
    timer = RankTimer(step, CPU)
    for _ in range(5):  # a machine that stands still for a while may do so in any of them
        short, long = timer.seconds(torch.tensor([10])), timer.seconds(torch.full((40,), 400))
        if short < long:
            break
    assert 0 < short < long
    assert timer.seconds(torch.zeros(0, dtype=torch.int64)) == 0


def test_the_least_of_several_times_counts() -> None:
    calls: list[int] = []
    timer = RankTimer(lambda lengths: calls.append(len(lengths)), CPU, repeats=4)
    timer.seconds(torch.tensor([1, 2]))
    assert calls == [2] * 4
    enough = RankTimer(lambda lengths: calls.append(len(lengths)), CPU, repeats=4, enough_s=1e-12)
    enough.seconds(torch.tensor([1]))
    assert calls == [2] * 4 + [1], "what took long enough is not timed again"


def test_the_command_measures_and_its_file_serves_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "virtual.json", tmp_path / "virtual.png"
    small = ["--device", "cpu", "--base", "2000", "4", "4", "--world-size", "2", "--width", "8", "--repeats", "1"]
    assert virtual_ranks.main([*small, "--json", str(out), "--plot", str(picture), "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "floor: identical batches" in said
    assert "ranks wait" in said
    found = json.loads(out.read_text())
    assert {(o["world_size"], o["partitioner"]) for o in found["outcomes"]} >= {(4, "FBS"), (2, FLOOR), (2, COST_MODEL)}
    for outcome in found["outcomes"]:
        assert 0 <= outcome["straggler_percentage"] < 100
        assert outcome["mean_ms"] <= outcome["step_ms"]
    fit, came_from = simulate.compute_of(out)
    assert fit.to_dict() == found["fit"]
    assert "CPU, one thread" in came_from
    assert simulate.compute_of(out, layers=2)[0].item == 2 * fit.item
    assert picture.read_bytes().startswith(b"\x89PNG")
    (result,) = tmp_path.glob("*-virtual_ranks.md")
    assert "only the barrier is computed" in " ".join(result.read_text().split())


def test_a_budget_that_is_spent_leaves_points_out_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", "--base", "2000", "2", "2", "--world-size", "4", "--width", "8", "--repeats", "1"]
    assert virtual_ranks.main([*small, "--limit-s", "0"]) == 0
    assert "2,000 / 2 / 4: left out" in capsys.readouterr().out


def test_a_point_that_fails_is_said_and_the_others_are_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = Study.measure

    def out_of_memory_at_8(study: Study, point: Point, batches: int, advance: Callable[[], None]) -> list[Outcome]:
        if point.batch_size == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.\nA long explanation")
        return measure(study, point, batches, advance)

    monkeypatch.setattr(Study, "measure", out_of_memory_at_8)
    out = tmp_path / "virtual.json"
    small = ["--device", "cpu", "--base", "2000", "2", "2", "--batch-size", "8", "4", "--width", "8", "--repeats", "1"]
    assert virtual_ranks.main([*small, "--json", str(out)]) == 1
    assert "2,000 / 8 / 2: failed, CUDA out of memory." in capsys.readouterr().out
    assert {each["batch_size"] for each in json.loads(out.read_text())["outcomes"]} == {2, 4}


def test_outcomes_of_several_runs_are_means_over_all_their_global_batches() -> None:
    one = Outcome(21000, 128, 64, "FBS", 1, 2.0, 2.0, 2.0, 0.5, 100.0, 103.0)
    three = Outcome(21000, 128, 64, "FBS", 3, 4.0, 1.0, 6.0, 0.7, 104.0, 107.0)
    other = Outcome(8000, 128, 64, "FBS", 1, 1.0, 1.0, 1.0, 0.3, 50.0, 51.0)
    together, alone = pooled([one, other, three])
    assert (together.batches, together.straggler_percentage) == (4, 3.5)
    assert (together.straggler_percentage_least, together.straggler_percentage_most) == (1.0, 6.0)
    assert together.sparsity == pytest.approx(0.65)
    assert (together.mean_ms, together.step_ms) == (103.0, 106.0)
    assert alone == other


def test_runs_are_put_together_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", "--base", "2000", "2", "2", "--width", "8", "--repeats", "1"]
    paths = [str(tmp_path / f"{seed}.json") for seed in (1, 2)]
    assert virtual_ranks.main([*small, "--seed", "1", "--json", paths[0]]) == 0
    assert virtual_ranks.main([*small, "--seed", "2", "--world-size", "4", "--json", paths[1]]) == 0
    out, picture = tmp_path / "both.json", tmp_path / "both.png"
    arguments = ["--json", str(out), "--plot", str(picture), "--results", str(tmp_path)]
    assert virtual_ranks.main(["--read", *paths, *arguments]) == 0
    runs, both = [json.loads(Path(path).read_text()) for path in paths], json.loads(out.read_text())
    assert {(o["world_size"], o["batches"]) for o in both["outcomes"]} == {(2, 2), (4, 1)}
    base = [run["outcomes"][0]["straggler_percentage"] for run in runs]
    assert both["outcomes"][0]["straggler_percentage"] == pytest.approx(sum(base) / 2)
    assert both["fit"] == runs[1]["fit"], "of the run that timed more"
    assert both["environment"]["command"].count(";") == 1
    assert picture.exists()
    assert next(tmp_path.glob("*-virtual_ranks.md")).read_text().count("2,000 / 2 / 2, FBS") == 1
    assert simulate.compute_of(out)[0].to_dict() == both["fit"]
    capsys.readouterr()
    Path(paths[1]).write_text(json.dumps(runs[1] | {"device": "another"}))
    assert virtual_ranks.main(["--read", *paths]) == 2
    assert "device is 'another'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "7", "--heads", "2"], "--width must be a multiple of --heads"),
        (["--length-scale", "0"], "--length-scale must be over 0"),
        (["--lengths", "gamma"], "no file 'gamma'"),
    ],
)
def test_mistakes_are_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert virtual_ranks.main(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
