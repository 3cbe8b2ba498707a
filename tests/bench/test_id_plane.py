"""A loop beside the id plane: what is measured, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freescale.bench import id_plane


@pytest.mark.multirank
def test_the_cost_of_the_id_plane_is_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measurements = tmp_path / "found.json"
    few = ["--step-ms", "2", "--block-steps", "6", "--blocks", "2", "--cut", "20", "--ranks", "2"]
    assert id_plane.main([*few, "--json", str(measurements), "--results", str(tmp_path)]) == 0
    (found,) = json.loads(measurements.read_text())["runs"]
    assert found["ids"] > 128
    for name in ("idle", "beside", "waited", "idle_sleeps", "beside_sleeps"):
        assert [len(block) for block in found[name]] == [6, 6], name
    assert set(found["threads"]) == set(found["calls"]) == {"ask", "talk", "index"}
    assert sum(found["threads"].values()) > 0
    assert found["calls"]["ask"] > 20
    assert found["calls"]["index"] > 100
    assert "slower beside the working id plane" in capsys.readouterr().out
    assert list(tmp_path.glob("*-id_plane.md"))
