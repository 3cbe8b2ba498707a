"""The loop beside the balancer's thread: what bench.loader_overhead measures, and how it compares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from freescale.bench import loader_overhead


@pytest.mark.multirank
def test_the_overhead_is_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measurements = tmp_path / "found.json"
    few = ["--step-ms", "2", "--block-steps", "3", "--blocks", "2", "--batch-size", "4", "--ranks", "2"]
    assert loader_overhead.main([*few, "--json", str(measurements), "--results", str(tmp_path)]) == 0
    (found,) = json.loads(measurements.read_text())["runs"]
    assert set(found["stages"]) == set(found["counted"]) == {"load", "gather_lengths", "plan", "shuffle"}
    assert all(stage["cpu_ms"] > 0 and stage["calls"] == 0 for stage in found["stages"].values())
    assert min(stage["calls"] for stage in found["counted"].values()) > 20
    assert np.shape(found["idle"]) == np.shape(found["beside"]) == np.shape(found["waited"]) == (2, 3)
    assert len(loader_overhead.slowdowns(found)) == 2
    assert "slower beside the working balancer" in capsys.readouterr().out
    assert list(tmp_path.glob("*-loader_overhead.md"))


def test_a_slowdown_compares_neighbouring_blocks() -> None:
    found = {"idle": [[10.0, 10.0, 50.0], [20.0, 20.0, 20.0]], "beside": [[11.0, 11.0, 11.0], [20.0, 21.0, 20.0]]}
    assert loader_overhead.slowdowns(found) == pytest.approx([10.0, 0.0])
