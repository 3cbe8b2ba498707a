"""The kernel benchmark times only what is right, and says where its figures come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freescale.bench import kernel_cases, kernels
from freescale.bench.kernel_cases import Case, Inputs


def test_a_short_run_writes_figures_a_picture_and_a_dated_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    choice = ["--device", "cpu", "--rows", "int64", "--lengths", "uniform", "--world-size", "2", "4"]
    files = ["--json", str(tmp_path / "k.json"), "--plot", str(tmp_path / "k.png"), "--results", str(tmp_path)]
    try:
        status = kernels.main([*choice, *files, "--operation", "dispatch", "transpose"])
    finally:
        torch.set_num_threads(threads)
    assert status == 0
    found = json.loads((tmp_path / "k.json").read_text())
    assert {"processor", "command", "software"} <= set(found["environment"])
    ours = [outcome for outcome in found["outcomes"] if outcome["way"] == "ours"]
    assert {(outcome["operation"], outcome["world_size"]) for outcome in ours} == {
        (operation, size) for operation in ("dispatch", "transpose") for size in (2, 4)
    }
    assert all(outcome["correct"] and outcome["call_ms"] > 0 for outcome in ours)
    assert (tmp_path / "k.png").stat().st_size > 1000
    (report,) = tmp_path.glob("*-kernels-cpu.md")
    assert "dispatch, int64 rows, cpu" in report.read_text()
    assert "loop / ours" in capsys.readouterr().out


def test_a_wrong_output_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        values = kernel_cases.expected(Case("permute", "int32", "giant", 2, 20), inputs).clone()
        values[-1] += 1
        return (values,)

    monkeypatch.setitem(kernel_cases._PLAIN["permute"], "vectorised", wrong)
    outcomes = {o.way: o for o in kernels.measure(Case("permute", "int32", "giant", 2, 20), "cpu", loop=False)}
    assert outcomes["ours"].correct
    assert not outcomes["vectorised"].correct
    assert outcomes["vectorised"].call_ms is None
    assert outcomes["vectorised"].remark == "wrong output, not timed"


@pytest.mark.parametrize("operation", [*kernel_cases.OPERATIONS, "bucketize"])
def test_every_way_gives_the_same_rows(operation: str) -> None:
    rows = "int64" if operation == "bucketize" else "fp16x128"
    case = Case(operation, rows, "long 40" if operation == "bucketize" else "lognormal", 4, 10)
    inputs = kernel_cases.make_inputs(case, "cpu", seed=3)
    ways = kernel_cases.ways(case)
    assert {"loop", "vectorised", "ours"} <= set(ways)
    results = {name: way(inputs)[0] for name, way in ways.items() if not name.startswith("FBGEMM")}
    for name, result in results.items():
        assert torch.equal(result, kernel_cases.expected(case, inputs)), name
